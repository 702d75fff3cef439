import { describe, expect, it } from 'vitest'
import type { Draft } from '../src/state/drafts'
import { wasSent } from '../src/state/queue.svelte'
import type { Blob, Part, Stored } from '../src/transport/types'

const picture = (digest: string): Blob => ({ type: 'blob', kind: 'image', media_type: 'image/png', digest, size: 1 }) as Blob

const user = (id: string, ...parts: Part[]): Stored => ({ id, role: 'user', parts }) as unknown as Stored

const draft = (text: string, files: Draft['files']): Draft => ({ text, files, key: 'k', after: '' })

describe('wasSent', () => {
  it('finds a message with its files', () => {
    const path = [user('1', { type: 'text', text: 'look' }, picture('a'), { type: 'text', text: '\n\nFile notes.txt:\n\nmilk' })]
    expect(wasSent(draft('look', [{ name: 'a.png', blob: picture('a') }, { name: 'notes.txt', text: 'milk' }]), path)).toBe(true)
  })

  it('tells messages with the same text from each other by their files', () => {
    const path = [user('1', { type: 'text', text: '' }, picture('a'))]
    expect(wasSent(draft('', [{ name: 'b.png', blob: picture('b') }]), path)).toBe(false)
    expect(wasSent(draft('', []), path)).toBe(false)
    expect(wasSent(draft('', [{ name: 'notes.txt', text: 'milk' }]), path)).toBe(false)
  })
})
