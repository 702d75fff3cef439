// Short messages above the conversation: at most one error and one piece of information. Each goes with its cause.
import { UnreachableError } from '../transport/http'

/** The cause of a notice, which is cleared together with it. */
export type Cause = 'running' | 'action' | 'file' | 'connection' | 'deleted'

export interface Notice {
  id: number
  /** Messages with the same cause share a notice. */
  lines: Line[]
  isError: boolean
  cause: Cause | null
  action: NoticeAction | null
}

export interface NoticeAction {
  label: string
  run: () => void
}

/** An error with a way out. */
export class ErrorWithAction extends Error {
  constructor(
    message: string,
    readonly action: NoticeAction,
  ) {
    super(message)
  }
}

export interface Line {
  text: string
  /** How often the message was shown. */
  times: number
}

const INFO_MS = 6000
const ERROR_MS = 20_000
const MAX_LINES = 4

class Notices {
  all: Notice[] = $state([])
  #next = 1
  #timers = new Map<number, ReturnType<typeof setTimeout>>()

  show(text: string, { cause = null, action = null }: Partial<Pick<Notice, 'cause' | 'action'>> = {}): void {
    this.#add(text, { id: this.#next++, isError: false, cause, action }, INFO_MS)
  }

  showError(error: unknown, defaultCause: Cause = 'action'): void {
    const text = error instanceof Error ? error.message : String(error)
    const cause = error instanceof UnreachableError ? 'connection' : defaultCause
    const action = error instanceof ErrorWithAction ? error.action : null
    this.#add(text, { id: this.#next++, isError: true, cause, action }, ERROR_MS)
  }

  dismiss(id: number): void {
    clearTimeout(this.#timers.get(id))
    this.#timers.delete(id)
    this.all = this.all.filter((one) => one.id !== id)
  }

  /** Removes the notices of these causes. */
  clear(...causes: Cause[]): void {
    for (const one of this.all.filter((one) => one.cause && causes.includes(one.cause))) this.dismiss(one.id)
  }

  /** A new notice replaces the previous one. Notices about files are collected. */
  #add(text: string, notice: Omit<Notice, 'lines'>, duration: number): void {
    const previous = this.all.find((one) => one.isError === notice.isError)
    const same = previous?.cause === notice.cause && previous.lines.find((line) => line.text === text)
    let lines: Line[] = [{ text, times: 1 }]
    if (previous && same) lines = previous.lines.map((line) => (line === same ? { ...line, times: line.times + 1 } : line))
    else if (previous && notice.cause === 'file' && previous.cause === 'file') lines = [...previous.lines, ...lines].slice(-MAX_LINES)
    if (previous) this.dismiss(previous.id)
    this.all = [...this.all, { ...notice, lines }]
    this.#timers.set(notice.id, setTimeout(() => this.dismiss(notice.id), duration))
  }
}

export const notices = new Notices()
