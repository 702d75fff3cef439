// Parses server-sent events from a fetch response, as the HTML standard defines.

export interface ServerSentEvent {
  id: string | null
  event: string
  data: string
}

/** Parses chunks split at any position into complete events. */
export class EventParser {
  #buffer = ''
  #id: string | null = null
  #event = ''
  #data: string[] = []

  feed(chunk: string): ServerSentEvent[] {
    const events: ServerSentEvent[] = []
    const lines = (this.#buffer + chunk).split('\n')
    this.#buffer = lines.pop() ?? ''
    for (const line of lines) {
      const text = line.endsWith('\r') ? line.slice(0, -1) : line
      if (text === '') this.#dispatch(events)
      else this.#field(text)
    }
    return events
  }

  #dispatch(events: ServerSentEvent[]): void {
    if (this.#data.length > 0) events.push({ id: this.#id, event: this.#event || 'message', data: this.#data.join('\n') })
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

/** Yields the events of a response body in batches, as they arrive. `onData` is called for every chunk, also for comments. */
export async function* readEventBatches(body: ReadableStream<Uint8Array>, onData: () => void): AsyncGenerator<ServerSentEvent[]> {
  const parser = new EventParser()
  const decoder = new TextDecoder()
  const reader = body.getReader()
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      onData()
      const events = parser.feed(decoder.decode(value, { stream: true }))
      if (events.length > 0) yield events
    }
  } finally {
    reader.cancel().catch(() => undefined)
  }
}
