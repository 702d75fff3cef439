// Code with its language, a button that copies it, and colours when the highlighter is there.
import { strings } from '../strings'
import { previewFrame, previewKind, type Kind } from './preview'

type Highlighter = typeof import('highlight.js/lib/common').default
let highlighter: Highlighter | null = null
let loading: Promise<Highlighter> | null = null

const LIVE = 6000 // characters up to which code is coloured while it grows
const MOST = 40_000 // and beyond which it never is: colouring takes its time

function withHighlighter(then: (highlighter: Highlighter) => void): void {
  if (highlighter) return then(highlighter)
  loading ??= import('highlight.js/lib/common').then((module) => (highlighter = module.default))
  loading.then(then, () => undefined)
}

export class CodeView {
  readonly element = document.createElement('figure')
  #code = document.createElement('code')
  #text: Text | null = null
  #shown = ''
  #language: string
  #coloured = 0
  #preview: HTMLButtonElement | null = null
  #copy: HTMLButtonElement

  constructor(info: string) {
    this.#language = info.split(/[\s,{]/)[0] ?? ''
    this.element.className = 'code'
    const head = document.createElement('figcaption')
    const name = document.createElement('span')
    name.textContent = this.#language || strings.markdown.plainText
    const copy = document.createElement('button')
    copy.type = 'button'
    copy.className = 'quiet copy'
    copy.textContent = strings.copy
    copy.ariaLabel = strings.markdown.copyCode(this.#language || strings.markdown.plainText)
    copy.addEventListener('click', () => void copied(copy, this.#shown))
    this.#copy = copy
    head.append(name, copy)
    const pre = document.createElement('pre')
    pre.tabIndex = 0
    pre.dir = 'ltr'
    pre.append(this.#code)
    this.element.append(head, pre)
  }

  update(source: string, whole: boolean): void {
    if (source !== this.#shown) this.#write(source)
    const kind = whole && !this.#preview ? previewKind(this.#language, source) : null
    if (kind) this.#offerPreview(kind)
    if (source.length <= (whole ? MOST : LIVE) && (whole || performance.now() - this.#coloured > 250)) this.#colour(source)
  }

  /** A button that shows it in a frame below its source, and takes the frame away again. */
  #offerPreview(kind: Kind): void {
    const button = document.createElement('button')
    button.type = 'button'
    button.className = 'quiet copy'
    button.textContent = strings.markdown.preview
    button.ariaLabel = strings.markdown.previewOf(kind)
    button.ariaExpanded = 'false'
    let frame: HTMLIFrameElement | null = null
    button.addEventListener('click', () => {
      frame?.remove()
      frame = frame ? null : previewFrame(kind, this.#shown)
      if (frame) this.element.append(frame)
      button.ariaExpanded = String(frame !== null)
    })
    this.#preview = button
    this.#copy.before(button)
  }

  #write(source: string): void {
    if (this.#text?.isConnected && source.startsWith(this.#shown)) this.#text.appendData(source.slice(this.#shown.length))
    else {
      this.#text = document.createTextNode(source.slice(this.#coloured ? this.#shown.length : 0))
      if (this.#coloured && source.startsWith(this.#shown)) this.#code.append(this.#text)
      else {
        this.#text.data = source
        this.#code.replaceChildren(this.#text)
      }
    }
    this.#shown = source
  }

  #colour(source: string): void {
    if (!this.#language) return
    this.#coloured = performance.now()
    withHighlighter((highlighter) => {
      if (this.#shown !== source || !highlighter.getLanguage(this.#language)) return
      this.#code.innerHTML = highlighter.highlight(source, { language: this.#language, ignoreIllegals: true }).value
      this.#text = null
    })
  }
}

/** Copies, and says so on the button. */
export async function copied(button: HTMLElement, text: string): Promise<void> {
  const label = button.textContent
  button.textContent = (await copy(text)) ? strings.copied : strings.copyFailed
  setTimeout(() => (button.textContent = label), 1500)
}

export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text)
    return true
  } catch {
    return copyBySelection(text) // browsers have no clipboard for pages without https
  }
}

function copyBySelection(text: string): boolean {
  const area = document.createElement('textarea')
  area.value = text
  area.className = 'unseen'
  document.body.append(area)
  area.select()
  const done = document.execCommand('copy')
  area.remove()
  return done
}
