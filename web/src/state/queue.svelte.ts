// Messages of the user that wait for the end of a reply or are being sent, by conversation; null: a new one. The browser stores
// them until the server has.
import type { Attachment } from '../components/attachments'
import type { Stored, StoredPart } from '../transport/types'
import type { Draft } from './drafts'
import { load, PREFIX, save } from './storage'
import { tab } from './tab.svelte'
import { user } from './user.svelte'

export interface QueuedMessage extends Draft {
  /** The end of the branch on which it was queued; none if that was empty. */
  behind?: string
  /** The tab that sends it, and since when, in milliseconds. */
  tab?: string
  since?: number
}

/** The storage names of queues begin so, those of the user. */
export const QUEUES = 'queue.'
const storageKey = (conversation: string | null): string => user.key(`${QUEUES}${conversation ?? 'new'}`)

class Queue {
  #version = $state(0)

  list(conversation: string | null): QueuedMessage[] {
    void this.#version
    if (user.name === null) return []
    const stored = load<QueuedMessage[]>(storageKey(conversation), [])
    return Array.isArray(stored) ? stored.filter((one) => typeof one?.text === 'string' && Array.isArray(one.files)) : []
  }

  /** Adds the message, or replaces the one with its key. Returns false if the browser's storage is full. */
  put(conversation: string | null, message: QueuedMessage): boolean {
    const messages = this.list(conversation)
    const isNew = messages.every((one) => one.key !== message.key)
    return this.#save(conversation, isNew ? [...messages, message] : messages.map((one) => (one.key === message.key ? message : one)))
  }

  remove(conversation: string | null, key: string): void {
    this.#save(conversation, this.list(conversation).filter((one) => one.key !== key))
  }

  /** A message was stored. What was queued behind the same message as it follows it, in tabs that do not show it yet, too. */
  removeSent(conversation: string | null, { key, after }: QueuedMessage, id: string): void {
    const others = this.list(conversation).filter((one) => one.key !== key)
    this.#save(conversation, others.map((one) => ((one.behind ?? '') === after ? { ...one, behind: id } : one)))
  }

  /** Another tab changed the browser's storage. */
  handleStorage(key: string | null): void {
    if (key === null || (user.name !== null && key.startsWith(PREFIX + user.key(QUEUES)))) this.#version += 1
  }

  #save(conversation: string | null, messages: QueuedMessage[]): boolean {
    if (user.name === null) return false
    const saved = save(storageKey(conversation), messages.length > 0 ? messages : null)
    this.#version += 1
    return saved
  }
}

export const queue = new Queue()

const SENDING_MS = 600_000 // after that other tabs may send it: the tab that did may show something else since a reload

/** The message as one that this tab sends, after a leaf. */
export function asSent(message: Draft, after: string): QueuedMessage {
  return { ...message, after, tab: tab.name, since: Date.now() }
}

/** The message as one that waits for the end of a reply on this branch. */
export function asQueued(message: Draft, path: readonly Stored[]): QueuedMessage {
  const leaf = path.at(-1)?.id
  return leaf === undefined ? message : { ...message, behind: leaf }
}

/** The message as it is written. */
export function asDraft({ text, files, key }: QueuedMessage): Draft {
  return { text, files, key }
}

/** Whether this tab has sent the message, before a reload. */
export function isSentHere(message: QueuedMessage): boolean {
  return tab.confirmed && message.tab === tab.name
}

/** Whether another tab sends this message, which is its business then. */
export function isSentElsewhere(message: QueuedMessage): boolean {
  if (message.tab === undefined || isSentHere(message)) return false
  return tab.isOpen(message.tab) && Date.now() - (message.since ?? 0) < SENDING_MS
}

/**
 * Whether the message was written on this branch. On another one it is not sent by itself. One that the server may have is sent again
 * in its own place only.
 */
export function belongsTo({ after, behind }: QueuedMessage, path: readonly Stored[]): boolean {
  if (after !== undefined) return (path.at(-1)?.id ?? '') === after
  return !behind || path.some((one) => one.id === behind)
}

/** Finds out which of the tabs that send these messages are closed. */
export function checkSenders(messages: readonly QueuedMessage[]): void {
  for (const message of messages) if (message.tab !== undefined) tab.check(message.tab)
}

/** Whether the branch contains this message already: the page was left while it was sent, or the response was lost. */
export function wasSent(message: Draft, path: readonly Stored[]): boolean {
  if (message.after === undefined) return false
  const place = message.after === '' ? 0 : path.findIndex((one) => one.id === message.after) + 1
  const next = message.after !== '' && place === 0 ? undefined : path[place]
  const [part, ...others] = next?.parts ?? []
  if (next?.role !== 'user' || part?.type !== 'text' || part.text.trim() !== message.text.trim()) return false
  return others.length === message.files.length && message.files.every((file, index) => isFile(others[index]!, file))
}

function isFile(part: StoredPart, file: Attachment): boolean {
  if ('blob' in file) return part.type === 'blob' && part.digest === file.blob.digest
  return part.type === 'text' && part.text.endsWith(file.text)
}
