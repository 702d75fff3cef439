// A growing Markdown text, split into closed blocks and one open block. The cost of another token depends on the length
// of its block, not on that of the reply.
import { endOfEnvironment } from './math'

export interface Block {
  readonly kind: 'text' | 'code'
  /** The info string of a fenced code block. */
  readonly info: string
  readonly source: string
}

interface Fence {
  char: string
  length: number
  info: string
}

interface OpenBlock {
  kind: 'text' | 'code'
  source: string
  fence: Fence | null // of a code block, or of one inside a list
  math: string // the closing delimiter of the open formula
  list: boolean
  blank: boolean
}

export interface Mark {
  blocks: number
  pieces: number
  open: OpenBlock | null
  line: string
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/
const INNER_FENCE = /^\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*(`{3,}|~{3,})\s*([^`]*)$/
const ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)/
const HEADING = /^ {0,3}#{1,6}(?:\s|$)/
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/
const SOFT_LIMIT = 4096 // characters after which a block is split at the next boundary
const HARD_LIMIT = 16384 // characters after which a block is split anywhere

export class MarkdownDocument {
  readonly blocks: Block[] = []
  #open: OpenBlock | null = null
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

  /** The open block with its text so far. */
  get tail(): Block | null {
    const open = this.#open
    if (open?.kind === 'code') {
      const partial = this.#line !== '' && isClosing(this.#line, open.fence, true) ? '' : this.#line
      return { kind: 'code', info: open.fence?.info ?? '', source: open.source + partial }
    }
    const source = (open?.source ?? '') + this.#line
    return source.trim() === '' ? null : { kind: 'text', info: '', source }
  }

  /** The source text. */
  get text(): string {
    return this.#pieces.join('')
  }

  append(text: string): void {
    if (text === '') return
    this.#pieces.push(text)
    const lines = text.split('\n')
    lines[0] = this.#line + (lines[0] ?? '')
    this.#line = lines.pop() ?? ''
    for (const line of lines) this.#addLine(line)
    if (this.#line.length > HARD_LIMIT && this.#open?.kind !== 'code') this.#breakLine()
    this.#notify()
  }

  /** Closes the open block: no more text follows. */
  close(): void {
    if (this.#line !== '') {
      const line = this.#line
      this.#line = ''
      this.#addLine(line, '')
    }
    this.#closeBlock()
    this.#notify()
  }

  mark(): Mark {
    return { blocks: this.blocks.length, pieces: this.#pieces.length, open: this.#open && { ...this.#open }, line: this.#line }
  }

  restore(mark: Mark): void {
    this.blocks.length = mark.blocks
    this.#pieces.length = mark.pieces
    this.#open = mark.open && { ...mark.open }
    this.#line = mark.line
    this.#notify()
  }

  subscribe(listener: () => void): () => void {
    this.#listeners.add(listener)
    return () => this.#listeners.delete(listener)
  }

  #notify(): void {
    for (const listener of this.#listeners) listener()
  }

  #addLine(line: string, end = '\n'): void {
    const open = this.#open
    if (open?.kind === 'code') this.#addCodeLine(open, line, end)
    else if (open && (open.fence !== null || open.math !== '')) this.#addNestedLine(open, line + end)
    else this.#addTextLine(line, end)
  }

  #addCodeLine(open: OpenBlock, line: string, end: string): void {
    if (isClosing(line, open.fence, false)) this.#closeBlock()
    else open.source += line + end
  }

  /** Inside a fence of a list or a formula, only the closing delimiter is parsed. */
  #addNestedLine(open: OpenBlock, line: string): void {
    open.source += line
    if (open.fence !== null && isClosing(line.trim(), open.fence, false)) open.fence = null
    else if (open.math !== '' && line.trimEnd().endsWith(open.math)) {
      open.math = ''
      if (!open.list) this.#closeBlock()
    }
  }

  #addTextLine(line: string, end: string): void {
    if (line.trim() === '') {
      if (this.#open) {
        this.#open.source += line + end
        this.#open.blank = true
      }
      return
    }
    if (this.#open && this.#endsBlock(this.#open, line)) this.#closeBlock()
    const fence = FENCE.exec(line)
    if (fence && !this.#open?.list) {
      this.#closeBlock()
      this.#open = newBlock('code', { char: fence[2]![0]!, length: fence[2]!.length, info: fence[3]!.trim() })
      return
    }
    const open = (this.#open ??= { ...newBlock('text', null), list: ITEM.test(line) && !RULE.test(line) })
    open.source += line + end
    open.blank = false
    this.#detectNesting(open, line)
    if (HEADING.test(line) && !open.list) this.#closeBlock()
  }

  /** Detects a fence or a formula whose content must not be parsed. */
  #detectNesting(open: OpenBlock, line: string): void {
    const inner = open.list ? INNER_FENCE.exec(line) : null
    if (inner) open.fence = { char: inner[1]![0]!, length: inner[1]!.length, info: '' }
    const words = line.trim()
    if (words.startsWith('$$') && !(words.length > 2 && words.endsWith('$$'))) open.math = '$$'
    else if (words.startsWith('\\[') && !words.includes('\\]')) open.math = '\\]'
    else {
      const end = endOfEnvironment(words)
      if (end && !words.includes(end)) open.math = end
    }
  }

  #endsBlock(open: OpenBlock, line: string): boolean {
    const item = ITEM.test(line)
    if (open.list) {
      if (item) return open.source.length > SOFT_LIMIT
      return /^\s/.test(line) ? false : open.blank || HEADING.test(line) || FENCE.test(line)
    }
    if (open.blank || HEADING.test(line)) return true
    return open.source.length > (open.source.startsWith('|') ? HARD_LIMIT : SOFT_LIMIT)
  }

  #breakLine(): void {
    const cut = this.#line.lastIndexOf(' ') + 1 || this.#line.length
    const rest = this.#line.slice(cut)
    this.#addLine(this.#line.slice(0, cut), '')
    this.#closeBlock()
    this.#line = rest
  }

  #closeBlock(): void {
    const open = this.#open
    this.#open = null
    if (!open || (open.kind === 'text' && open.source.trim() === '')) return
    this.blocks.push({ kind: open.kind, info: open.fence && open.kind === 'code' ? open.fence.info : '', source: open.source })
  }
}

function newBlock(kind: 'text' | 'code', fence: Fence | null): OpenBlock {
  return { kind, source: '', fence, math: '', list: false, blank: false }
}

/** Whether the line closes the fence. `partial`: whether an incomplete line could still close it. */
function isClosing(line: string, fence: Fence | null, partial: boolean): boolean {
  if (!fence) return false
  const words = line.trim()
  if (words === '' || [...words].some((char) => char !== fence.char)) return false
  return partial || words.length >= fence.length
}
