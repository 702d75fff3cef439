// The view of each reply: text, tokens, raw text, diffusion steps or statistics.
import { SvelteMap } from 'svelte/reactivity'

export type Look = 'text' | 'tokens' | 'raw' | 'steps' | 'statistics'

class Looks {
  #looks = new SvelteMap<string, Look>()

  get(id: string): Look {
    return this.#looks.get(id) ?? 'text'
  }

  set(id: string, look: Look): void {
    this.#looks.set(id, look)
  }
}

export const looks = new Looks()
