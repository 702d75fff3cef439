// A reply, built from its events.
import { MarkdownDocument, type Mark } from '../markdown/document'
import type { Reader } from '../transport/stream'
import type { DraftBlock, Error as WireError, Event, Finish, Part, Phase, ReadEvent, Usage } from '../transport/types'

export interface TextPart {
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

export interface MediaPart {
  kind: 'media'
  part: Part
}

export type DisplayPart = TextPart | Call | MediaPart

interface Checkpoint {
  parts: DisplayPart[]
  last: Mark | null
  call: string
  calls: Map<number, Call>
  notices: string[]
  phase: Phase | null
}

const MAX_DRAFTS = 5000

export class Turn implements Reader {
  parts: DisplayPart[] = $state.raw([])
  notices: string[] = $state.raw([])
  phase: Phase | null = $state.raw(null)
  /** The position in the queue, or the name and progress of the model that is being loaded. */
  waiting: { position: number; seconds: number | null; loading: string; progress: number | null } | null = $state.raw(null)
  started: { prompt: number; cached: number } | null = $state.raw(null)
  finish: Finish | null = $state.raw(null)
  usage: Usage | null = $state.raw(null)
  error: string | null = $state.raw(null)
  ended = $state.raw(false)
  /** The block that a diffusion model is denoising. After a stop, the unfinished one. */
  draft: DraftBlock | null = $state.raw(null)
  /** All received drafts, for the view of the steps. */
  drafts: DraftBlock[] = []
  /** When the open thought was opened or resumed, on the page's clock; null while it is paused. */
  thinkingSince: number | null = $state.raw(null)
  /** The milliseconds of thinking before that which the server has not counted. */
  watchedMs = $state.raw(0)
  /** The seconds of thinking that the server counted in its last `started` event; null if unknown. */
  serverThinkingSeconds: number | null = $state.raw(0)
  #number = 0
  #calls = new Map<number, Call>()
  #checkpoint: Checkpoint | null = null

  constructor(private readonly onEnd: (turn: Turn) => void = () => undefined) {}

  get number(): number {
    return this.#number
  }

  /** The part that is growing. */
  get last(): DisplayPart | null {
    return this.parts.at(-1) ?? null
  }

  get text(): string {
    return this.#joinText('text')
  }

  get thoughts(): number {
    return this.parts.filter((part) => part.kind === 'thinking').length
  }

  get thinking(): string {
    return this.#joinText('thinking')
  }

  apply(number: number, event: Event): boolean {
    switch (event.type) {
      case 'waiting':
        this.waiting = { position: event.position, seconds: event.seconds, loading: event.loading ?? '', progress: event.progress ?? null }
        return true
      case 'started':
        this.waiting = null
        this.started = { prompt: event.prompt_tokens, cached: event.cached_tokens }
        this.#setThinkingTime(event.thinking_seconds ?? null)
        if (event.notice && !this.notices.includes(event.notice)) this.notices = [...this.notices, event.notice]
        return true
      case 'draft_block':
        this.#applyDraft(event)
        return true
      case 'snapshot':
        this.#replace(number, event.message.parts)
        return true
      case 'finished':
        this.#end(event.tail)
        if (event.finish !== 'stopped') this.draft = null
        this.finish = event.finish
        this.usage = event.usage
        this.onEnd(this)
        return true
      case 'failed':
        this.#end(event.tail)
        this.error = event.error
        this.onEnd(this)
        return true
      default:
        return this.#applyNumbered(number, event)
    }
  }

  #applyDraft(draft: DraftBlock): void {
    this.waiting = null
    if (this.ended) this.#restoreCheckpoint()
    this.draft = draft
    if (this.drafts.length < MAX_DRAFTS) this.drafts.push(draft)
  }

