// The preferences of this browser. They hold for all conversations, and a change takes effect at once, in other tabs, too.
import { load, PREFIX, save } from './storage'

interface Values {
  /** Whether Ctrl+Enter sends a message, and Enter makes a new line. */
  ctrlEnter: boolean
  /** Whether the end of a reply is told while the tab is hidden. */
  notifies: boolean
}

const NAME = 'preferences'
const DEFAULTS: Values = { ctrlEnter: false, notifies: false }

class Preferences {
  #values: Values = $state.raw({ ...DEFAULTS, ...load<Partial<Values>>(NAME, {}) })

  constructor() {
    addEventListener('storage', ({ key }) => {
      if (key === null || key === PREFIX + NAME) this.#values = { ...DEFAULTS, ...load<Partial<Values>>(NAME, {}) }
    })
  }

  get ctrlEnter(): boolean {
    return this.#values.ctrlEnter
  }

  get notifies(): boolean {
    return this.#values.notifies
  }

  set(changed: Partial<Values>): void {
    this.#values = { ...this.#values, ...changed }
    save(NAME, this.#values)
  }
}

export const preferences = new Preferences()
