// Previews of HTML, SVG and Mermaid from a reply. They run in a frame with an opaque origin; the policy that the server sends
// with `preview.html` allows no requests.
import { strings } from '../strings'
import { address } from '../transport/http'

export type Kind = 'html' | 'svg' | 'mermaid'

const KINDS: Record<string, Kind> = { html: 'html', htm: 'html', svg: 'svg', mermaid: 'mermaid' }
let mermaidSource: Promise<string> | null = null

/** The kind of preview for code in this language; null if there is none. */
export function previewKind(language: string, source: string): Kind | null {
  const kind = KINDS[language.toLowerCase()] ?? null
  return kind ?? (/^(xml)?$/i.test(language) && /^\s*<svg[\s>]/i.test(source) ? 'svg' : null)
}

/** Creates the preview frame. */
export function previewFrame(kind: Kind, source: string): HTMLIFrameElement {
  const frame = document.createElement('iframe')
  frame.className = 'preview'
  frame.title = strings.markdown.previewOf(kind)
  frame.setAttribute('sandbox', 'allow-scripts') // an opaque origin
  frame.referrerPolicy = 'no-referrer'
  const handleReady = (event: MessageEvent): void => {
    if (event.source !== frame.contentWindow || event.data !== 'ready') return
    removeEventListener('message', handleReady)
    void send(frame, kind, source)
  }
  addEventListener('message', handleReady)
  frame.src = address('preview.html')
  return frame
}

async function send(frame: HTMLIFrameElement, kind: Kind, source: string): Promise<void> {
  const scheme = getComputedStyle(document.documentElement).colorScheme
  const dark = scheme === 'dark' || (scheme !== 'light' && matchMedia('(prefers-color-scheme: dark)').matches)
  const message = { kind, source, library: kind === 'mermaid' ? await mermaid() : '', dark }
  frame.contentWindow?.postMessage(message, '*') // an opaque origin has no name
}

/** Mermaid's minified build as text, loaded on first use. It runs only in the frame. */
function mermaid(): Promise<string> {
  mermaidSource ??= import('mermaid/dist/mermaid.min.js?url').then(async ({ default: url }) => (await fetch(url)).text())
  mermaidSource.catch(() => (mermaidSource = null))
  return mermaidSource
}