  /** The server's count applies to a single thought only: the times of several thoughts are not known separately. */
  #setThinkingTime(seconds: number | null): void {
    this.serverThinkingSeconds = seconds
    if (this.phase !== 'thinking' || this.thoughts !== 1) return
    this.watchedMs = 0
    this.thinkingSince = performance.now()
  }

  /** Pauses the clock of the thought until the next event. */
  pause(): void {
    if (this.thinkingSince === null) return
    this.watchedMs += performance.now() - this.thinkingSince
    this.thinkingSince = null
  }

  reject(error: WireError): void {
    this.error = error.message
    this.ended = true
    this.onEnd(this)
  }

  #applyNumbered(number: number, event: ReadEvent): boolean {
    if (number <= this.#number) return true // a duplicate
    if (number !== this.#number + 1) return false
    this.#restoreCheckpoint()
    this.draft = null
    this.#number = number
    this.#applyEvent(event)
    if (this.phase === 'thinking') this.thinkingSince ??= performance.now()
    return true
  }

  #applyEvent(event: ReadEvent): void {
    switch (event.type) {
      case 'phase_opened':
        this.#openPhase(event.phase)
        break
      case 'thinking_delta':
        this.#openDocument('thinking').append(event.text)
        break
      case 'answer_delta':
        this.#openDocument('text').append(event.text)
        break
      case 'tool_call_opened':
        this.#openCall(event.index, new Call(event.id, event.name, event.in_thought))
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

  #openPhase(phase: Phase): void {
    this.waiting = null
    this.phase = phase
    this.thinkingSince = phase === 'thinking' ? performance.now() : null
    this.watchedMs = 0
    if (phase === 'thinking') this.#openDocument('thinking') // an empty thought is shown at once
  }

  #openDocument(kind: 'thinking' | 'text'): MarkdownDocument {
    const last = this.last
    if (last?.kind === kind) return last.document
    this.#closeLast()
    const part: TextPart = { kind, document: new MarkdownDocument() }
    this.parts = [...this.parts, part]
    return part.document
  }

  #openCall(index: number, call: Call): void {
    this.#closeLast()
    this.#calls.set(index, call)
    this.parts = [...this.parts, call]
  }

  #closeLast(): void {
    const last = this.last
    if (last?.kind === 'thinking' || last?.kind === 'text') last.document.close()
  }

  #replace(number: number, parts: Part[]): void {
    this.#checkpoint = null
    this.#number = number
    this.#calls.clear()
    this.ended = false
    this.parts = toDisplayParts(parts)
    this.phase = this.last?.kind === 'thinking' ? 'thinking' : this.last?.kind === 'text' ? 'answer' : null
  }

  /** Applies the tail of a reply that ended. It is undone if the reply is continued. */
  #end(tail: ReadEvent[]): void {
    if (this.ended) this.#restoreCheckpoint()
    this.pause()
    const last = this.last
    this.#checkpoint = {
      parts: this.parts,
      last: last?.kind === 'thinking' || last?.kind === 'text' ? last.document.mark() : null,
      call: last?.kind === 'call' ? last.arguments : '',
      calls: new Map(this.#calls),
      notices: this.notices,
      phase: this.phase,
    }
    for (const event of tail) this.#applyEvent(event)
    this.#closeLast()
    this.waiting = null
    this.thinkingSince = null
    this.ended = true
  }

  #restoreCheckpoint(): void {
    const checkpoint = this.#checkpoint
    if (this.ended) this.watchedMs = 0 // the server has counted it
    this.#checkpoint = null
    this.ended = false
    this.finish = null
    this.error = null
    if (!checkpoint) return
    this.parts = checkpoint.parts
    this.notices = checkpoint.notices
    this.phase = checkpoint.phase
    this.#calls = checkpoint.calls
    const last = this.last
    if (checkpoint.last && (last?.kind === 'thinking' || last?.kind === 'text')) last.document.restore(checkpoint.last)
    if (last?.kind === 'call') last.arguments = checkpoint.call
  }

  #joinText(kind: 'text' | 'thinking'): string {
    return this.parts.map((part) => (part.kind === kind ? part.document.text : '')).join('')
  }
}

/** Converts the parts of a stored message. */
export function toDisplayParts(parts: readonly Part[]): DisplayPart[] {
  return parts.map((part): DisplayPart => {
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
