// What is being looked for, and which thoughts are opened for it: folded ones have no text on the page.
import { SvelteSet } from 'svelte/reactivity'

class Finder {
  /** What is looked for in the open conversation; empty: nothing. */
  text = $state('')
  readonly #pattern = $derived(patternOf(this.text))
  /** Replies to which a search led because of what they thought. */
  readonly thoughts = new SvelteSet<string>()

  /** Whether this text has what is looked for. */
  isIn(text: string): boolean {
    return this.#pattern !== null && text.search(this.#pattern) >= 0
  }
}

/** Finds a text in any case; a space stands for any white space. Null for nothing. */
export function patternOf(text: string): RegExp | null {
  const words = text.trim()
  if (words === '') return null
  return new RegExp(words.split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('\\s+'), 'giu')
}

export const finder = new Finder()
