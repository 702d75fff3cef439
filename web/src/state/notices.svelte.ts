// Short messages above the conversation: at most one error and one piece of news, each only as long as it is true.
import { UnreachableError } from '../transport/http'

/** What a notice is about: it goes when that is over. */
export type Cause = 'running' | 'action' | 'file' | 'connection' | 'deleted'

export interface Notice {
  id: number
  /** What it says. Several things of the same cause are said together. */
  lines: Line[]
  bad: boolean
  cause: Cause | null
  act: { label: string; run: () => void } | null
}

export interface Line {
  text: string
  /** How often it was said. */
  times: number
}

const NEWS = 6000
const ERROR = 20_000
const MOST = 4 // lines

class Notices {
  all: Notice[] = $state([])
  #next = 1
  #timers = new Map<number, ReturnType<typeof setTimeout>>()

  tell(text: string, { cause = null, act = null }: Partial<Pick<Notice, 'cause' | 'act'>> = {}): void {
    this.#add(text, { id: this.#next++, bad: false, cause, act }, NEWS)
  }

  fail(error: unknown, about: Cause = 'action'): void {
    const text = error instanceof Error ? error.message : String(error)
    const cause = error instanceof UnreachableError ? 'connection' : about
    this.#add(text, { id: this.#next++, bad: true, cause, act: null }, ERROR)
  }

  dismiss(id: number): void {
    clearTimeout(this.#timers.get(id))
    this.#timers.delete(id)
    this.all = this.all.filter((one) => one.id !== id)
  }

  /** The cause is over: it was done after all, or nobody waits for it any more. */
  settle(...causes: Cause[]): void {
    for (const one of this.all.filter((one) => one.cause && causes.includes(one.cause))) this.dismiss(one.id)
  }

  /** The newest replaces the one before it; files that are refused one by one are told of together. */
  #add(text: string, notice: Omit<Notice, 'lines'>, stays: number): void {
    const before = this.all.find((one) => one.bad === notice.bad)
    const same = before?.cause === notice.cause && before.lines.find((line) => line.text === text)
    let lines: Line[] = [{ text, times: 1 }]
    if (before && same) lines = before.lines.map((line) => (line === same ? { ...line, times: line.times + 1 } : line))
    else if (before && notice.cause === 'file' && before.cause === 'file') lines = [...before.lines, ...lines].slice(-MOST)
    if (before) this.dismiss(before.id)
    this.all = [...this.all, { ...notice, lines }]
    this.#timers.set(notice.id, setTimeout(() => this.dismiss(notice.id), stays))
  }
}

export const notices = new Notices()
