// The search text and the thoughts that are opened for it: collapsed thoughts have no text in the DOM.
import { SvelteSet } from 'svelte/reactivity'

class Finder {
  /** The search text in the open conversation; empty: no search. */
  text = $state('')
  readonly #pattern = $derived(createPattern(this.text))
  /** Replies that a search found by their thoughts. */
  readonly thoughts = new SvelteSet<string>()

  /** Whether a text contains the search text. */
  matches(text: string): boolean {
    return this.#pattern !== null && text.search(this.#pattern) >= 0
  }
}

/** Creates a case-insensitive pattern; a space matches any white space. Null for an empty text. */
export function createPattern(text: string): RegExp | null {
  const words = text.trim()
  if (words === '') return null
  return new RegExp(words.split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('\\s+'), 'giu')
}

export const finder = new Finder()
