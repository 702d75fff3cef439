// Keeps an element of the page up to date with a document that grows: closed blocks are made once, the open one anew.
import { CodeView } from './code'
import type { Block, MarkdownDocument } from './document'
import { drawFormulas } from './formula'
import { rendered, type References } from './render'

interface Shown {
  block: Block
  element: HTMLElement
  code: CodeView | null
}

const SHARE = 8 // of the time that passes, at most one part in so many goes into drawing the open block
const CHUNK = 16 // blocks that are laid out together, so that the browser looks at few things however long a text is
const SLICE = 12 // milliseconds of work at a time where much has to be drawn at once

export class MarkdownView {
  #shown: Shown[] = []
  #tail: Shown | null = null
  #references: References = {}
  #chunk: HTMLElement | null = null
  #frame = 0
  #timer: ReturnType<typeof setTimeout> | undefined
  #cost = 0
  #drawn = 0
  #stopListening: () => void

  constructor(
    private readonly root: HTMLElement,
    private readonly document: MarkdownDocument,
    private readonly breaks = false,
  ) {
    this.#stopListening = document.listen(() => this.#schedule())
    this.#draw()
  }

  destroy(): void {
    this.#stopListening()
    cancelAnimationFrame(this.#frame)
    clearTimeout(this.#timer)
    this.root.replaceChildren()
  }

  /** Once a frame, and less often where the open block is dear. */
  #schedule(): void {
    if (this.#frame || this.#timer !== undefined) return
    const pause = this.#drawn + this.#cost * SHARE - performance.now()
    if (pause > 16) this.#timer = setTimeout(() => this.#ask(), pause)
    else this.#ask()
  }

  #ask(): void {
    this.#timer = undefined
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0
      this.#draw()
    })
  }

  #draw(): void {
    const begun = performance.now()
    this.#takeBack()
    let made = 0
    while (this.#shown.length < this.document.blocks.length) {
      if (made > 0 && performance.now() - begun > SLICE) return this.#ask()
      this.#settle(this.document.blocks[this.#shown.length]!)
      made += 1
    }
    const open = performance.now()
    this.#drawTail(this.document.tail)
    this.#drawn = performance.now()
    this.#cost = this.#drawn - open
  }

  /** What was shown and is no longer in the document. */
  #takeBack(): void {
    const blocks = this.document.blocks
    while (this.#shown.length > 0 && this.#shown.at(-1)!.block !== blocks[this.#shown.length - 1]) {
      this.#shown.pop()!.element.remove()
      while (this.root.lastElementChild?.childElementCount === 0) this.root.lastElementChild.remove()
      this.#chunk = this.root.lastElementChild as HTMLElement | null
    }
  }

  #settle(block: Block): void {
    const tail = this.#tail
    this.#tail = null
    if (tail?.code && block.kind === 'code') {
      tail.code.update(block.source, true)
      this.#shown.push({ ...tail, block })
      return
    }
    tail?.element.remove()
    const made = this.#made(block, true)
    this.#append(made.element)
    this.#shown.push(made)
  }

  #drawTail(block: Block | null): void {
    if (block?.source === this.#tail?.block.source && block?.kind === this.#tail?.block.kind) return
    if (block?.kind === 'code' && this.#tail?.code) {
      this.#tail.code.update(block.source, false)
      this.#tail.block = block
      return
    }
    const before = this.#tail
    this.#tail = block && this.#made(block, false)
    if (before && this.#tail) before.element.replaceWith(this.#tail.element)
    else if (before) before.element.remove()
    else if (this.#tail) this.#append(this.#tail.element)
  }

  #append(element: HTMLElement): void {
    if (!this.#chunk?.isConnected || this.#chunk.childElementCount >= CHUNK) {
      this.#chunk = document.createElement('div')
      this.#chunk.className = 'chunk'
      this.root.append(this.#chunk)
    }
    this.#chunk.append(element)
  }

  #made(block: Block, whole: boolean): Shown {
    if (block.kind === 'code') {
      const code = new CodeView(block.info)
      code.update(block.source, whole)
      return { block, element: code.element, code }
    }
    const element = document.createElement('div')
    element.className = 'block'
    element.append(rendered(block.source, this.#references, this.breaks))
    if (whole) this.#finish(element)
    return { block, element, code: null }
  }

  /** Code inside of lists, and formulas. */
  #finish(element: HTMLElement): void {
    for (const pre of element.querySelectorAll('pre')) {
      const code = pre.querySelector('code')
      const view = new CodeView(/language-(\S+)/.exec(code?.className ?? '')?.[1] ?? '')
      view.update(pre.textContent ?? '', true)
      pre.replaceWith(view.element)
    }
    drawFormulas(element)
  }
}
