// The message that is read aloud: one at a time.

class Voice {
  /** The message whose player is open. */
  speaking: string | null = $state(null)
  #played = new Set<string>()

  play(id: string): void {
    this.#played.add(id)
    this.speaking = id
  }

  /** Reads a streaming reply aloud, unless it was played before. */
  playOnce(id: string): void {
    if (!this.#played.has(id)) this.play(id)
  }

  stop(id: string): void {
    if (this.speaking === id) this.speaking = null
  }
}

export const voice = new Voice()
