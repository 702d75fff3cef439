import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { thinkingClock, type Clock } from '../src/state/timings'
import { Turn } from '../src/state/turn.svelte'
import type { ReadEvent, Stored, StoredReply } from '../src/transport/types'

const USAGE = { prompt_tokens: 5, cached_tokens: 0, reply_tokens: 4, thinking_tokens: 2 }
const opened: ReadEvent = { type: 'phase_opened', phase: 'thinking' }
const thought = (text: string): ReadEvent => ({ type: 'thinking_delta', text })
const START = Date.parse('2026-01-01T00:00:00Z')

/** One that runs; `timings` are those of its earlier runs. */
function reply(timings: Record<string, number>): Stored {
  const started_at = new Date(START).toISOString()
  return {
    id: 'a', conversation_id: 'c', parent_id: null, role: 'assistant', parts: [], created_at: '', edit_of: null,
    reply: { status: 'running', settings: {} as StoredReply['settings'], usage: null, timings, error: null, started_at, ended_at: null },
  }
}

const shown = (clock: Clock | null): number | null =>
  clock && Math.round(clock.seconds + (clock.since === null ? 0 : (performance.now() - clock.since) / 1000))

beforeEach(() => {
  vi.useFakeTimers({ now: START })
})
afterEach(() => {
  vi.useRealTimers()
})

function pass(seconds: number): void {
  vi.advanceTimersByTime(1000 * seconds)
}

describe('the clock of a thought', () => {
  it('counts from where it opened', () => {
    const turn = new Turn()
    turn.take(1, opened)
    pass(4)
    expect(shown(thinkingClock(turn, reply({}), true))).toBe(4)
  })

  it('leaves out the time for which the reply was stopped', () => {
    const turn = new Turn()
    turn.take(1, opened)
    turn.take(2, thought('Hm'))
    pass(4)
    turn.take(2, { type: 'finished', finish: 'stopped', usage: USAGE, stop: null, tail: [] })
    pass(600)
    turn.take(3, thought(' so'))
    pass(2)
    expect(shown(thinkingClock(turn, reply({ thinking: 4 }), true))).toBe(6)
    turn.pause()
    pass(60)
    expect(shown(thinkingClock(turn, reply({ thinking: 4 }), true))).toBe(6)
  })

  it('goes on after a reload from what the server counted when it was stopped', () => {
    const turn = new Turn() // of a reply that this page continued
    turn.take(1, opened)
    pass(3)
    expect(shown(thinkingClock(turn, reply({ thinking: 20 }), true))).toBe(23)
  })

  it('stands still while the server is away', () => {
    const turn = new Turn()
    turn.take(1, opened)
    pass(5)
    turn.pause()
    pass(60)
    expect(shown(thinkingClock(turn, reply({}), true))).toBe(5)
    turn.take(2, thought('Hm'))
    pass(1)
    expect(shown(thinkingClock(turn, reply({}), true))).toBe(6)
  })

  it('counts from the reply’s beginning where the page came late, and not at all where nobody knows', () => {
    pass(30)
    const turn = new Turn(() => undefined, true)
    turn.take(1, opened)
    pass(1)
    expect(shown(thinkingClock(turn, reply({}), true))).toBe(31)
    expect(thinkingClock(turn, reply({ thinking: 4 }), true)).toBe(null)
  })

  it('begins anew with every thought of a reply', () => {
    const turn = new Turn()
    turn.take(1, opened)
    pass(5)
    turn.take(2, { type: 'phase_opened', phase: 'tool_call' })
    turn.take(3, opened)
    pass(2)
    expect(shown(thinkingClock(turn, reply({}), false))).toBe(2)
  })
})
