// The route in the URL's hash: #/ for a new conversation, #/c/ID for an existing one, with ?at=MESSAGE for a message in it.

class Route {
  conversation: string | null = $state(null)
  at: string | null = $state(null)

  constructor() {
    this.#read()
    addEventListener('hashchange', () => this.#read())
  }

  go(conversation: string | null, at: string | null = null): void {
    location.hash = address(conversation, at)
    this.#read()
  }

  /** Navigates without an entry in the browser's history. */
  replace(conversation: string | null): void {
    history.replaceState(null, '', address(conversation, null))
    this.#read()
  }

  #read(): void {
    const [path = '', query = ''] = location.hash.slice(1).split('?')
    const [, kind, id] = path.split('/')
    this.conversation = kind === 'c' && id ? decode(id) : null
    this.at = new URLSearchParams(query).get('at')
  }
}

/** An address that is cut off or mistyped names a conversation that does not exist. */
function decode(id: string): string {
  try {
    return decodeURIComponent(id)
  } catch {
    return id
  }
}

export function address(conversation: string | null, at: string | null = null): string {
  if (conversation === null) return '#/'
  return `#/c/${encodeURIComponent(conversation)}${at ? `?at=${encodeURIComponent(at)}` : ''}`
}

export const route = new Route()
