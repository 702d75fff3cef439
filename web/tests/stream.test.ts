import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { Turn } from '../src/state/turn.svelte'
import { ApiError } from '../src/transport/http'
import { Stream, type Listener } from '../src/transport/stream'
import type { Event, Follow, StreamItem } from '../src/transport/types'

const WORDS = Array.from({ length: 60 }, (_, index) => `word${index} `)
const EVENTS: Event[] = [{ type: 'phase_opened', phase: 'answer' }, ...WORDS.map((text): Event => ({ type: 'answer_delta', text }))]
const END: Event = { type: 'finished', finish: 'end', usage: { prompt_tokens: 1, cached_tokens: 0, reply_tokens: 1, thinking_tokens: 0 }, stop: null, tail: [] }

/** A server with one turn, whose every connection is cut after some bytes. */
class Server {
  requests: Follow[] = []
  open = 0
  constructor(
    private readonly cuts: number[],
    private readonly refuse: () => Error | null = () => null,
  ) {}

  connect = async (request: Follow, signal: AbortSignal): Promise<ReadableStream<Uint8Array>> => {
    this.requests.push(request)
    const refusal = this.refuse()
    if (refusal) throw refusal
    const items: StreamItem[] = [{ type: 'opened' }]
    for (const { turn, after = 0 } of request.turns ?? []) {
      EVENTS.forEach((event, index) => index >= after && items.push({ type: 'turn', turn, number: index + 1, event }))
      items.push({ type: 'turn', turn, number: EVENTS.length, event: END })
    }
    const bytes = new TextEncoder().encode(items.map((item) => `data: ${JSON.stringify(item)}\n\n`).join(''))
    const cut = this.cuts.shift()
    this.open += 1
    return new ReadableStream({
      start: (controller) => {
        signal.addEventListener('abort', () => {
          this.open -= 1
          try {
            controller.error(new DOMException('gone', 'AbortError'))
          } catch {
            // was over
          }
        })
        controller.enqueue(bytes.slice(0, cut))
        if (cut !== undefined) setTimeout(() => controller.error(new TypeError('network')), 1)
      },
    })
  }
}

const listener = (): Listener & { log: string[] } => {
  const log: string[] = []
  return {
    log,
    onChange: (change) => log.push(change.what),
    onOpen: () => log.push('opened'),
    onConnection: (connected) => log.push(connected ? 'connected' : 'cut'),
    onUnauthorized: () => log.push('unauthorized'),
  }
}

beforeEach(() => {
  vi.useFakeTimers()
})
afterEach(() => {
  vi.useRealTimers()
})

describe('the stream of a tab', () => {
  it('resumes after fifty interruptions without gaps or repetitions', async () => {
    const server = new Server(Array.from({ length: 50 }, (_, index) => 90 + ((index * 37) % 400)))
    const recorder = listener()
    const stream = new Stream(recorder, server.connect)
    const turn = new Turn()
    stream.subscribe('t', turn)
    stream.resume()
    for (let count = 0; count < 400 && !turn.ended; count += 1) await vi.advanceTimersByTimeAsync(6000)
    expect(turn.ended).toBe(true)
    expect(turn.text).toBe(WORDS.join(''))
    expect(server.requests.length).toBeGreaterThan(10)
    expect(recorder.log).toContain('cut')
    stream.release()
  })

  it('requests each turn from its last event number, once for several changes', async () => {
    const server = new Server([])
    const stream = new Stream(listener(), server.connect)
    stream.resume()
    await vi.advanceTimersByTimeAsync(10)
    const [a, b] = [new Turn(), new Turn()]
    a.apply(1, EVENTS[0]!)
    stream.subscribe('a', a)
    stream.subscribe('b', b)
    await vi.advanceTimersByTimeAsync(10)
    expect(server.requests).toHaveLength(2)
    expect(server.requests[1]).toEqual({ turns: [{ turn: 'a', after: 1 }, { turn: 'b', after: 0 }], changes: true })
    expect(a.text).toBe(WORDS.join(''))
    expect(stream.subscriptions).toEqual([])
    stream.release()
  })

  it('closes its connection on release, and has at most one', async () => {
    const server = new Server([])
    const stream = new Stream(listener(), server.connect)
    stream.resume()
    stream.resume()
    await vi.advanceTimersByTimeAsync(10)
    expect(server.open).toBe(1)
    stream.release()
    await vi.advanceTimersByTimeAsync(60_000)
    expect(server.open).toBe(0)
    expect(server.requests.length).toBeLessThanOrEqual(2)
  })

  it('reconnects after silence', async () => {
    const server = new Server([])
    const recorder = listener()
    const stream = new Stream(recorder, server.connect)
    stream.resume()
    await vi.advanceTimersByTimeAsync(46_000)
    expect(recorder.log).toContain('cut')
    expect(server.requests.length).toBeGreaterThan(1)
    stream.release()
  })

  it('reconnects after errors, and stops when a key is required', async () => {
    let away = 3
    const server = new Server([], () => (away-- > 0 ? new TypeError('refused') : null))
    const recorder = listener()
    const stream = new Stream(recorder, server.connect)
    stream.resume()
    await vi.advanceTimersByTimeAsync(10_000)
    expect(recorder.log.filter((one) => one === 'cut')).toHaveLength(3)
    expect(recorder.log.at(-1)).toBe('opened')
    stream.release()

    const locked = new Server([], () => new ApiError(401, { message: 'key', type: 'x', param: null, code: null }))
    const lockedRecorder = listener()
    new Stream(lockedRecorder, locked.connect).resume()
    await vi.advanceTimersByTimeAsync(60_000)
    expect(lockedRecorder.log).toEqual(['unauthorized'])
    expect(locked.requests).toHaveLength(1)
  })
})
