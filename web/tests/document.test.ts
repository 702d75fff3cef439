import { describe, expect, it } from 'vitest'
import { MarkdownDocument } from '../src/markdown/document'

const TEXT = `# Title

A paragraph
over two lines.

- one
- two

  still two
  \`\`\`py
  code in a list

  more
  \`\`\`
- three

\`\`\`js
const a = 1

const b = 2
\`\`\`
After it.

$$
x = 1

y = 2
$$

| a | b |
| - | - |
| 1 | 2 |

1. first

2. second

The end.
`

function blocks(document: MarkdownDocument): string[] {
  return document.blocks.map((block) => `${block.kind}:${block.info}:${block.source.trim()}`)
}

describe('a growing document', () => {
  it('has the same blocks wherever its text is split', () => {
    const whole = blocks(new MarkdownDocument(TEXT))
    expect(whole).toHaveLength(9)
    for (let cut = 1; cut < TEXT.length; cut += 1) {
      const document = new MarkdownDocument()
      document.append(TEXT.slice(0, cut))
      document.append(TEXT.slice(cut))
      document.close()
      expect(blocks(document)).toEqual(whole)
      expect(document.text).toBe(TEXT)
    }
  })

  it('has the same blocks character by character', () => {
    const document = new MarkdownDocument()
    for (const character of TEXT) document.append(character)
    document.close()
    expect(blocks(document)).toEqual(blocks(new MarkdownDocument(TEXT)))
  })

  it('shows an open fence as code, without a partial closing fence', () => {
    const document = new MarkdownDocument()
    document.append('```py\nprint(1)\n``')
    expect(document.tail).toEqual({ kind: 'code', info: 'py', source: 'print(1)\n' })
    document.append('x`` no fence\n')
    expect(document.tail?.source).toBe('print(1)\n``x`` no fence\n')
  })

  it('limits the length of the open block', () => {
    for (const piece of ['- an item of a list\n', 'words without an end ', 'a line of a paragraph\n']) {
      const document = new MarkdownDocument()
      for (let count = 0; count < 5000; count += 1) {
        document.append(piece)
        expect(document.tail?.source.length ?? 0).toBeLessThan(20_000)
      }
      expect(document.text).toBe(piece.repeat(5000))
    }
  })

  it('restores a mark', () => {
    const document = new MarkdownDocument()
    document.append('One.\n\nTwo')
    const mark = document.mark()
    document.append(' and\n\nthree')
    document.close()
    document.restore(mark)
    document.append(' again.')
    document.close()
    expect(document.text).toBe('One.\n\nTwo again.')
    expect(blocks(document)).toEqual(['text::One.', 'text::Two again.'])
  })
})
