import { describe, expect, it } from 'vitest'
import { parseTools, validateNumber, withValue } from '../src/state/parameters'

describe('parameters', () => {
  it('are set and removed', () => {
    expect(withValue({ a: 1 }, 'b', 2)).toEqual({ a: 1, b: 2 })
    expect(withValue({ a: 1 }, 'a', null)).toEqual({})
    expect(withValue({ a: 1 }, 'a', [])).toEqual({})
    expect(withValue({}, 'thinking', false)).toEqual({ thinking: false })
  })

  it('are validated against their bounds', () => {
    expect(validateNumber('temperature', '0.7')).toBe('')
    expect(validateNumber('temperature', '')).toBe('')
    expect(validateNumber('temperature', '99')).toContain('between 0 and 5')
    expect(validateNumber('top_k', '1.5')).toContain('whole')
    expect(validateNumber('seed', 'x')).toContain('number')
  })
})

describe('parseTools', () => {
  it('are accepted in both forms', () => {
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
  ])('are rejected with a reason: %s', (text, why) => {
    expect(() => parseTools(text)).toThrow(why)
  })
})
