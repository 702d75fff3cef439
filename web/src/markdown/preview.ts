// HTML, SVG and Mermaid that a model wrote, shown beside their source. They run in a frame whose origin is an opaque one, and
// whose policy, which the server sends with `preview.html`, allows no request.
import { strings } from '../strings'
import { address } from '../transport/http'

export type Kind = 'html' | 'svg' | 'mermaid'

const KINDS: Record<string, Kind> = { html: 'html', htm: 'html', svg: 'svg', mermaid: 'mermaid' }
let library: Promise<string> | null = null

/** How code of this language is shown; null where it is only read. */
export function previewKind(language: string, source: string): Kind | null {
  const kind = KINDS[language.toLowerCase()] ?? null
  return kind ?? (/^(xml)?$/i.test(language) && /^\s*<svg[\s>]/i.test(source) ? 'svg' : null)
}

/** A frame that shows it. */
export function previewFrame(kind: Kind, source: string): HTMLIFrameElement {
  const frame = document.createElement('iframe')
  frame.className = 'preview'
  frame.title = strings.markdown.previewOf(kind)
  frame.setAttribute('sandbox', 'allow-scripts') // never the page's own origin
  frame.referrerPolicy = 'no-referrer'
  const ready = (event: MessageEvent): void => {
    if (event.source !== frame.contentWindow || event.data !== 'ready') return
    removeEventListener('message', ready)
    void send(frame, kind, source)
  }
  addEventListener('message', ready)
  frame.src = address('preview.html')
  return frame
}

async function send(frame: HTMLIFrameElement, kind: Kind, source: string): Promise<void> {
  const scheme = getComputedStyle(document.documentElement).colorScheme
  const dark = scheme === 'dark' || (scheme !== 'light' && matchMedia('(prefers-color-scheme: dark)').matches)
  const message = { kind, source, library: kind === 'mermaid' ? await mermaid() : '', dark }
  frame.contentWindow?.postMessage(message, '*') // an opaque origin has no name
}

/** Mermaid's own build, as text: it is loaded on first use, and runs in the frame alone. */
function mermaid(): Promise<string> {
  library ??= import('mermaid/dist/mermaid.min.js?url').then(async ({ default: url }) => (await fetch(url)).text())
  library.catch(() => (library = null))
  return library
}
