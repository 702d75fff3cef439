// The examples on the first screen. The embedded model supports all of them.
import type { Values } from '../transport/api'
import type { ModelCard } from '../transport/types'
import type { StarterName } from '../strings'

export interface Starter {
  name: StarterName
  parameters: Values
  /** Whether the reply is stopped while it thinks, to show *Continue*. */
  stopEarly: boolean
  /** Whether a model supports the example. */
  isSupported: (card: ModelCard) => boolean
}

const WEATHER = {
  name: 'get_weather',
  description: 'Weather at a place.',
  parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
}

const STARTERS: readonly Starter[] = [
  { name: 'sum', parameters: {}, stopEarly: false, isSupported: () => true },
  { name: 'table', parameters: {}, stopEarly: false, isSupported: () => true },
  { name: 'tool', parameters: { tools: [WEATHER] }, stopEarly: false, isSupported: (card) => card.takes_tools },
  { name: 'stop', parameters: {}, stopEarly: true, isSupported: (card) => card.thinks },
]

/** The examples that a model supports; all of them until it is loaded. */
export function startersFor(card: ModelCard | null): readonly Starter[] {
  return card?.state === 'ready' ? STARTERS.filter((one) => one.isSupported(card)) : STARTERS
}
