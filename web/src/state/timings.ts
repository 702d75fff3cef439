// How long a reply has been thinking, as far as that is known.
import type { Turn } from './turn.svelte'

/** The clock of a thought: it shows `seconds`, and more with every second since `since`, where that is not null. */
export interface Clock {
  seconds: number
  since: number | null
}

/** The clock of the thought that is open; null if its time is not known. */
export function thinkingClock(turn: Turn): Clock | null {
  const counted = turn.thoughts === 1 ? turn.thoughtCounted : 0
  return counted === null ? null : { seconds: counted + turn.thoughtBefore / 1000, since: turn.thinkingSince }
}
