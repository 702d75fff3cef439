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
  it('are at most one error and one message, the newest of each', () => {
    notices.show('one')
    notices.showError('bad one')
    notices.show('two')
    notices.showError('bad two')
    expect(texts()).toEqual(['two', 'bad two'])
  })

  it('are cleared with their cause', () => {
    notices.show('still replying', { cause: 'running' })
    notices.showError(new Error('not sent'))
    notices.clear('running')
    expect(texts()).toEqual(['not sent'])
    notices.clear('action')
    expect(texts()).toEqual([])
    notices.showError(new UnreachableError())
    notices.clear('action', 'running', 'file')
    expect(texts()).toHaveLength(1)
    notices.clear('connection')
    expect(texts()).toEqual([])
  })

  it('are shown once, with a count of repetitions', () => {
    notices.showError('bad')
    notices.showError('bad')
    notices.showError('bad')
    expect(texts()).toEqual(['bad ×3'])
  })

  it('collect several files', () => {
    notices.showError('one.png', 'file')
    notices.showError('two.png', 'file')
    notices.showError('two.png', 'file')
    expect(texts()).toEqual(['one.png | two.png ×2'])
    notices.showError('something else')
    expect(texts()).toEqual(['something else'])
  })

  it('expire', () => {
    notices.show('Imported.')
    notices.showError('bad')
    vi.advanceTimersByTime(7000)
    expect(texts()).toEqual(['bad'])
    vi.advanceTimersByTime(20_000)
    expect(texts()).toEqual([])
  })
})
