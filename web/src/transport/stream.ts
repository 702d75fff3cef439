// The one stream of a tab: the events of every turn it shows, and what changes in the user's conversations.
//
// Each turn is read from a number on, so a stream that was cut, or let go of because nobody looks, is taken up again
// with nothing missing and nothing told twice.
import { Refused, send } from './http'
import { batches, type Sent } from './sse'
import type { Change, Error as WireError, Event, Follow, StreamItem } from './types'

export interface Reader {
  /** The number of the last event this reader has. */
  readonly number: number
  /** Takes an event; false where it does not follow on what the reader has. */
  take(number: number, event: Event): boolean
  refused(error: WireError): void
}

export interface Listener {
  changed(change: Change): void
  /** The stream is there (again): what changed before was not told. */
  opened(): void
  /** Whether the server can be reached. */
  connected(is: boolean): void
  /** The server wants a key. */
  unauthorized(): void
}

export type Open = (asked: Follow, signal: AbortSignal) => Promise<ReadableStream<Uint8Array>>

const FIRST_PAUSE = 250
const LONGEST_PAUSE = 5000
const SILENCE = 45_000 // the server says something every 15 seconds

export async function openStream(asked: Follow, signal: AbortSignal): Promise<ReadableStream<Uint8Array>> {
  const response = await send('api/events', { method: 'POST', json: asked, signal })
  if (!response.body) throw new TypeError('no body')
  return response.body
}

export class Stream {
  #readers = new Map<string, Reader>()
  #wanted = false
  #abort: AbortController | null = null
  #pause = FIRST_PAUSE
  #timer: ReturnType<typeof setTimeout> | undefined
  #watch: ReturnType<typeof setTimeout> | undefined
  #asked = false

  constructor(
    private readonly listener: Listener,
    private readonly open: Open = openStream,
  ) {}

  /** Begins or goes on, at once. */
  resume(): void {
    this.#wanted = true
    this.#pause = FIRST_PAUSE
    this.#connect()
  }

  /** Lets go of the connection; the readers keep their numbers. */
  release(): void {
    this.#wanted = false
    this.#drop()
  }

  follow(turn: string, reader: Reader): void {
    if (this.#readers.get(turn) === reader) return
    this.#readers.set(turn, reader)
    this.#again()
  }

  unfollow(turn: string, reader: Reader): void {
    if (this.#readers.get(turn) === reader) this.#readers.delete(turn)
  }

  get following(): readonly string[] {
    return [...this.#readers.keys()]
  }

  /** Another stream with the new list, once for all that changed in this moment. */
  #again(): void {
    if (!this.#wanted || this.#asked) return
    this.#asked = true
    queueMicrotask(() => {
      this.#asked = false
      if (this.#wanted) this.#connect()
    })
  }

  #connect(): void {
    this.#drop()
    const abort = new AbortController()
    this.#abort = abort
    void this.#run(abort)
  }

  #drop(): void {
    clearTimeout(this.#timer)
    clearTimeout(this.#watch)
    this.#abort?.abort()
    this.#abort = null
  }

  async #run(abort: AbortController): Promise<void> {
    try {
      const turns = [...this.#readers].map(([turn, reader]) => ({ turn, after: reader.number }))
      this.#heard(abort)
      const body = await this.open({ turns, changes: true }, abort.signal)
      if (abort.signal.aborted) {
        body.cancel().catch(() => undefined)
        return
      }
      for await (const batch of batches(body, () => this.#heard(abort))) {
        if (abort.signal.aborted) return
        for (const sent of batch) this.#take(sent)
      }
    } catch (error) {
      if (abort.signal.aborted && this.#abort !== abort) return
      if (error instanceof Refused && error.status === 401) {
        this.release()
        this.listener.unauthorized()
        return
      }
    }
    if (this.#abort === abort && this.#wanted) this.#later()
  }

  #later(): void {
    this.#drop()
    this.listener.connected(false)
    const pause = this.#pause * (0.75 + Math.random() / 2)
    this.#pause = Math.min(LONGEST_PAUSE, this.#pause * 2)
    this.#timer = setTimeout(() => this.#connect(), pause)
  }

  /** A connection that says nothing for long is dead, whatever the network believes. */
  #heard(abort: AbortController): void {
    clearTimeout(this.#watch)
    this.#watch = setTimeout(() => {
      if (this.#abort !== abort) return
      abort.abort()
      this.#later()
    }, SILENCE)
  }

  #take(sent: Sent): void {
    if (sent.event === 'error') return
    const item = JSON.parse(sent.data) as StreamItem
    switch (item.type) {
      case 'opened':
        this.#pause = FIRST_PAUSE
        this.listener.connected(true)
        this.listener.opened()
        break
      case 'turn':
        this.#turn(item.turn, item.number, item.event)
        break
      case 'change':
        this.listener.changed(item.change)
        break
      case 'refused':
        this.#readers.get(item.turn)?.refused(item.error)
        this.#readers.delete(item.turn)
        break
      case 'closing':
        break
    }
  }

  #turn(turn: string, number: number, event: Event): void {
    const reader = this.#readers.get(turn)
    if (!reader) return
    if (!reader.take(number, event)) this.#again()
    else if (event.type === 'finished' || event.type === 'failed') this.#readers.delete(turn)
  }
}
