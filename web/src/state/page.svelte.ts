// The state of the page: the session, the connection, the open conversation.
import * as api from '../transport/api'
import { ApiError } from '../transport/http'
import { Stream } from '../transport/stream'
import type { Change, Create, Part } from '../transport/types'
import { removeOrphans } from './cleanup'
import { compareMode } from './compare.svelte'
import { Conversation } from './conversation.svelte'
import { conversations } from './conversations.svelte'
import { model } from './model.svelte'
import { notices } from './notices.svelte'
import { preferences } from './preferences.svelte'
import { route } from './route.svelte'
import { tab } from './tab.svelte'
import { user } from './user.svelte'

const RELOAD_MS = 2000 // after that a page that was to be loaded again is still there: the user has stayed, to keep an edit

/** A message that was sent: its id. One that was not, null, becomes a draft of the conversation it belongs to. */
export interface SendResult {
  sent: string | null
  home: string | null
}

class Page {
  session: api.Session | null = $state.raw(null)
  /** Whether the server requires a key. */
  locked = $state(false)
  connected = $state(true)
  conversation: Conversation | null = $state.raw(null)
  #isClean = false
  readonly stream = new Stream({
    onChange: (change) => this.#handleChange(change),
    onOpen: () => this.#handleOpen(),
    onConnection: (connected) => this.#setConnected(connected),
    onUnauthorized: () => this.#lock(),
  })

  async start(): Promise<void> {
    tab.start()
    document.addEventListener('visibilitychange', () => this.#handleVisibility())
    addEventListener('online', () => this.#handleVisibility())
    addEventListener('storage', (event) => user.isChange(event) && void this.#checkUser())
    addEventListener('offline', () => this.#setConnected(false))
    await this.#connect()
  }

  async signIn(key: string): Promise<string | null> {
    try {
      const session = await api.signIn(key)
      if (user.name !== null && user.name !== session.name) this.#reload()
      else await this.#connect()
      return null
    } catch (error) {
      return error instanceof Error ? error.message : String(error)
    }
  }

  async signOut(): Promise<void> {
    await api.signOut().catch(() => undefined)
    user.forget()
    this.#reload()
  }

  async open(id: string | null, at: string | null = null): Promise<void> {
    if ((this.conversation?.id ?? null) === id) {
      if (at) await this.conversation?.goTo(at)
      return
    }
    notices.clear('running', 'action', 'file')
    await this.#show(id, at)
  }

  async #show(id: string | null, at: string | null = null): Promise<void> {
    this.conversation?.close()
    this.conversation = id === null ? null : new Conversation(id, this.stream)
    await this.conversation?.open(at)
  }

  /**
   * Creates a conversation and sends its first message. It is opened unless the user has navigated away. Its key comes from that of
   * the message: a message that is sent again after a reload finds the conversation that was created for it.
   */
  async startConversation(request: Create, parts: Part[], key: string, onCreate: (id: string) => void = () => undefined): Promise<SendResult> {
    let id: string
    try {
      id = (await api.createConversation(request, `${key} conversation`)).id
    } catch (error) {
      notices.showError(error)
      return { sent: null, home: null }
    }
    onCreate(id)
    compareMode.move(null, id)
    const conversation = await this.#openCreated(id)
    conversations.loadSoon()
    const sent = await conversation.send(parts, key)
    if (sent || conversation.leaf !== null || !(await this.#discard(id))) return { sent, home: id }
    compareMode.move(id, null)
    if (this.conversation?.id === id) {
      await this.#show(null)
      route.replace(null)
    }
    return { sent: null, home: null }
  }

  /** Opens the created conversation if the page still shows a new one. */
  async #openCreated(id: string): Promise<Conversation> {
    if (route.conversation !== null) {
      const elsewhere = new Conversation(id, this.stream)
      elsewhere.close()
      return elsewhere
    }
    const opened = this.open(id)
    const created = this.conversation! // set by open() before its first await
    route.replace(id)
    await opened
    return created
  }

  /** Deletes a conversation without messages. Returns whether it was deleted. */
  async #discard(id: string): Promise<boolean> {
    try {
      if ((await api.getConversation(id)).head_id !== null) return false
      await api.deleteConversation(id)
      conversations.forget(id)
      return true
    } catch {
      return false
    }
  }

  async #connect(): Promise<void> {
    let session: api.Session | null = null
    try {
      session = await api.getSession()
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) {
        this.#setConnected(false)
        if (user.assumeLast()) compareMode.load()
        setTimeout(() => void this.#connect(), 1000)
        return
      }
    }
    if (session?.needs_key && !session.signed_in) {
      this.session = session
      return this.#lock()
    }
    const isFirst = user.name === null
    if (!user.identify(session?.name)) return this.#reload()
    if (isFirst) compareMode.load()
    this.session = session
    this.locked = false
    if (document.visibilityState === 'visible') this.stream.resume()
    await Promise.all([model.refresh(), model.loadNames(), conversations.load()])
    void this.#cleanUp()
  }

  /** Once for each page. It is tried again with the next one. */
  async #cleanUp(): Promise<void> {
    if (this.#isClean) return
    this.#isClean = true
    await removeOrphans().catch(() => undefined)
  }

  /** Asks for a key. */
  #lock(): void {
    this.locked = true
    user.forget()
  }

  /** Another tab has signed in or out: the requests of this one count for that user, too. */
  async #checkUser(): Promise<void> {
    if (user.name === null) return
    const session = await api.getSession().catch(() => null)
    if (session?.name !== user.name) this.#reload() // also where it stays unknown: a request of this page may count for another user
  }

  /** Loads the page again, without what the user of this one has seen and written. */
  #reload(): void {
    this.stream.release()
    location.reload()
    setTimeout(() => (this.locked = true), RELOAD_MS)
  }

  /** Connects a visible page and disconnects a hidden one. */
  #handleVisibility(): void {
    if (this.locked) return
    if (document.visibilityState === 'visible') this.stream.resume()
    else this.releaseIfHidden()
  }

  /** A hidden page stays connected only to tell the end of a reply. */
  releaseIfHidden(): void {
    if (document.visibilityState === 'visible' || (preferences.notifies && this.conversation?.isBusy)) return
    this.stream.release()
  }

  #setConnected(connected: boolean): void {
    this.connected = connected
    if (connected) notices.clear('connection')
    else this.conversation?.handleDisconnect()
  }

  #handleOpen(): void {
    conversations.loadSoon()
    void model.refresh()
    this.conversation?.refresh()
  }

  #handleChange(change: Change): void {
    conversations.loadSoon()
    if (change.what === 'missed' || change.conversation_id === this.conversation?.id) this.conversation?.handleChange(change)
  }
}

export const page = new Page()
