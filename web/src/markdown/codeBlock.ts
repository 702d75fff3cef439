// A block of code with its language and a copy button. It is highlighted once highlight.js is loaded.
import { strings } from '../strings'
import { previewFrame, previewKind, type Kind } from './preview'

type Highlighter = typeof import('highlight.js/lib/common').default
let highlighter: Highlighter | null = null
let loading: Promise<Highlighter> | null = null

const MAX_LIVE_LENGTH = 6000 // characters: longer code is not highlighted while it grows
const MAX_LENGTH = 40_000 // characters: longer code is never highlighted, because it would take too long

function withHighlighter(then: (highlighter: Highlighter) => void): void {
  if (highlighter) return then(highlighter)
  loading ??= import('highlight.js/lib/common').then((module) => (highlighter = module.default))
  loading.then(then, () => undefined)
}

export class CodeBlock {
  readonly element = document.createElement('figure')
  #code = document.createElement('code')
  #text: Text | null = null
  #source = ''
  #language: string
  #highlightedAt = 0
  #preview: HTMLButtonElement | null = null
  #copyButton: HTMLButtonElement

  constructor(info: string) {
    this.#language = info.split(/[\s,{]/)[0] ?? ''
    this.element.className = 'code'
    const head = document.createElement('figcaption')
    const name = document.createElement('span')
    name.textContent = this.#language || strings.markdown.plainText
    const copyButton = document.createElement('button')
    copyButton.type = 'button'
    copyButton.className = 'quiet copy'
    copyButton.textContent = strings.copy
    copyButton.ariaLabel = strings.markdown.copyCode(this.#language || strings.markdown.plainText)
    copyButton.addEventListener('click', () => void copyToClipboard(copyButton, this.#source))
    this.#copyButton = copyButton
    head.append(name, copyButton)
    const pre = document.createElement('pre')
    pre.tabIndex = 0
    pre.dir = 'ltr'
    pre.append(this.#code)
    this.element.append(head, pre)
  }

  update(source: string, whole: boolean): void {
    if (source !== this.#source) this.#write(source)
    const kind = whole && !this.#preview ? previewKind(this.#language, source) : null
    if (kind) this.#addPreviewButton(kind)
    if (source.length <= (whole ? MAX_LENGTH : MAX_LIVE_LENGTH) && (whole || performance.now() - this.#highlightedAt > 250)) this.#highlight(source)
  }

  /** Adds a button that shows and hides the preview frame below the source. */
  #addPreviewButton(kind: Kind): void {
    const button = document.createElement('button')
    button.type = 'button'
    button.className = 'quiet copy'
    button.textContent = strings.markdown.preview
    button.ariaLabel = strings.markdown.previewOf(kind)
    button.ariaExpanded = 'false'
    let frame: HTMLIFrameElement | null = null
    button.addEventListener('click', () => {
      frame?.remove()
      frame = frame ? null : previewFrame(kind, this.#source)
      if (frame) this.element.append(frame)
      button.ariaExpanded = String(frame !== null)
    })
    this.#preview = button
    this.#copyButton.before(button)
  }

  #write(source: string): void {
    if (this.#text?.isConnected && source.startsWith(this.#source)) this.#text.appendData(source.slice(this.#source.length))
    else {
      this.#text = document.createTextNode(source.slice(this.#highlightedAt ? this.#source.length : 0))
      if (this.#highlightedAt && source.startsWith(this.#source)) this.#code.append(this.#text)
      else {
        this.#text.data = source
        this.#code.replaceChildren(this.#text)
      }
    }
    this.#source = source
  }

  #highlight(source: string): void {
    if (!this.#language) return
    this.#highlightedAt = performance.now()
    withHighlighter((highlighter) => {
      if (this.#source !== source || !highlighter.getLanguage(this.#language)) return
      this.#code.innerHTML = highlighter.highlight(source, { language: this.#language, ignoreIllegals: true }).value
      this.#text = null
    })
  }
}

/** Copies the text and shows the result on the button. */
export async function copyToClipboard(button: HTMLElement, text: string): Promise<void> {
  const label = button.textContent
  button.textContent = (await copyText(text)) ? strings.copied : strings.copyFailed
  setTimeout(() => (button.textContent = label), 1500)
}

export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text)
    return true
  } catch {
    return copyBySelection(text) // pages without HTTPS have no clipboard API
  }
}

function copyBySelection(text: string): boolean {
  const area = document.createElement('textarea')
  area.value = text
  area.className = 'unseen'
  document.body.append(area)
  area.select()
  const copied = document.execCommand('copy')
  area.remove()
  return copied
}
