// The page as a whole: who is signed in, whether the server is there, which conversation is open.
import * as api from '../transport/api'
import { ApiError, newKey } from '../transport/http'
import { Stream } from '../transport/stream'
import type { Change, Create, Part } from '../transport/types'
import { Conversation } from './conversation.svelte'
import { conversations } from './conversations.svelte'
import { model } from './model.svelte'
import { notices } from './notices.svelte'
import { route } from './route.svelte'

/** Whether a message was sent, and where it belongs: a failed one is a draft there. */
export interface Sent {
  sent: boolean
  home: string | null
}

class Page {
  session: api.Session | null = $state.raw(null)
  /** Whether the server wants a key before it says anything. */
  locked = $state(false)
  connected = $state(true)
  conversation: Conversation | null = $state.raw(null)
  readonly stream = new Stream({
    onChange: (change) => this.#handleChange(change),
    onOpen: () => this.#handleOpen(),
    onConnection: (connected) => this.#setConnected(connected),
    onUnauthorized: () => (this.locked = true),
  })

  async enter(): Promise<void> {
    document.addEventListener('visibilitychange', () => this.#seen())
    addEventListener('online', () => this.#seen())
    addEventListener('offline', () => this.#setConnected(false))
    await this.#enter()
  }

  async signIn(key: string): Promise<string | null> {
    try {
      this.session = await api.signIn(key)
      await this.#enter()
      return null
    } catch (error) {
      return error instanceof Error ? error.message : String(error)
    }
  }

  async signOut(): Promise<void> {
    await api.signOut().catch(() => undefined)
    this.stream.release()
    location.reload()
  }

  async open(id: string | null, at: string | null = null): Promise<void> {
    if ((this.conversation?.id ?? null) === id) {
      if (at) await this.conversation?.goTo(at)
      return
    }
    notices.settle('running', 'action', 'file')
    await this.#show(id, at)
  }

  async #show(id: string | null, at: string | null = null): Promise<void> {
    this.conversation?.close()
    this.conversation = id === null ? null : new Conversation(id, this.stream)
    await this.conversation?.open(at)
  }

  /** Sends the first message of a new conversation. It is opened at once, unless its writer has gone elsewhere. */
  async begin(asked: Create, parts: Part[], key: string, made: (id: string) => void = () => undefined): Promise<Sent> {
    let id: string
    try {
      id = (await api.createConversation(asked, newKey())).id
    } catch (error) {
      notices.fail(error)
      return { sent: false, home: null }
    }
    made(id)
    const conversation = await this.#made(id)
    conversations.refresh()
    const sent = await conversation.say(parts, key)
    if (sent || conversation.leaf !== null || !(await this.#discard(id))) return { sent, home: id }
    if (this.conversation?.id === id) {
      await this.#show(null)
      route.replace(null)
    }
    return { sent: false, home: null }
  }

  /** The conversation that was just made, on the page where that is still at a new one. */
  async #made(id: string): Promise<Conversation> {
    if (route.conversation !== null) {
      const elsewhere = new Conversation(id, this.stream)
      elsewhere.close()
      return elsewhere
    }
    const opened = this.open(id)
    const made = this.conversation! // whoever goes elsewhere now leaves it behind
    route.replace(id)
    await opened
    return made
  }

  /** Deletes a conversation that has no message after all. */
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

  async #enter(): Promise<void> {
    try {
      this.session = await api.getSession()
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) {
        this.#setConnected(false)
        setTimeout(() => void this.#enter(), 1000)
        return
      }
    }
    this.locked = this.session !== null && this.session.needs_key && !this.session.signed_in
    if (this.locked) return
    if (document.visibilityState === 'visible') this.stream.resume()
    await Promise.all([model.look(), model.lookForNames(), conversations.look()])
  }

  /** One connection for a page that is looked at, none for one that is not. */
  #seen(): void {
    if (this.locked) return
    if (document.visibilityState === 'visible') this.stream.resume()
    else this.stream.release()
  }

  #setConnected(connected: boolean): void {
    this.connected = connected
    if (connected) notices.settle('connection')
    else this.conversation?.disconnected()
  }

  #handleOpen(): void {
    conversations.refresh()
    void model.look()
    this.conversation?.look()
  }

  #handleChange(change: Change): void {
    conversations.refresh()
    if (change.what === 'missed' || change.conversation_id === this.conversation?.id) this.conversation?.changed(change)
  }
}

export const page = new Page()
