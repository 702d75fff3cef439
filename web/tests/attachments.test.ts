import { describe, expect, it } from 'vitest'
import { parseTextFile, readAttachment, formatTextFile } from '../src/components/attachments'

describe('files in a message', () => {
  it('are parsed back unchanged', async () => {
    const file = { name: 'notes.md', text: '# Notes\n\nFile x:\n\ny' }
    expect(parseTextFile(formatTextFile(file))).toEqual(file)
    expect(parseTextFile('File or no file')).toBe(null)
    expect(await readAttachment(new File(['hi'], 'a.txt'))).toEqual({ name: 'a.txt', text: 'hi' })
  })

  it('are rejected with a reason if the model can’t read them', async () => {
    expect(await readAttachment(new File(['x'], 'a.png', { type: 'image/png' }), [])).toContain('pictures')
    expect(await readAttachment(new File([new Uint8Array([255, 254, 0])], 'a.bin'))).toContain('isn’t a text file')
  })
})
