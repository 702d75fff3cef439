// Keeps an element up to date with a growing document: closed blocks are rendered once, the open block again and again.
import { CodeBlock } from './codeBlock'
import type { Block, MarkdownDocument } from './document'
import { renderFormulas } from './formula'
import { renderMarkdown, type References } from './render'

interface RenderedBlock {
  block: Block
  element: HTMLElement
  code: CodeBlock | null
}

const COST_RATIO = 8 // rendering the open block takes at most 1/8 of the time
const CHUNK_BLOCKS = 16 // blocks that share a parent, so that the browser checks the visibility of few elements in a long text
const SLICE_MS = 12 // milliseconds of rendering per frame for a long document

export class MarkdownView {
  #blocks: RenderedBlock[] = []
  #tail: RenderedBlock | null = null
  #references: References = {}
  #chunk: HTMLElement | null = null
  #frame = 0
  #timer: ReturnType<typeof setTimeout> | undefined
  #tailCost = 0
  #drawnAt = 0
  #stopListening: () => void

  constructor(
    private readonly root: HTMLElement,
    private readonly document: MarkdownDocument,
    private readonly breaks = false,
  ) {
    this.#stopListening = document.subscribe(() => this.#schedule())
    this.#update()
  }

  destroy(): void {
    this.#stopListening()
    cancelAnimationFrame(this.#frame)
    clearTimeout(this.#timer)
    this.root.replaceChildren()
  }

  /** Schedules an update for the next frame, or later if the open block is expensive. */
  #schedule(): void {
    if (this.#frame || this.#timer !== undefined) return
    const pause = this.#drawnAt + this.#tailCost * COST_RATIO - performance.now()
    if (pause > 16) this.#timer = setTimeout(() => this.#requestFrame(), pause)
    else this.#requestFrame()
  }

  #requestFrame(): void {
    this.#timer = undefined
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0
      this.#update()
    })
  }

  #update(): void {
    const start = performance.now()
    this.#removeStaleBlocks()
    let count = 0
    while (this.#blocks.length < this.document.blocks.length) {
      if (count > 0 && performance.now() - start > SLICE_MS) return this.#requestFrame()
      this.#addBlock(this.document.blocks[this.#blocks.length]!)
      count += 1
    }
    const tailStart = performance.now()
    this.#updateTail(this.document.tail)
    this.#drawnAt = performance.now()
    this.#tailCost = this.#drawnAt - tailStart
  }

  /** Removes blocks that are no longer in the document. */
  #removeStaleBlocks(): void {
    const blocks = this.document.blocks
    while (this.#blocks.length > 0 && this.#blocks.at(-1)!.block !== blocks[this.#blocks.length - 1]) {
      this.#blocks.pop()!.element.remove()
      while (this.root.lastElementChild?.childElementCount === 0) this.root.lastElementChild.remove()
      this.#chunk = this.root.lastElementChild as HTMLElement | null
    }
  }

  #addBlock(block: Block): void {
    const tail = this.#tail
    this.#tail = null
    if (tail?.code && block.kind === 'code') {
      tail.code.update(block.source, true)
      this.#blocks.push({ ...tail, block })
      return
    }
    tail?.element.remove()
    const added = this.#render(block, true)
    this.#append(added.element)
    this.#blocks.push(added)
  }

  #updateTail(block: Block | null): void {
    if (block?.source === this.#tail?.block.source && block?.kind === this.#tail?.block.kind) return
    if (block?.kind === 'code' && this.#tail?.code) {
      this.#tail.code.update(block.source, false)
      this.#tail.block = block
      return
    }
    const previous = this.#tail
    this.#tail = block && this.#render(block, false)
    if (previous && this.#tail) previous.element.replaceWith(this.#tail.element)
    else if (previous) previous.element.remove()
    else if (this.#tail) this.#append(this.#tail.element)
  }

  #append(element: HTMLElement): void {
    if (!this.#chunk?.isConnected || this.#chunk.childElementCount >= CHUNK_BLOCKS) {
      this.#chunk = document.createElement('div')
      this.#chunk.className = 'chunk'
      this.root.append(this.#chunk)
    }
    this.#chunk.append(element)
  }

  #render(block: Block, isClosed: boolean): RenderedBlock {
    if (block.kind === 'code') {
      const code = new CodeBlock(block.info)
      code.update(block.source, isClosed)
      return { block, element: code.element, code }
    }
    const element = document.createElement('div')
    element.className = 'block'
    element.append(renderMarkdown(block.source, this.#references, this.breaks))
    if (isClosed) this.#renderCodeAndFormulas(element)
    return { block, element, code: null }
  }

  /** Renders code inside lists, and formulas. */
  #renderCodeAndFormulas(element: HTMLElement): void {
    for (const pre of element.querySelectorAll('pre')) {
      const code = pre.querySelector('code')
      const view = new CodeBlock(/language-(\S+)/.exec(code?.className ?? '')?.[1] ?? '')
      view.update(pre.textContent ?? '', true)
      pre.replaceWith(view.element)
    }
    renderFormulas(element)
  }
}
