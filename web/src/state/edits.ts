// The unsaved edits of messages. Each tab keeps its own, also over a reload, until they are saved or cancelled.
import { SvelteMap, SvelteSet } from 'svelte/reactivity'
import type { Part } from '../transport/types'
import { loadFromTab, saveToTab } from './storage'
import { user } from './user.svelte'

export interface Edit {
  text: string
  thought: string
  /** The parts of a user message after its text. */
  files: Part[]
  /** The parts that could not be saved, and their idempotency key: they are stored once. */
  failed?: { parts: string; key: string }
}

const storageKey = (message: string): string => user.key(`edit.${message}`)

class Edits {
  #changed = new SvelteMap<string, Edit | null>()
  #saving = new SvelteSet<string>()

  /** The edit of the message; null if there is none, or while it is saved. */
  get(message: string): Edit | null {
    return this.#saving.has(message) ? null : this.#load(message)
  }

  set(message: string, edit: Edit): void {
    this.#changed.set(message, edit)
    if (user.name !== null) saveToTab(storageKey(message), edit)
  }

  /** Adds files that were read while another conversation was shown, unless the edit was cancelled. */
  attach(message: string, files: Part[]): void {
    const edit = this.#load(message)
    if (edit) this.set(message, { ...edit, files: [...edit.files, ...files] })
  }

  remove(message: string): void {
    this.#changed.set(message, null)
    if (user.name !== null) saveToTab(storageKey(message), null)
  }

  isSaving(message: string): boolean {
    return this.#saving.has(message)
  }

  /** Saves the edit. It is open again, also where its conversation was left meanwhile, if it could not be saved. */
  async save(message: string, write: () => Promise<boolean>): Promise<void> {
    this.#saving.add(message)
    if (await write()) this.remove(message)
    this.#saving.delete(message)
  }

  #load(message: string): Edit | null {
    const changed = this.#changed.get(message)
    if (changed !== undefined || user.name === null) return changed ?? null
    const stored = loadFromTab<Edit>(storageKey(message))
    const isWhole = typeof stored?.text === 'string' && typeof stored.thought === 'string' && Array.isArray(stored.files)
    return isWhole ? stored : null
  }
}

export const edits = new Edits()
