// One reply as its events tell it.
import { MarkdownDocument, type Mark } from '../markdown/document'
import type { Reader } from '../transport/stream'
import type { DraftBlock, Error as WireError, Event, Finish, Part, Phase, ReadEvent, Usage } from '../transport/types'

export interface Words {
  kind: 'thinking' | 'text'
  document: MarkdownDocument
}

export class Call {
  readonly kind = 'call'
  arguments = $state('')

  constructor(
    readonly id: string,
    readonly name: string,
    readonly inThought: boolean,
    text = '',
  ) {
    this.arguments = text
  }
}

export interface Media {
  kind: 'media'
  part: Part
}

export type Shown = Words | Call | Media

interface Before {
  parts: Shown[]
  last: Mark | null
  call: string
  calls: Map<number, Call>
  notices: string[]
  phase: Phase | null
}

const MAX_DRAFTS = 5000

export class Turn implements Reader {
  parts: Shown[] = $state.raw([])
  notices: string[] = $state.raw([])
  phase: Phase | null = $state.raw(null)
  /** In the queue; or until its model is loaded, whose name and progress it has. */
  waiting: { position: number; seconds: number | null; loading: string; progress: number | null } | null = $state.raw(null)
  started: { prompt: number; cached: number } | null = $state.raw(null)
  finish: Finish | null = $state.raw(null)
  usage: Usage | null = $state.raw(null)
  error: string | null = $state.raw(null)
  ended = $state.raw(false)
  /** The block that a diffusion model is denoising. After a stop, the one that was not finished. */
  draft: DraftBlock | null = $state.raw(null)
  /** Every draft that was seen, for looking at the steps afterwards. */
  drafts: DraftBlock[] = []
  /** Since when the open thought is being watched, on the page's clock: since it opened, went on or came back. */
  thinkingSince: number | null = $state.raw(null)
  /** For how many milliseconds it was watched before that, since the server counted. */
  thoughtBefore = $state.raw(0)
  /** For how many seconds the reply had been thinking when the server last sent `started`; null if it is not known. */
  thoughtCounted: number | null = $state.raw(0)
  #number = 0
  #calls = new Map<number, Call>()
  #before: Before | null = null

  constructor(private readonly over: (turn: Turn) => void = () => undefined) {}

  get number(): number {
    return this.#number
  }

  /** The last thing a reader sees growing. */
  get last(): Shown | null {
    return this.parts.at(-1) ?? null
  }

  get text(): string {
    return this.#texts('text')
  }

  get thoughts(): number {
    return this.parts.filter((part) => part.kind === 'thinking').length
  }

  get thinking(): string {
    return this.#texts('thinking')
  }

  apply(number: number, event: Event): boolean {
    switch (event.type) {
      case 'waiting':
        this.waiting = { position: event.position, seconds: event.seconds, loading: event.loading ?? '', progress: event.progress ?? null }
        return true
      case 'started':
        this.waiting = null
        this.started = { prompt: event.prompt_tokens, cached: event.cached_tokens }
        this.#count(event.thinking_seconds ?? null)
        if (event.notice && !this.notices.includes(event.notice)) this.notices = [...this.notices, event.notice]
        return true
      case 'draft_block':
        this.#drafted(event)
        return true
      case 'snapshot':
        this.#replace(number, event.message.parts)
        return true
      case 'finished':
        this.#end(event.tail)
        if (event.finish !== 'stopped') this.draft = null
        this.finish = event.finish
        this.usage = event.usage
        this.over(this)
        return true
      case 'failed':
        this.#end(event.tail)
        this.error = event.error
        this.over(this)
        return true
      default:
        return this.#numbered(number, event)
    }
  }

