import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { notices } from '../src/state/notices.svelte'
import { UnreachableError } from '../src/transport/http'

const texts = (): string[] => notices.all.map((one) => one.lines.map(({ text, times }) => (times > 1 ? `${text} ×${times}` : text)).join(' | '))

beforeEach(() => {
  vi.useFakeTimers()
})
afterEach(() => {
  vi.runAllTimers()
  vi.useRealTimers()
})

describe('notices', () => {
  it('are one error and one piece of news at most, the newest of each', () => {
    notices.tell('one')
    notices.fail('bad one')
    notices.tell('two')
    notices.fail('bad two')
    expect(texts()).toEqual(['two', 'bad two'])
  })

  it('go when their cause is over', () => {
    notices.tell('still replying', { cause: 'running' })
    notices.fail(new Error('not sent'))
    notices.settle('running')
    expect(texts()).toEqual(['not sent'])
    notices.settle('action')
    expect(texts()).toEqual([])
    notices.fail(new UnreachableError())
    notices.settle('action', 'running', 'file')
    expect(texts()).toHaveLength(1)
    notices.settle('connection')
    expect(texts()).toEqual([])
  })

  it('are told once, however often they are said', () => {
    notices.fail('bad')
    notices.fail('bad')
    notices.fail('bad')
    expect(texts()).toEqual(['bad ×3'])
  })

  it('tell of several files together', () => {
    notices.fail('one.png', 'file')
    notices.fail('two.png', 'file')
    notices.fail('two.png', 'file')
    expect(texts()).toEqual(['one.png | two.png ×2'])
    notices.fail('something else')
    expect(texts()).toEqual(['something else'])
  })

  it('go after a while', () => {
    notices.tell('Imported.')
    notices.fail('bad')
    vi.advanceTimersByTime(7000)
    expect(texts()).toEqual(['bad'])
    vi.advanceTimersByTime(20_000)
    expect(texts()).toEqual([])
  })
})
