// What a person may set about replies, as the parameters of a conversation, and presets of it.
import { strings } from '../strings'
import * as api from '../transport/api'
import type { Values } from '../transport/api'
import { NUMBERS, type Preset } from '../transport/types'
import { keep, kept } from './storage'

export interface Wishes {
  system: string
  parameters: Values
}

export const PLAIN = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'thinking_budget', 'seed']
/** Only for models that write by denoising. */
export const OF_DIFFUSION = ['steps', 'block_length']
/** Where the sliders go: the range that people use, not all that is allowed. The field beside takes any value. */
export const SLIDERS: Record<string, readonly [low: number, high: number, step: number]> = {
  temperature: [0, 2, 0.05],
  top_p: [0, 1, 0.01],
  top_k: [0, 200, 1],
  min_p: [0, 1, 0.01],
  typical_p: [0, 1, 0.01],
  top_a: [0, 1, 0.01],
  dynatemp_range: [0, 2, 0.05],
  xtc_probability: [0, 1, 0.01],
  xtc_threshold: [0, 0.5, 0.01],
  dry_multiplier: [0, 2, 0.05],
  repetition_penalty: [0.8, 1.5, 0.01],
  presence_penalty: [-2, 2, 0.05],
  frequency_penalty: [-2, 2, 0.05],
}
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
  const { notNumber, notWhole, belowRange, outOfRange } = strings.settings
  if (!bounds || Number.isNaN(value)) return notNumber
  if (bounds.whole && !Number.isInteger(value)) return notWhole
  if (value >= bounds.low && value <= bounds.high) return ''
  return bounds.high >= Number.MAX_SAFE_INTEGER ? belowRange(bounds.low) : outOfRange(bounds.low, bounds.high)
}

/** Tools as they were typed. Throws an error that says what is wrong with them. */
export function parseTools(text: string): unknown[] {
  if (text.trim() === '') return []
  const told = strings.settings
  let value: unknown
  try {
    value = JSON.parse(text)
  } catch (error) {
    throw new Error(told.toolsNotJson(error instanceof Error ? error.message : String(error)))
  }
  if (!Array.isArray(value)) throw new Error(told.toolsNotList)
  const names = new Set<string>()
  value.forEach((tool: unknown, index) => {
    const name = checkTool(tool, index + 1)
    if (names.has(name)) throw new Error(told.toolTwice(name))
    names.add(name)
  })
  return value
}

/** The name of a tool, in Palaver's form or in OpenAI's. */
function checkTool(tool: unknown, number: number): string {
  const told = strings.settings
  const fields = isObject(tool) && tool['type'] === 'function' ? tool['function'] : tool
  if (!isObject(fields)) throw new Error(told.toolNotObject(number))
  const { name, description, parameters } = fields
  if (typeof name !== 'string' || name === '') throw new Error(told.toolNoName(number))
  if (description !== undefined && description !== null && typeof description !== 'string') throw new Error(told.toolDescription(name))
  if (parameters !== undefined && parameters !== null && !isObject(parameters)) throw new Error(told.toolParameters(name))
  return name
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
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
export const hasFreshWishes = (): boolean => kept<Wishes | null>('fresh', null) !== null
/** Null: as the user's defaults are. */
export const keepFreshWishes = (wishes: Wishes | null): boolean => keep('fresh', wishes)
