// The settings of comparisons: the columns that each message of a conversation is sent to.
//
// A comparison belongs to the conversation in which it was started, in this tab. The browser stores the columns that its user used last.
import type { Column } from '../transport/types'
import { load, loadFromTab, save, saveToTab } from './storage'
import { user } from './user.svelte'

export interface CompareSettings {
  blind: boolean
  columns: Column[]
}

const NEW = '' // stands for a new conversation
const STORED = 'compare'
const DEFAULTS: CompareSettings = { blind: false, columns: [{ parameters: {} }, { parameters: { temperature: 1.2 } }] }

class CompareMode {
  /** What the next comparison begins with. */
  last: CompareSettings = $state.raw(DEFAULTS)
  #active: Record<string, CompareSettings> = $state.raw({})

  /** Loads those of the user, who is known now. */
  load(): void {
    const { blind, columns } = load<CompareSettings>(user.key(STORED), DEFAULTS)
    if (Array.isArray(columns) && columns.length >= 2) this.last = { blind: blind === true, columns }
    this.#active = { ...loadFromTab<Record<string, CompareSettings>>(user.key(STORED)), ...this.#active }
  }

  /** The settings by which the messages of a conversation are compared, or null; null stands for a new conversation. */
  get(conversation: string | null): CompareSettings | null {
    return this.#active[conversation ?? NEW] ?? null
  }

  start(conversation: string | null, settings: CompareSettings): void {
    this.last = settings
    if (user.name !== null) save(user.key(STORED), settings)
    this.#set({ ...this.#active, [conversation ?? NEW]: settings })
  }

  stop(settings: CompareSettings): void {
    this.#set(Object.fromEntries(Object.entries(this.#active).filter(([, one]) => one !== settings)))
  }

  /** A new conversation was created, or discarded. */
  move(from: string | null, to: string | null): void {
    const { [from ?? NEW]: settings, ...others } = this.#active
    if (settings) this.#set({ ...others, [to ?? NEW]: settings })
  }

  #set(active: Record<string, CompareSettings>): void {
    this.#active = active
    if (user.name !== null) saveToTab(user.key(STORED), Object.keys(active).length > 0 ? active : null)
  }
}

export const compareMode = new CompareMode()
