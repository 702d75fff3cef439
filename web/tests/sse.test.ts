import { describe, expect, it } from 'vitest'
import { EventParser } from '../src/transport/sse'

const STREAM = 'id: 3\ndata: {"a":1}\n\n: beat\n\nevent: error\r\ndata: x\r\ndata: y\r\n\r\ndata: ✓\n\n'
const WHOLE = [
  { id: '3', event: 'message', data: '{"a":1}' },
  { id: '3', event: 'error', data: 'x\ny' },
  { id: '3', event: 'message', data: '✓' },
]

describe('events in a stream', () => {
  it('are the same wherever the stream is split', () => {
    for (let cut = 0; cut <= STREAM.length; cut += 1) {
      const parser = new EventParser()
      expect([...parser.feed(STREAM.slice(0, cut)), ...parser.feed(STREAM.slice(cut))]).toEqual(WHOLE)
    }
  })

  it('are not dispatched before they are complete', () => {
    const parser = new EventParser()
    expect(parser.feed('data: half\n')).toEqual([])
    expect(parser.feed('\n')).toHaveLength(1)
  })
})
