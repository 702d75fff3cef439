import { describe, expect, it } from 'vitest'
import { Call, Turn } from '../src/state/turn.svelte'
import type { Event, ReadEvent } from '../src/transport/types'

const USAGE = { prompt_tokens: 5, cached_tokens: 0, reply_tokens: 4, thinking_tokens: 2 }
const phase = (phase: 'thinking' | 'answer' | 'tool_call'): ReadEvent => ({ type: 'phase_opened', phase })
const thought = (text: string): ReadEvent => ({ type: 'thinking_delta', text })
const answer = (text: string): ReadEvent => ({ type: 'answer_delta', text })
const finished = (tail: ReadEvent[] = [], finish: 'end' | 'stopped' = 'end'): Event => ({ type: 'finished', finish, usage: USAGE, stop: null, tail })

function applyEvents(events: ReadEvent[], turn = new Turn(), from = 0): Turn {
  events.forEach((event, index) => expect(turn.apply(from + index + 1, event)).toBe(true))
  return turn
}

const REPLY = [phase('thinking'), thought('Let me '), thought('see.'), phase('answer'), answer('It is '), answer('five.')]

describe('a turn', () => {
  it('separates thinking and answer', () => {
    const turn = applyEvents(REPLY)
    expect(turn.thinking).toBe('Let me see.')
    expect(turn.text).toBe('It is five.')
    expect(turn.parts.map((part) => part.kind)).toEqual(['thinking', 'text'])
  })

  it('names the model it waits for', () => {
    const turn = new Turn()
    turn.apply(0, { type: 'waiting', position: 0, seconds: null, loading: 'sprout', progress: 0.4 })
    expect(turn.waiting).toEqual({ position: 0, seconds: null, loading: 'sprout', progress: 0.4 })
    turn.apply(0, { type: 'waiting', position: 2, seconds: null })
    expect(turn.waiting?.loading).toBe('')
  })

  it('shows a thought before its first word', () => {
    expect(applyEvents([phase('thinking')]).parts).toHaveLength(1)
  })

  it('ignores duplicate events and reports missing ones', () => {
    const turn = applyEvents(REPLY.slice(0, 3))
    applyEvents(REPLY.slice(0, 3), turn)
    expect(turn.thinking).toBe('Let me see.')
    expect(turn.apply(5, answer('too far'))).toBe(false)
    expect(turn.number).toBe(3)
    applyEvents(REPLY.slice(3), turn, 3)
    expect(turn.text).toBe('It is five.')
  })

  it('undoes the tail when the reply continues', () => {
    const turn = applyEvents(REPLY)
    turn.apply(6, finished([answer(' <thi')], 'stopped'))
    expect(turn.text).toBe('It is five. <thi')
    expect(turn.ended).toBe(true)
    applyEvents([answer(' <third>')], turn, 6)
    expect(turn.text).toBe('It is five. <third>')
    expect(turn.ended).toBe(false)
    expect(turn.finish).toBe(null)
  })

  it('undoes a tail that opened a part', () => {
    const turn = applyEvents([phase('thinking'), thought('Hm')])
    turn.apply(2, finished([phase('answer'), answer('</th')], 'stopped'))
    expect(turn.parts).toHaveLength(2)
    applyEvents([thought('</them>')], turn, 2)
    expect(turn.thinking).toBe('Hm</them>')
    expect(turn.text).toBe('')
  })

  it('shows the draft until its text arrives, and after a stop', () => {
    const draft = (position: number): Event => ({ type: 'draft_block', position, texts: ['It', null], confidence: [1, 0.2] })
    const turn = applyEvents([phase('answer')])
    turn.apply(1, draft(0))
    expect(turn.draft?.texts).toEqual(['It', null])
    applyEvents([answer('It is ')], turn, 1)
    expect(turn.draft).toBe(null)
    turn.apply(2, draft(2))
    turn.apply(2, finished([], 'stopped'))
    expect(turn.draft?.position).toBe(2)
    turn.apply(2, draft(2))
    expect(turn.ended).toBe(false)
    applyEvents([answer('five.')], turn, 2)
    turn.apply(3, finished())
    expect(turn.draft).toBe(null)
    expect(turn.drafts).toHaveLength(3)
    expect(turn.text).toBe('It is five.')
  })

  it('ends the same way when its end is received twice', () => {
    const turn = applyEvents(REPLY)
    turn.apply(6, finished([answer('!')]))
    turn.apply(6, finished([answer('!')]))
    expect(turn.text).toBe('It is five.!')
  })

  it('is replaced by a snapshot', () => {
    const turn = applyEvents(REPLY.slice(0, 2))
    turn.apply(40, { type: 'snapshot', message: { role: 'assistant', parts: [{ type: 'text', text: 'All of ' }] } })
    expect(turn.number).toBe(40)
    applyEvents([answer('it.')], turn, 40)
    expect(turn.text).toBe('All of it.')
  })

  it('collects the arguments of calls', () => {
    const turn = applyEvents([
      phase('tool_call'),
      { type: 'tool_call_opened', index: 0, id: 'a', name: 'add', in_thought: false },
      { type: 'tool_call_delta', index: 0, arguments: '{"x":' },
      { type: 'tool_call_delta', index: 0, arguments: '1}' },
    ])
    const call = turn.parts[0]
    expect(call).toBeInstanceOf(Call)
    expect((call as Call).arguments).toBe('{"x":1}')
  })

  it('calls onEnd', () => {
    const over: Turn[] = []
    const turn = new Turn((one) => over.push(one))
    turn.apply(0, { type: 'failed', error: 'out of memory', tail: [] })
    expect(over).toEqual([turn])
    expect(turn.error).toBe('out of memory')
  })
})
