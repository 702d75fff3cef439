// This tab and the other tabs of the page. They talk over a BroadcastChannel.
import { SvelteSet } from 'svelte/reactivity'

const KEY = 'palaver.tab'
const ANSWER_MS = 1000 // a tab that does not answer for so long is taken to be closed

interface TabMessage {
  /** `ask`: which other tab has this name? `taken`: the sender has it. */
  type: 'ask' | 'taken'
  name: string
  /** The page that asks, which an answer names again. */
  asker: string
}

class Tab {
  /** The client name of this tab's cursors. It survives a reload and is unique to the tab. */
  name = $state(readName() ?? '')
  /** Whether the name is this tab's own: a duplicated tab begins with a copy of its original's. */
  confirmed = $state(false)
  /** Unlike the name, it is never copied. */
  readonly #instance = newName()
  #closed = new SvelteSet<string>()
  #asked = new Map<string, ReturnType<typeof setTimeout>>()
  #channel: BroadcastChannel | null = null

  constructor() {
    if (this.name === '') this.#rename()
  }

  /** Asks whether another tab has the name of this one, which then takes a new name. */
  start(): void {
    if (this.#channel) return
    try {
      this.#channel = new BroadcastChannel('palaver.tabs')
      this.#channel.onmessage = (event: MessageEvent<TabMessage>) => this.#handle(event.data)
    } catch {
      // a browser that forbids storage may forbid channels, too: each tab is alone then
    }
    this.#post({ type: 'ask', name: this.name, asker: this.#instance })
    if (!this.confirmed) setTimeout(() => (this.confirmed = true), ANSWER_MS)
  }

  /** Whether the tab of this name is open. It is taken for open until `check` has found out. */
  isOpen(name: string): boolean {
    return !this.#closed.has(name)
  }

  /** Asks whether the tab of this name is open. */
  check(name: string): void {
    if (name === this.name || this.#asked.has(name) || this.#closed.has(name)) return
    this.#post({ type: 'ask', name, asker: this.#instance })
    this.#asked.set(
      name,
      setTimeout(() => {
        this.#asked.delete(name)
        this.#closed.add(name)
      }, ANSWER_MS),
    )
  }

  #handle({ type, name, asker }: TabMessage): void {
    if (type === 'taken') {
      clearTimeout(this.#asked.get(name))
      this.#asked.delete(name)
      if (name === this.name && asker === this.#instance) this.#rename()
      return
    }
    this.#closed.delete(name)
    if (name !== this.name) return
    // of two tabs that ask at once, one has to give way
    if (this.confirmed || this.#instance < asker) this.#post({ type: 'taken', name, asker })
    else this.#rename()
  }

  #rename(): void {
    this.name = newName()
    this.confirmed = true
    try {
      sessionStorage.setItem(KEY, this.name)
    } catch {
      // without storage the name ends with the page
    }
  }

  #post(message: TabMessage): void {
    this.#channel?.postMessage(message)
  }
}

function readName(): string | null {
  try {
    return sessionStorage.getItem(KEY)
  } catch {
    return null
  }
}

function newName(): string {
  return `web-${Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, '0')).join('')}`
}

export const tab = new Tab()
