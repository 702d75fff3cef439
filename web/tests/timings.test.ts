import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { thinkingClock } from '../src/state/timings'
import { Turn } from '../src/state/turn.svelte'
import type { Event, ReadEvent } from '../src/transport/types'

const USAGE = { prompt_tokens: 5, cached_tokens: 0, reply_tokens: 4, thinking_tokens: 2 }
const opened: ReadEvent = { type: 'phase_opened', phase: 'thinking' }
const thought = (text: string): ReadEvent => ({ type: 'thinking_delta', text })
const stopped: Event = { type: 'finished', finish: 'stopped', usage: USAGE, stop: null, tail: [] }

/** `seconds`: how long the reply has been thinking, as the server counts. */
function started(seconds: number | null): Event {
  return { type: 'started', prompt_tokens: 5, cached_tokens: 0, thinking_seconds: seconds }
}

function shown(turn: Turn): number | null {
  const clock = thinkingClock(turn)
  return clock && Math.round(clock.seconds + (clock.since === null ? 0 : (performance.now() - clock.since) / 1000))
}

beforeEach(() => {
  vi.useFakeTimers()
})
afterEach(() => {
  vi.useRealTimers()
})

function pass(seconds: number): void {
  vi.advanceTimersByTime(1000 * seconds)
}

describe('the clock of a thought', () => {
  it('counts from its opening', () => {
    const turn = new Turn()
    turn.apply(0, started(0))
    pass(2)
    turn.apply(1, opened)
    pass(4)
    expect(shown(turn)).toBe(4)
  })

  it('excludes the time of the prompt', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    pass(5)
    turn.apply(1, started(0))
    pass(3)
    expect(shown(turn)).toBe(3)
  })

  it('excludes the time while the reply was stopped', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    turn.apply(1, started(0))
    turn.apply(2, thought('Hm'))
    pass(5)
    turn.apply(2, stopped)
    pass(600)
    turn.apply(2, started(4)) // the stop took a second to arrive: the server's time counts
    turn.apply(3, thought(' so'))
    pass(2)
    expect(shown(turn)).toBe(6)
    turn.pause()
    pass(60)
    expect(shown(turn)).toBe(6)
  })

  it('counts a continued thought after a reload', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    turn.apply(2, thought('Hm'))
    turn.apply(2, started(24)) // 20 s before the stop, 4 s since
    turn.apply(3, thought(' so'))
    pass(3)
    expect(shown(turn)).toBe(27)
  })

  it('counts a thought that began before the page was loaded', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    turn.apply(1, started(30))
    turn.apply(2, thought('Hm'))
    pass(1)
    expect(shown(turn)).toBe(31)
  })

  it('excludes the time while the server was unreachable', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    turn.apply(1, started(0))
    pass(5)
    turn.pause()
    pass(60)
    expect(shown(turn)).toBe(5)
    turn.apply(1, started(4))
    turn.apply(2, thought('Hm'))
    pass(1)
    expect(shown(turn)).toBe(5)
  })

  it('is null if the time is unknown', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    turn.apply(1, started(null))
    expect(thinkingClock(turn)).toBe(null)
  })

  it('restarts with every thought of a reply', () => {
    const turn = new Turn()
    turn.apply(1, opened)
    turn.apply(1, started(0))
    pass(5)
    turn.apply(2, { type: 'tool_call_opened', index: 0, id: 'a', name: 'f', in_thought: true })
    turn.apply(3, opened)
    pass(2)
    turn.apply(3, started(7)) // the connection was lost: of both
    expect(shown(turn)).toBe(2)
  })
})
