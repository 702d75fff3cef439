// Messages that wait for the end of a reply, for each conversation. The browser keeps them until the server has stored them.
import type { Stored } from '../transport/types'
import type { Draft } from './drafts'
import { load, save } from './storage'

export interface Queued extends Draft {
  /** The end of the branch behind which it was sent. */
  after?: string
}

const PREFIX = 'palaver.queue.'
const storageKey = (conversation: string): string => `queue.${conversation}`

class Queue {
  #version = $state(0)

  of(conversation: string | null): Queued[] {
    void this.#version
    const found = conversation === null ? [] : load<Queued[]>(storageKey(conversation), [])
    return Array.isArray(found) ? found.filter((one) => typeof one?.text === 'string' && Array.isArray(one.files)) : []
  }

  /** False if the browser has no room for it. */
  add(conversation: string, message: Draft): boolean {
    return this.#keep(conversation, [...this.of(conversation), message])
  }

  remove(conversation: string, key: string): void {
    this.#keep(conversation, this.of(conversation).filter((one) => one.key !== key))
  }

  /** Notes where the first one was sent, so that a page that is loaded again doesn't send it twice. */
  mark(conversation: string, key: string, after: string): void {
    this.#keep(conversation, this.of(conversation).map((one) => (one.key === key ? { ...one, after } : one)))
  }

  /** Another tab changed the browser's storage. */
  changed(key: string | null): void {
    if (key === null || key.startsWith(PREFIX)) this.#version += 1
  }

  #keep(conversation: string, messages: Queued[]): boolean {
    const done = save(storageKey(conversation), messages.length > 0 ? messages : null)
    this.#version += 1
    return done
  }
}

export const queue = new Queue()

/** Whether the branch holds this message already: it was sent, and the page was closed before it knew. */
export function wasSent(message: Queued, path: readonly Stored[]): boolean {
  const next = path[path.findIndex((one) => one.id === message.after) + 1]
  const [part] = next?.parts ?? []
  return message.after !== undefined && next?.role === 'user' && part?.type === 'text' && part.text.trim() === message.text.trim()
}
