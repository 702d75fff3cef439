// What a person may set about replies, as the parameters of a conversation, and presets of it.
import * as api from '../transport/api'
import type { Values } from '../transport/api'
import { NUMBERS, type Preset } from '../transport/types'
import { keep, kept } from './storage'

export interface Wishes {
  system: string
  parameters: Values
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

/** They are the server's, so that the terminal and other browsers have them too. */
export const presets = (): Promise<Preset[]> => api.presets()

export async function savePreset(preset: Preset): Promise<Preset[]> {
  await api.savePreset(preset)
  return api.presets()
}

export async function dropPreset(name: string): Promise<Preset[]> {
  await api.deletePreset(name)
  return api.presets()
}

/** For the conversation that is not made yet. */
export const freshWishes = (): Wishes => kept<Wishes>('fresh', { system: '', parameters: {} })
export const keepFreshWishes = (wishes: Wishes): boolean => keep('fresh', wishes)
