// How long a reply thought, as far as that is known.
import type { Stored } from '../transport/types'
import type { Turn } from './turn.svelte'

/** The clock of a thought: it shows `seconds`, and more with every second since `since`, where that is not null. */
export interface Clock {
  seconds: number
  since: number | null
}

/** The clock of the thought that is open; null where nobody knows. `alone`: the reply has no other thought. */
export function thinkingClock(turn: Turn, message: Stored, alone: boolean): Clock | null {
  const before = (alone && message.reply?.timings['thinking']) || 0
  if (!turn.late || !alone) return { seconds: before + turn.thoughtBefore / 1000, since: turn.thinkingSince }
  const started = message.reply?.started_at
  if (before > 0 || !started) return null
  return { seconds: 0, since: performance.now() - Math.max(0, Date.now() - Date.parse(started)) }
}
