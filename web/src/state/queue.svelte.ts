// Messages that wait for the end of a reply, by conversation. The browser stores them until the server has.
import type { Stored } from '../transport/types'
import type { Draft } from './drafts'
import { load, save } from './storage'

export interface QueuedMessage extends Draft {
  /** The leaf after which it was sent. */
  after?: string
}

const PREFIX = 'palaver.queue.'
const storageKey = (conversation: string): string => `queue.${conversation}`

class Queue {
  #version = $state(0)

  list(conversation: string | null): QueuedMessage[] {
    void this.#version
    const stored = conversation === null ? [] : load<QueuedMessage[]>(storageKey(conversation), [])
    return Array.isArray(stored) ? stored.filter((one) => typeof one?.text === 'string' && Array.isArray(one.files)) : []
  }

  /** Returns false if the browser's storage is full. */
  add(conversation: string, message: Draft): boolean {
    return this.#save(conversation, [...this.list(conversation), message])
  }

  remove(conversation: string, key: string): void {
    this.#save(conversation, this.list(conversation).filter((one) => one.key !== key))
  }

  /** Records the leaf after which a message was sent, so that a reloaded page does not send it twice. */
  markSent(conversation: string, key: string, after: string): void {
    this.#save(conversation, this.list(conversation).map((one) => (one.key === key ? { ...one, after } : one)))
  }

  /** Another tab changed the browser's storage. */
  handleStorage(key: string | null): void {
    if (key === null || key.startsWith(PREFIX)) this.#version += 1
  }

  #save(conversation: string, messages: QueuedMessage[]): boolean {
    const saved = save(storageKey(conversation), messages.length > 0 ? messages : null)
    this.#version += 1
    return saved
  }
}

export const queue = new Queue()

/** Whether the branch contains this message already, because the page was closed while it was sent. */
export function wasSent(message: QueuedMessage, path: readonly Stored[]): boolean {
  const next = path[path.findIndex((one) => one.id === message.after) + 1]
  const [part] = next?.parts ?? []
  return message.after !== undefined && next?.role === 'user' && part?.type === 'text' && part.text.trim() === message.text.trim()
}
