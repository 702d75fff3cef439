// The examples on the first screen. They show what Palaver does, and the embedded model can do them.
import type { Values } from '../transport/api'
import type { ModelCard } from '../transport/types'
import type { StarterName } from '../strings'

export interface Starter {
  name: StarterName
  parameters: Values
  /** Whether the reply is stopped in its thought, to be continued. */
  stops: boolean
  /** Whether a model can do it. */
  suits: (card: ModelCard) => boolean
}

const WEATHER = {
  name: 'get_weather',
  description: 'Weather at a place.',
  parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
}

const STARTERS: readonly Starter[] = [
  { name: 'sum', parameters: {}, stops: false, suits: () => true },
  { name: 'table', parameters: {}, stops: false, suits: () => true },
  { name: 'tool', parameters: { tools: [WEATHER] }, stops: false, suits: (card) => card.takes_tools },
  { name: 'stop', parameters: {}, stops: true, suits: (card) => card.thinks },
]

/** Those for this model; all of them while it is not known what it can. */
export function startersFor(card: ModelCard | null): readonly Starter[] {
  return card?.state === 'ready' ? STARTERS.filter((one) => one.suits(card)) : STARTERS
}
