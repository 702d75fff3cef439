// The thinking time of a reply.
import type { Turn } from './turn.svelte'

/** The clock of a thought. It shows `seconds`, plus the time since `since` unless that is null. */
export interface Clock {
  seconds: number
  since: number | null
}

/** The clock of the open thought; null if its time is unknown. */
export function thinkingClock(turn: Turn): Clock | null {
  const counted = turn.thoughts === 1 ? turn.serverThinkingSeconds : 0
  return counted === null ? null : { seconds: counted + turn.watchedMs / 1000, since: turn.thinkingSince }
}
