// The event stream of a tab: the events of every turn it shows, and changes in the user's conversations.
//
// Each turn is requested from its last event number, so that a stream that was interrupted, or closed because the tab is
// hidden, resumes without gaps or repetitions.
import { ApiError, send } from './http'
import { readEventBatches, type ServerSentEvent } from './sse'
import type { Change, Error as WireError, Event, Follow, StreamItem } from './types'

export interface Reader {
  /** The number of the last applied event. */
  readonly number: number
  /** Applies an event. Returns false if events before it are missing. */
  apply(number: number, event: Event): boolean
  reject(error: WireError): void
}

export interface Listener {
  onChange(change: Change): void
  /** The stream is (re)connected. Earlier changes may have been missed. */
  onOpen(): void
  /** Whether the server is reachable. */
  onConnection(connected: boolean): void
  /** The server requires a key. */
  onUnauthorized(): void
}

export type Open = (request: Follow, signal: AbortSignal) => Promise<ReadableStream<Uint8Array>>

const MIN_DELAY = 250
const MAX_DELAY = 5000
const SILENCE_TIMEOUT = 45_000 // milliseconds; the server sends a comment every 15 seconds

export async function openStream(request: Follow, signal: AbortSignal): Promise<ReadableStream<Uint8Array>> {
  const response = await send('api/events', { method: 'POST', json: request, signal })
  if (!response.body) throw new TypeError('no body')
  return response.body
}

export class Stream {
  #readers = new Map<string, Reader>()
  #active = false
  #abort: AbortController | null = null
  #delay = MIN_DELAY
  #timer: ReturnType<typeof setTimeout> | undefined
  #watchdog: ReturnType<typeof setTimeout> | undefined
  #reconnectQueued = false

  constructor(
    private readonly listener: Listener,
    private readonly open: Open = openStream,
  ) {}

  /** Connects or reconnects at once. */
  resume(): void {
    this.#active = true
    this.#delay = MIN_DELAY
    this.#connect()
  }

  /** Closes the connection. The readers keep their event numbers. */
  release(): void {
    this.#active = false
    this.#disconnect()
  }

  subscribe(turn: string, reader: Reader): void {
    if (this.#readers.get(turn) === reader) return
    this.#readers.set(turn, reader)
    this.#queueReconnect()
  }

  unsubscribe(turn: string, reader: Reader): void {
    if (this.#readers.get(turn) === reader) this.#readers.delete(turn)
  }

  get subscriptions(): readonly string[] {
    return [...this.#readers.keys()]
  }

  /** Reconnects with the new subscriptions, once for all changes of a microtask. */
  #queueReconnect(): void {
    if (!this.#active || this.#reconnectQueued) return
    this.#reconnectQueued = true
    queueMicrotask(() => {
      this.#reconnectQueued = false
      if (this.#active) this.#connect()
    })
  }

  #connect(): void {
    this.#disconnect()
    const abort = new AbortController()
    this.#abort = abort
    void this.#run(abort)
  }

  #disconnect(): void {
    clearTimeout(this.#timer)
    clearTimeout(this.#watchdog)
    this.#abort?.abort()
    this.#abort = null
  }

  async #run(abort: AbortController): Promise<void> {
    try {
      const turns = [...this.#readers].map(([turn, reader]) => ({ turn, after: reader.number }))
      this.#resetWatchdog(abort)
      const body = await this.open({ turns, changes: true }, abort.signal)
      if (abort.signal.aborted) {
        body.cancel().catch(() => undefined)
        return
      }
      for await (const batch of readEventBatches(body, () => this.#resetWatchdog(abort))) {
        if (abort.signal.aborted) return
        for (const event of batch) this.#dispatch(event)
      }
    } catch (error) {
      if (abort.signal.aborted && this.#abort !== abort) return
      if (error instanceof ApiError && error.status === 401) {
        this.release()
        this.listener.onUnauthorized()
        return
      }
    }
    if (this.#abort === abort && this.#active) this.#reconnectLater()
  }

  #reconnectLater(): void {
    this.#disconnect()
    this.listener.onConnection(false)
    const delay = this.#delay * (0.75 + Math.random() / 2)
    this.#delay = Math.min(MAX_DELAY, this.#delay * 2)
    this.#timer = setTimeout(() => this.#connect(), delay)
  }

  /** A connection without data for SILENCE_TIMEOUT counts as lost. */
  #resetWatchdog(abort: AbortController): void {
    clearTimeout(this.#watchdog)
    this.#watchdog = setTimeout(() => {
      if (this.#abort !== abort) return
      abort.abort()
      this.#reconnectLater()
    }, SILENCE_TIMEOUT)
  }

  #dispatch(event: ServerSentEvent): void {
    if (event.event === 'error') return
    const item = JSON.parse(event.data) as StreamItem
    switch (item.type) {
      case 'opened':
        this.#delay = MIN_DELAY
        this.listener.onConnection(true)
        this.listener.onOpen()
        break
      case 'turn':
        this.#dispatchTurn(item.turn, item.number, item.event)
        break
      case 'change':
        this.listener.onChange(item.change)
        break
      case 'refused':
        this.#readers.get(item.turn)?.reject(item.error)
        this.#readers.delete(item.turn)
        break
      case 'closing':
        break
    }
  }

  #dispatchTurn(turn: string, number: number, event: Event): void {
    const reader = this.#readers.get(turn)
    if (!reader) return
    if (!reader.apply(number, event)) this.#queueReconnect()
    else if (event.type === 'finished' || event.type === 'failed') this.#readers.delete(turn)
  }
}
