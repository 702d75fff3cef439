// Markdown that grows: cut into blocks that are closed for good and one that is still open, so that a further token
// costs what its own block costs, however long the reply is.

export interface Block {
  readonly kind: 'text' | 'code'
  /** The words behind the fence that opens a block of code. */
  readonly info: string
  readonly source: string
}

interface Fence {
  char: string
  length: number
  info: string
}

interface Open {
  kind: 'text' | 'code'
  source: string
  fence: Fence | null // of a block of code, or of one inside of a list
  math: string // what closes the formula that is open
  list: boolean
  blank: boolean
}

export interface Mark {
  blocks: number
  pieces: number
  open: Open | null
  line: string
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/
const INNER_FENCE = /^\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*(`{3,}|~{3,})\s*([^`]*)$/
const ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)/
const HEADING = /^ {0,3}#{1,6}(?:\s|$)/
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/
const LONG = 4096 // characters after which a block is cut where it can be
const TOO_LONG = 16384 // and after which it is cut wherever it is

export class MarkdownDocument {
  readonly blocks: Block[] = []
  #open: Open | null = null
  #line = ''
  #pieces: string[] = []
  #listeners = new Set<() => void>()

  constructor(text = '') {
    if (text) {
      this.append(text)
      this.close()
    }
  }

  get isEmpty(): boolean {
    return this.#pieces.length === 0
  }

  /** The block that is not closed yet, as it stands. */
  get tail(): Block | null {
    const open = this.#open
    if (open?.kind === 'code') {
      const half = this.#line !== '' && isClosing(this.#line, open.fence, true) ? '' : this.#line
      return { kind: 'code', info: open.fence?.info ?? '', source: open.source + half }
    }
    const source = (open?.source ?? '') + this.#line
    return source.trim() === '' ? null : { kind: 'text', info: '', source }
  }

  /** Everything as it was written. */
  get text(): string {
    return this.#pieces.join('')
  }

  append(text: string): void {
    if (text === '') return
    this.#pieces.push(text)
    const lines = text.split('\n')
    lines[0] = this.#line + (lines[0] ?? '')
    this.#line = lines.pop() ?? ''
    for (const line of lines) this.#take(line)
    if (this.#line.length > TOO_LONG && this.#open?.kind !== 'code') this.#breakLine()
    this.#tell()
  }

  /** No more comes: whatever is open is whole. */
  close(): void {
    if (this.#line !== '') {
      const line = this.#line
      this.#line = ''
      this.#take(line, '')
    }
    this.#shut()
    this.#tell()
  }

  mark(): Mark {
    return { blocks: this.blocks.length, pieces: this.#pieces.length, open: this.#open && { ...this.#open }, line: this.#line }
  }

  restore(mark: Mark): void {
    this.blocks.length = mark.blocks
    this.#pieces.length = mark.pieces
    this.#open = mark.open && { ...mark.open }
    this.#line = mark.line
    this.#tell()
  }

  listen(listener: () => void): () => void {
    this.#listeners.add(listener)
    return () => this.#listeners.delete(listener)
  }

  #tell(): void {
    for (const listener of this.#listeners) listener()
  }

  #take(line: string, end = '\n'): void {
    const open = this.#open
    if (open?.kind === 'code') this.#code(open, line, end)
    else if (open && (open.fence !== null || open.math !== '')) this.#inside(open, line + end)
    else this.#text(line, end)
  }

  #code(open: Open, line: string, end: string): void {
    if (isClosing(line, open.fence, false)) this.#shut()
    else open.source += line + end
  }

  /** In a fence of a list, or in a formula: nothing but its end means anything. */
  #inside(open: Open, line: string): void {
    open.source += line
    if (open.fence !== null && isClosing(line.trim(), open.fence, false)) open.fence = null
    else if (open.math !== '' && line.trimEnd().endsWith(open.math)) {
      open.math = ''
      if (!open.list) this.#shut()
    }
  }

  #text(line: string, end: string): void {
    if (line.trim() === '') {
      if (this.#open) {
        this.#open.source += line + end
        this.#open.blank = true
      }
      return
    }
    if (this.#open && this.#ends(this.#open, line)) this.#shut()
    const fence = FENCE.exec(line)
    if (fence && !this.#open?.list) {
      this.#shut()
      this.#open = fresh('code', { char: fence[2]![0]!, length: fence[2]!.length, info: fence[3]!.trim() })
      return
    }
    const open = (this.#open ??= { ...fresh('text', null), list: ITEM.test(line) && !RULE.test(line) })
    open.source += line + end
    open.blank = false
    this.#look(open, line)
    if (HEADING.test(line) && !open.list) this.#shut()
  }

  /** Whether this line opens something whose inside is not ours to read. */
  #look(open: Open, line: string): void {
    const inner = open.list ? INNER_FENCE.exec(line) : null
    if (inner) open.fence = { char: inner[1]![0]!, length: inner[1]!.length, info: '' }
    const words = line.trim()
    if (words.startsWith('$$') && !(words.length > 2 && words.endsWith('$$'))) open.math = '$$'
    else if (words.startsWith('\\[') && !words.includes('\\]')) open.math = '\\]'
  }

  #ends(open: Open, line: string): boolean {
    const item = ITEM.test(line)
    if (open.list) {
      if (item) return open.source.length > LONG
      return /^\s/.test(line) ? false : open.blank || HEADING.test(line) || FENCE.test(line)
    }
    if (open.blank || HEADING.test(line)) return true
    return open.source.length > (open.source.startsWith('|') ? TOO_LONG : LONG)
  }

  #breakLine(): void {
    const cut = this.#line.lastIndexOf(' ') + 1 || this.#line.length
    const rest = this.#line.slice(cut)
    this.#take(this.#line.slice(0, cut), '')
    this.#shut()
    this.#line = rest
  }

  #shut(): void {
    const open = this.#open
    this.#open = null
    if (!open || (open.kind === 'text' && open.source.trim() === '')) return
    this.blocks.push({ kind: open.kind, info: open.fence && open.kind === 'code' ? open.fence.info : '', source: open.source })
  }
}

function fresh(kind: 'text' | 'code', fence: Fence | null): Open {
  return { kind, source: '', fence, math: '', list: false, blank: false }
}

/** Whether the line closes the fence, or may still come to (`half`). */
function isClosing(line: string, fence: Fence | null, half: boolean): boolean {
  if (!fence) return false
  const words = line.trim()
  if (words === '' || [...words].some((char) => char !== fence.char)) return false
  return half || words.length >= fence.length
}
