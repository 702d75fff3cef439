// The settings of a conversation: its system prompt, its parameters, and presets of both.
import { strings } from '../strings'
import * as api from '../transport/api'
import type { Values } from '../transport/api'
import { NUMBERS, type Preset } from '../transport/types'
import { load, save } from './storage'
import { user } from './user.svelte'

export interface ConversationSettings {
  system: string
  parameters: Values
}

export const BASIC_PARAMETERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'thinking_budget', 'seed']
/** Shown for diffusion models only. */
export const DIFFUSION_PARAMETERS = ['steps', 'block_length']
/** The ranges of the sliders. They cover common values; the field beside a slider accepts every allowed value. */
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
export const ADVANCED_PARAMETERS = Object.keys(NUMBERS).filter((name) => !BASIC_PARAMETERS.includes(name) && name !== 'logprobs')

/** Returns a copy with the value set, or removed if it is null or empty. */
export function withValue(parameters: Values, name: string, value: unknown): Values {
  const { [name]: _, ...others } = parameters
  const empty = value === null || value === undefined || value === '' || (Array.isArray(value) && value.length === 0)
  return empty ? others : { ...others, [name]: value }
}

/** Returns an error message, or an empty string if the number is valid. */
export function validateNumber(name: string, text: string): string {
  if (text.trim() === '') return ''
  const bounds = NUMBERS[name]
  const value = Number(text)
  const { notNumber, notWhole, belowRange, outOfRange } = strings.settings
  if (!bounds || Number.isNaN(value)) return notNumber
  if (bounds.whole && !Number.isInteger(value)) return notWhole
  if (value >= bounds.low && value <= bounds.high) return ''
  return bounds.high >= Number.MAX_SAFE_INTEGER ? belowRange(bounds.low) : outOfRange(bounds.low, bounds.high)
}

/** Parses a JSON list of tools. Throws an error with a message for the user. */
export function parseTools(text: string): unknown[] {
  if (text.trim() === '') return []
  const texts = strings.settings
  let value: unknown
  try {
    value = JSON.parse(text)
  } catch (error) {
    throw new Error(texts.toolsNotJson(error instanceof Error ? error.message : String(error)))
  }
  if (!Array.isArray(value)) throw new Error(texts.toolsNotList)
  const names = new Set<string>()
  value.forEach((tool: unknown, index) => {
    const name = checkTool(tool, index + 1)
    if (names.has(name)) throw new Error(texts.toolTwice(name))
    names.add(name)
  })
  return value
}

/** Validates a tool in Palaver's or OpenAI's form and returns its name. */
function checkTool(tool: unknown, number: number): string {
  const texts = strings.settings
  const fields = isObject(tool) && tool['type'] === 'function' ? tool['function'] : tool
  if (!isObject(fields)) throw new Error(texts.toolNotObject(number))
  const { name, description, parameters } = fields
  if (typeof name !== 'string' || name === '') throw new Error(texts.toolNoName(number))
  if (description !== undefined && description !== null && typeof description !== 'string') throw new Error(texts.toolDescription(name))
  if (parameters !== undefined && parameters !== null && !isObject(parameters)) throw new Error(texts.toolParameters(name))
  return name
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

/** Presets are stored by the server, so that the terminal and other browsers have them too. */
export const listPresets = (): Promise<Preset[]> => api.listPresets()

export async function savePreset(preset: Preset): Promise<Preset[]> {
  await api.savePreset(preset)
  return api.listPresets()
}

export async function deletePreset(name: string): Promise<Preset[]> {
  await api.deletePreset(name)
  return api.listPresets()
}

const loadFresh = (): ConversationSettings | null => (user.name === null ? null : load<ConversationSettings | null>(user.key('fresh'), null))
/** The settings of the user's next new conversation, stored by the browser. */
export const loadNewConversationSettings = (): ConversationSettings => loadFresh() ?? { system: '', parameters: {} }
export const hasNewConversationSettings = (): boolean => loadFresh() !== null
/** Null: new conversations use the user's defaults. */
export const saveNewConversationSettings = (settings: ConversationSettings | null): boolean => user.name !== null && save(user.key('fresh'), settings)
