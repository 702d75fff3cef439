import { describe, expect, it } from 'vitest'
import { fileOf, taken, written } from '../src/components/files'
import { problem, withValue } from '../src/state/wishes'

describe('what a person sets', () => {
  it('is set, and taken back', () => {
    expect(withValue({ a: 1 }, 'b', 2)).toEqual({ a: 1, b: 2 })
    expect(withValue({ a: 1 }, 'a', null)).toEqual({})
    expect(withValue({ a: 1 }, 'a', [])).toEqual({})
    expect(withValue({}, 'thinking', false)).toEqual({ thinking: false })
  })

  it('is told when it is out of bounds', () => {
    expect(problem('temperature', '0.7')).toBe('')
    expect(problem('temperature', '')).toBe('')
    expect(problem('temperature', '99')).toContain('from 0 to 5')
    expect(problem('top_k', '1.5')).toContain('whole')
    expect(problem('seed', 'x')).toContain('number')
  })
})

describe('files in a message', () => {
  it('come out as they went in', async () => {
    const file = { name: 'notes.md', text: '# Notes\n\nFile x:\n\ny' }
    expect(fileOf(written(file))).toEqual(file)
    expect(fileOf('File or no file')).toBe(null)
    expect(await taken(new File(['hi'], 'a.txt'))).toEqual({ name: 'a.txt', text: 'hi' })
  })

  it('are refused with a reason where the model can’t read them', async () => {
    expect(await taken(new File(['x'], 'a.png', { type: 'image/png' }))).toContain('pictures')
    expect(await taken(new File([new Uint8Array([255, 254, 0])], 'a.bin'))).toContain('not a text file')
  })
})
