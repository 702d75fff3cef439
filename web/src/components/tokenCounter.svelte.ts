// Counts the tokens of an unsent message with the model's tokenizer. Short messages are not counted.
import { model } from '../state/model.svelte'
import * as api from '../transport/api'
import type { Attachment } from './attachments'

const DELAY_MS = 500 // milliseconds without a key
const MIN_CHARS = 400 // characters of a message without files
const MAX_CACHED = 50

export class TokenCounter {
  total: number | null = $state(null)
  #cache = $state.raw(new Map<string, number>())
  #model = ''

  /** The tokens of an attached text; null until they are counted. */
  get(text: string): number | null {
    return this.#cache.get(text) ?? null
  }

  /** Counts after a delay. Returns a function that cancels it. */
  count(text: string, files: readonly Attachment[], name: string): (() => void) | undefined {
    const attached = files.flatMap((file) => ('blob' in file ? [] : [file.text]))
    if (!model.isReady || (attached.length === 0 && text.length < MIN_CHARS)) {
      this.total = null
      return undefined
    }
    const controller = new AbortController()
    const timer = setTimeout(() => void this.#count([text, ...attached], name, controller.signal), DELAY_MS)
    return () => {
      clearTimeout(timer)
      controller.abort()
    }
  }

  async #count(texts: readonly string[], name: string, signal: AbortSignal): Promise<void> {
    const cacheKey = `${name} ${model.card?.name ?? ''}`
    if (cacheKey !== this.#model) this.#cache = new Map()
    this.#model = cacheKey
    const [message = '', ...attached] = texts
    try {
      let total = message === '' ? 0 : (await api.countTokens(message, name, signal)).tokens
      for (const text of attached) total += await this.#countFile(text, name, signal)
      if (!signal.aborted) this.total = total
    } catch {
      if (!signal.aborted) this.total = null // the text is too long, or no model is loaded
    }
  }

  async #countFile(text: string, name: string, signal: AbortSignal): Promise<number> {
    const tokens = this.get(text) ?? (await api.countTokens(text, name, signal)).tokens
    if (!this.#cache.has(text)) this.#cache = new Map([...[...this.#cache].slice(-MAX_CACHED), [text, tokens]])
    return tokens
  }
}
