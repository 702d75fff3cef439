// How each reply is looked at: as text, token by token, raw, by the steps it was denoised in, or with its statistics.
import { SvelteMap } from 'svelte/reactivity'

export type Look = 'text' | 'tokens' | 'raw' | 'steps' | 'statistics'

class Looks {
  #looks = new SvelteMap<string, Look>()

  of(id: string): Look {
    return this.#looks.get(id) ?? 'text'
  }

  set(id: string, look: Look): void {
    this.#looks.set(id, look)
  }
}

export const looks = new Looks()
