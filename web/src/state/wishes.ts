// What a person may set about replies, as the parameters of a conversation, and presets of it.
import type { Values } from '../transport/api'
import { NUMBERS } from '../transport/types'
import { keep, kept } from './storage'

export interface Wishes {
  system: string
  parameters: Values
}

export interface Preset extends Wishes {
  name: string
}

export const PLAIN = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'thinking_budget', 'seed']
export const FURTHER = Object.keys(NUMBERS).filter((name) => !PLAIN.includes(name) && name !== 'logprobs')

/** With a value set, or taken back where it is null or empty. */
export function withValue(parameters: Values, name: string, value: unknown): Values {
  const { [name]: _, ...others } = parameters
  const empty = value === null || value === undefined || value === '' || (Array.isArray(value) && value.length === 0)
  return empty ? others : { ...others, [name]: value }
}

/** Why a number can't be taken; empty where it can. */
export function problem(name: string, text: string): string {
  if (text.trim() === '') return ''
  const bounds = NUMBERS[name]
  const value = Number(text)
  if (!bounds || Number.isNaN(value)) return 'must be a number'
  if (bounds.whole && !Number.isInteger(value)) return 'must be a whole number'
  return value < bounds.low || value > bounds.high ? `must be from ${bounds.low} to ${bounds.high}` : ''
}

export const presets = (): Preset[] => kept<Preset[]>('presets', [])

export function savePreset(preset: Preset): Preset[] {
  const all = [...presets().filter((one) => one.name !== preset.name), preset].sort((a, b) => a.name.localeCompare(b.name))
  keep('presets', all)
  return all
}

export function dropPreset(name: string): Preset[] {
  const all = presets().filter((one) => one.name !== name)
  keep('presets', all)
  return all
}

/** For the conversation that is not made yet. */
export const freshWishes = (): Wishes => kept<Wishes>('fresh', { system: '', parameters: {} })
export const keepFreshWishes = (wishes: Wishes): boolean => keep('fresh', wishes)
