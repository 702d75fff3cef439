import { describe, expect, it } from 'vitest'
import { fileOf, taken, written } from '../src/components/attachments'
import { parseTools, problem, withValue } from '../src/state/wishes'

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
    expect(problem('temperature', '99')).toContain('between 0 and 5')
    expect(problem('top_k', '1.5')).toContain('whole')
    expect(problem('seed', 'x')).toContain('number')
  })
})

describe('tools as they are typed', () => {
  it('are taken in both forms', () => {
    const plain = { name: 'add', description: 'Adds.', parameters: { type: 'object' } }
    const openai = { type: 'function', function: { ...plain, name: 'sub' } }
    expect(parseTools(JSON.stringify([plain, openai]))).toEqual([plain, openai])
    expect(parseTools('  ')).toEqual([])
  })

  it.each([
    ['[{', 'aren’t valid JSON'],
    ['{"name": "add"}', 'must be a JSON list'],
    ['["add"]', 'Tool 1 must be an object'],
    ['[{"name": "a"}, {"name": ""}]', 'Tool 2 needs a name'],
    ['[{"type": "function", "function": {}}]', 'Tool 1 needs a name'],
    ['[{"name": "a", "description": 1}]', 'description of a'],
    ['[{"name": "a", "parameters": [1]}]', 'parameters of a'],
    ['[{"name": "a"}, {"name": "a"}]', 'Two tools are called a'],
  ])('are refused with a reason: %s', (text, why) => {
    expect(() => parseTools(text)).toThrow(why)
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
    expect(await taken(new File(['x'], 'a.png', { type: 'image/png' }), [])).toContain('pictures')
    expect(await taken(new File([new Uint8Array([255, 254, 0])], 'a.bin'))).toContain('isn’t a text file')
  })
})
