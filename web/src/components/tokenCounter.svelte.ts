// How many tokens a message has, as the model counts them, before it is sent. Short ones are not counted.
import { model } from '../state/model.svelte'
import * as api from '../transport/api'
import type { Attachment } from './attachments'

const PAUSE = 500 // milliseconds without a key
const WORTH_COUNTING = 400 // characters of a message without files
const MOST_KNOWN = 50

export class TokenCounter {
  total: number | null = $state(null)
  #known = $state.raw(new Map<string, number>())
  #model = ''

  /** The tokens of one attached text; null until they are counted. */
  of(text: string): number | null {
    return this.#known.get(text) ?? null
  }

  /** Counts after a pause. Returns how to give it up. */
  count(text: string, files: readonly Attachment[], name: string): (() => void) | undefined {
    const attached = files.flatMap((file) => ('blob' in file ? [] : [file.text]))
    if (!model.isReady || (attached.length === 0 && text.length < WORTH_COUNTING)) {
      this.total = null
      return undefined
    }
    const leaving = new AbortController()
    const timer = setTimeout(() => void this.#count([text, ...attached], name, leaving.signal), PAUSE)
    return () => {
      clearTimeout(timer)
      leaving.abort()
    }
  }

  async #count(texts: readonly string[], name: string, signal: AbortSignal): Promise<void> {
    const which = `${name} ${model.card?.name ?? ''}`
    if (which !== this.#model) this.#known = new Map()
    this.#model = which
    const [written = '', ...attached] = texts
    try {
      let total = written === '' ? 0 : (await api.countTokens(written, name, signal)).tokens
      for (const text of attached) total += await this.#attached(text, name, signal)
      if (!signal.aborted) this.total = total
    } catch {
      if (!signal.aborted) this.total = null // too long to be counted, or no model
    }
  }

  async #attached(text: string, name: string, signal: AbortSignal): Promise<number> {
    const found = this.of(text) ?? (await api.countTokens(text, name, signal)).tokens
    if (!this.#known.has(text)) this.#known = new Map([...[...this.#known].slice(-MOST_KNOWN), [text, found]])
    return found
  }
}
