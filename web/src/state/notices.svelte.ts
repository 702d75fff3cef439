// What the page tells a person in passing.

export interface Told {
  id: number
  text: string
  bad: boolean
  act: { label: string; run: () => void } | null
}

class Notices {
  told: Told[] = $state([])
  #next = 1

  tell(text: string, act: Told['act'] = null): void {
    this.#add({ id: this.#next++, text, bad: false, act }, 6000)
  }

  fail(error: unknown): void {
    const text = error instanceof Error ? error.message : String(error)
    this.#add({ id: this.#next++, text, bad: true, act: null }, 12_000)
  }

  dismiss(id: number): void {
    this.told = this.told.filter((one) => one.id !== id)
  }

  #add(told: Told, stays: number): void {
    this.told = [...this.told.slice(-3), told]
    setTimeout(() => this.dismiss(told.id), stays)
  }
}

export const notices = new Notices()
