// Server-sent events read from a fetch, as the HTML standard parses them.

export interface Sent {
  id: string | null
  event: string
  data: string
}

/** Takes pieces cut anywhere, gives whole events. */
export class Parser {
  #rest = ''
  #id: string | null = null
  #event = ''
  #data: string[] = []

  feed(piece: string): Sent[] {
    const sent: Sent[] = []
    const lines = (this.#rest + piece).split('\n')
    this.#rest = lines.pop() ?? ''
    for (const line of lines) {
      const whole = line.endsWith('\r') ? line.slice(0, -1) : line
      if (whole === '') this.#dispatch(sent)
      else this.#field(whole)
    }
    return sent
  }

  #dispatch(sent: Sent[]): void {
    if (this.#data.length > 0) sent.push({ id: this.#id, event: this.#event || 'message', data: this.#data.join('\n') })
    this.#event = ''
    this.#data = []
  }

  #field(line: string): void {
    const colon = line.indexOf(':')
    if (colon === 0) return
    const name = colon < 0 ? line : line.slice(0, colon)
    const value = colon < 0 ? '' : line.slice(line[colon + 1] === ' ' ? colon + 2 : colon + 1)
    if (name === 'data') this.#data.push(value)
    else if (name === 'event') this.#event = value
    else if (name === 'id') this.#id = value
  }
}

/** The events of a body, in the batches in which they arrive. `heard` is called for every piece, comments too. */
export async function* batches(body: ReadableStream<Uint8Array>, heard: () => void): AsyncGenerator<Sent[]> {
  const parser = new Parser()
  const decoder = new TextDecoder()
  const reader = body.getReader()
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      heard()
      const sent = parser.feed(decoder.decode(value, { stream: true }))
      if (sent.length > 0) yield sent
    }
  } finally {
    reader.cancel().catch(() => undefined)
  }
}
