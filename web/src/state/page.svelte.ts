// The page as a whole: who is signed in, whether the server is there, which conversation is open.
import * as api from '../transport/api'
import { newKey, Refused } from '../transport/http'
import { Stream } from '../transport/stream'
import type { Change, Create } from '../transport/types'
import { Conversation } from './conversation.svelte'
import { conversations } from './conversations.svelte'
import { model } from './model.svelte'
import { notices } from './notices.svelte'
import { route } from './route.svelte'

class Page {
  session: api.Session | null = $state.raw(null)
  /** Whether the server wants a key before it says anything. */
  locked = $state(false)
  connected = $state(true)
  conversation: Conversation | null = $state.raw(null)
  readonly stream = new Stream({
    changed: (change) => this.#changed(change),
    opened: () => this.#opened(),
    connected: (is) => (this.connected = is),
    unauthorized: () => (this.locked = true),
  })

  async begin(): Promise<void> {
    document.addEventListener('visibilitychange', () => this.#seen())
    addEventListener('online', () => this.#seen())
    addEventListener('offline', () => (this.connected = false))
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
    this.conversation?.close()
    this.conversation = id === null ? null : new Conversation(id, this.stream)
    await this.conversation?.open(at)
  }

  /** A conversation of one's own making, open at once. */
  async create(asked: Create): Promise<Conversation | null> {
    try {
      const made = await api.create(asked, newKey())
      const opened = this.open(made.id)
      route.replace(made.id)
      await opened
      conversations.refresh()
      return this.conversation
    } catch (error) {
      notices.fail(error)
      return null
    }
  }

  async #enter(): Promise<void> {
    try {
      this.session = await api.session()
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) {
        this.connected = false
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

  #opened(): void {
    conversations.refresh()
    void model.look()
    this.conversation?.look()
  }

  #changed(change: Change): void {
    conversations.refresh()
    if (change.what === 'missed' || change.conversation_id === this.conversation?.id) this.conversation?.changed(change)
  }
}

export const page = new Page()
