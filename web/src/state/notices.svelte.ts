// Short messages above the conversation: at most one error and one piece of news, each only as long as it is true.
import { Unreachable } from '../transport/http'

/** What a notice is about: it goes when that is over. */
export type Cause = 'running' | 'action' | 'file' | 'connection'

export interface Notice {
  id: number
  text: string
  bad: boolean
  cause: Cause | null
  act: { label: string; run: () => void } | null
}

const NEWS = 6000
const ERROR = 20_000

class Notices {
  all: Notice[] = $state([])
  #next = 1

  tell(text: string, { cause = null, act = null }: Partial<Pick<Notice, 'cause' | 'act'>> = {}): void {
    this.#add({ id: this.#next++, text, bad: false, cause, act }, NEWS)
  }

  fail(error: unknown, about: Cause = 'action'): void {
    const text = error instanceof Error ? error.message : String(error)
    const cause = error instanceof Unreachable ? 'connection' : about
    this.#add({ id: this.#next++, text, bad: true, cause, act: null }, ERROR)
  }

  dismiss(id: number): void {
    this.all = this.all.filter((one) => one.id !== id)
  }

  /** The cause is over: it was done after all, or nobody waits for it any more. */
  settle(...causes: Cause[]): void {
    if (this.all.some((one) => one.cause && causes.includes(one.cause))) {
      this.all = this.all.filter((one) => !one.cause || !causes.includes(one.cause))
    }
  }

  #add(notice: Notice, stays: number): void {
    this.all = [...this.all.filter((one) => one.bad !== notice.bad), notice]
    setTimeout(() => this.dismiss(notice.id), stays)
  }
}

export const notices = new Notices()