  #drafted(draft: DraftBlock): void {
    this.waiting = null
    if (this.ended) this.#takeBack()
    this.draft = draft
    if (this.drafts.length < MAX_DRAFTS) this.drafts.push(draft)
  }

  /** The only thought of a reply is timed from what the server counted; the times of several are not known apart. */
  #count(seconds: number | null): void {
    this.thoughtCounted = seconds
    if (this.phase !== 'thinking' || this.thoughts !== 1) return
    this.thoughtBefore = 0
    this.thinkingSince = performance.now()
  }

  /** The clock of the thought stands still until more of it is told. */
  pause(): void {
    if (this.thinkingSince === null) return
    this.thoughtBefore += performance.now() - this.thinkingSince
    this.thinkingSince = null
  }

  reject(error: WireError): void {
    this.error = error.message
    this.ended = true
    this.over(this)
  }

  #numbered(number: number, event: ReadEvent): boolean {
    if (number <= this.#number) return true // told before
    if (number !== this.#number + 1) return false
    this.#takeBack()
    this.draft = null
    this.#number = number
    this.#read(event)
    if (this.phase === 'thinking') this.thinkingSince ??= performance.now()
    return true
  }

  #read(event: ReadEvent): void {
    switch (event.type) {
      case 'phase_opened':
        this.#opened(event.phase)
        break
      case 'thinking_delta':
        this.#words('thinking').append(event.text)
        break
      case 'answer_delta':
        this.#words('text').append(event.text)
        break
      case 'tool_call_opened':
        this.#call(event.index, new Call(event.id, event.name, event.in_thought))
        break
      case 'tool_call_delta': {
        const call = this.#calls.get(event.index)
        if (call) call.arguments += event.arguments
        break
      }
      case 'notice':
        this.notices = [...this.notices, event.text]
        break
      default:
        event satisfies never
    }
  }

  #opened(phase: Phase): void {
    this.waiting = null
    this.phase = phase
    this.thinkingSince = phase === 'thinking' ? performance.now() : null
    this.thoughtBefore = 0
    if (phase === 'thinking') this.#words('thinking') // a thought that was opened is seen at once
  }

  #words(kind: 'thinking' | 'text'): MarkdownDocument {
    const last = this.last
    if (last?.kind === kind) return last.document
    this.#closeLast()
    const words: Words = { kind, document: new MarkdownDocument() }
    this.parts = [...this.parts, words]
    return words.document
  }

  #call(index: number, call: Call): void {
    this.#closeLast()
    this.#calls.set(index, call)
    this.parts = [...this.parts, call]
  }

  #closeLast(): void {
    const last = this.last
    if (last?.kind === 'thinking' || last?.kind === 'text') last.document.close()
  }

  #replace(number: number, parts: Part[]): void {
    this.#before = null
    this.#number = number
    this.#calls.clear()
    this.ended = false
    this.parts = shown(parts)
    this.phase = this.last?.kind === 'thinking' ? 'thinking' : this.last?.kind === 'text' ? 'answer' : null
  }

  /** The tail is shown at the end, and taken back where the reply goes on after all. */
  #end(tail: ReadEvent[]): void {
    if (this.ended) this.#takeBack()
    this.pause()
    const last = this.last
    this.#before = {
      parts: this.parts,
      last: last?.kind === 'thinking' || last?.kind === 'text' ? last.document.mark() : null,
      call: last?.kind === 'call' ? last.arguments : '',
      calls: new Map(this.#calls),
      notices: this.notices,
      phase: this.phase,
    }
    for (const event of tail) this.#read(event)
    this.#closeLast()
    this.waiting = null
    this.thinkingSince = null
    this.ended = true
  }

  #takeBack(): void {
    const before = this.#before
    if (this.ended) this.thoughtBefore = 0 // the server counted it
    this.#before = null
    this.ended = false
    this.finish = null
    this.error = null
    if (!before) return
    this.parts = before.parts
    this.notices = before.notices
    this.phase = before.phase
    this.#calls = before.calls
    const last = this.last
    if (before.last && (last?.kind === 'thinking' || last?.kind === 'text')) last.document.restore(before.last)
    if (last?.kind === 'call') last.arguments = before.call
  }

  #texts(kind: 'text' | 'thinking'): string {
    return this.parts.map((part) => (part.kind === kind ? part.document.text : '')).join('')
  }
}

/** The parts of a message as the page shows them. */
export function shown(parts: readonly Part[]): Shown[] {
  return parts.map((part): Shown => {
    switch (part.type) {
      case 'text':
        return { kind: 'text', document: new MarkdownDocument(part.text) }
      case 'thinking':
        return { kind: 'thinking', document: new MarkdownDocument(part.text) }
      case 'tool_call':
        return new Call(part.id, part.name, part.in_thought, part.arguments)
      default:
        return { kind: 'media', part }
    }
  })
}
