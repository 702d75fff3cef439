// What is being read aloud on this page: one message at a time.

class Voice {
  /** The message whose player is there. */
  speaking: string | null = $state(null)
  #begun = new Set<string>()

  play(id: string): void {
    this.#begun.add(id)
    this.speaking = id
  }

  /** A reply that began to come: it is read once, and not again after it was stopped. */
  begin(id: string): void {
    if (!this.#begun.has(id)) this.play(id)
  }

  stop(id: string): void {
    if (this.speaking === id) this.speaking = null
  }
}

export const voice = new Voice()
