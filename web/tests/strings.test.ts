import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { parse } from 'svelte/compiler'
import { describe, expect, it } from 'vitest'
import { count, percent, plural, rate, seconds } from '../src/numbers'
import { strings } from '../src/strings'
import { ApiError } from '../src/transport/http'
import { NUMBERS } from '../src/transport/types'

const SOURCES = join(import.meta.dirname, '..', 'src')
const SPOKEN = ['aria-label', 'aria-description', 'title', 'placeholder', 'alt', 'label']

interface AstNode {
  type: string
  name?: string
  data?: string
  value?: unknown
}

/** Words in the markup of a component that a reader would see or hear. */
function wordsIn(source: string): string[] {
  const found: string[] = []
  const look = (node: unknown, attribute: string | null): void => {
    if (Array.isArray(node)) return node.forEach((one) => look(one, attribute))
    if (typeof node !== 'object' || node === null) return
    const { type, name, data } = node as AstNode
    if (type === 'Text' && /\p{L}/u.test(data ?? '') && (attribute === null || SPOKEN.includes(attribute))) found.push(data!.trim())
    for (const [key, child] of Object.entries(node)) {
      if (key !== 'parent') look(child, type === 'Attribute' ? (name ?? '') : attribute)
    }
  }
  look(parse(source, { modern: true }).fragment, null)
  return found
}

describe('the texts of the page', () => {
  it('are all in the table', () => {
    const components = readdirSync(SOURCES, { recursive: true, encoding: 'utf8' }).filter((name) => name.endsWith('.svelte'))
    expect(components.length).toBeGreaterThan(20)
    expect(wordsIn('<p title="Here">word {value} <b aria-hidden="true">two</b></p>')).toEqual(['Here', 'word', 'two'])
    for (const name of components) expect({ name, words: wordsIn(readFileSync(join(SOURCES, name), 'utf8')) }).toEqual({ name, words: [] })
  })

  it('name every parameter', () => {
    expect(Object.keys(strings.parameters).sort()).toEqual(Object.keys(NUMBERS).sort())
  })

  it('translate errors by name, or else use the server’s message', () => {
    const refused = (name: string | null, details: Record<string, unknown> | null = null): string =>
      new ApiError(400, { message: 'as the server says', type: 'x', param: null, code: null, name, details }).message
    expect(refused('unknown_format')).toContain('Can’t read this file. Supported:')
    expect(refused('context_overflow', { tokens: 12345, limit: 8192 })).toContain('12,345 tokens')
    expect(refused('context_overflow')).toBe('as the server says')
    expect(refused('something_else')).toBe('as the server says')
    expect(refused(null)).toBe('as the server says')
  })

  it('name the kind of model that a rejected file needs', () => {
    expect(strings.files.media('a.png', 'image')).toBe('a.png: this model can’t read pictures. A vision model is needed for that.')
    expect(strings.files.media('a.wav', 'audio')).toContain('An audio model is needed')
    expect(strings.files.media('a.mp4', 'video')).toContain('A video model is needed')
  })
})

describe('numbers', () => {
  it('are formatted', () => {
    expect(count(1234567)).toBe('1,234,567')
    expect(plural(1, 'token')).toBe('1 token')
    expect(plural(2000, 'token')).toBe('2,000 tokens')
    expect([0, 3.21, 9.96, 59.4, 59.6, 125].map(seconds)).toEqual(['0.0 s', '3.2 s', '10 s', '59 s', '1 min 0 s', '2 min 5 s'])
    expect([0, 0.00001, 0.034, 0.5, 1].map(percent)).toEqual(['0%', '< 0.1%', '3.4%', '50%', '100%'])
    expect(rate(100, 8)).toBe('12.5 tokens/s')
    expect(strings.statistics.tokensValue(140, 126)).toBe('140 (126 thinking)')
    expect(strings.gauge.cached(1058)).toBe('1,058 of them cached')
  })
})
