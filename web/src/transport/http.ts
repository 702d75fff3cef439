// One request to the server and its answer. Addresses are relative to the page, wherever a proxy serves it.
import { strings } from '../strings'
import type { Error as WireError, ErrorBody } from './types'

export type Query = Record<string, string | number | boolean | null | undefined>

export interface Asked {
  method?: string
  query?: Query
  json?: unknown
  body?: BodyInit
  key?: string
  signal?: AbortSignal
}

/** What the server said no to, or could not do. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly error: WireError,
  ) {
    super(strings.errors.named[error.name ?? '']?.(error.details ?? {}) ?? error.message)
  }

  get name(): string {
    return this.error.name ?? this.error.code ?? 'error'
  }
}

/** The server could not be reached, or went away before it had answered. */
export class Unreachable extends Error {
  constructor() {
    super(strings.errors.unreachable)
  }
}

export function address(path: string, query: Query = {}): string {
  const url = new URL(path, document.baseURI)
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== '') url.searchParams.set(name, String(value))
  }
  return url.href
}

export async function send(path: string, asked: Asked = {}): Promise<Response> {
  const headers: Record<string, string> = {}
  if (asked.json !== undefined) headers['content-type'] = 'application/json'
  if (asked.key) headers['idempotency-key'] = asked.key
  const init: RequestInit = { method: asked.method ?? 'GET', headers, cache: 'no-store', credentials: 'same-origin' }
  if (asked.json !== undefined) init.body = JSON.stringify(asked.json)
  else if (asked.body !== undefined) init.body = asked.body
  if (asked.signal) init.signal = asked.signal
  const response = await fetch(address(path, asked.query), init).catch((error: unknown) => {
    if (asked.signal?.aborted) throw error
    throw new Unreachable()
  })
  if (!response.ok) throw await refusal(response)
  return response
}

export async function request<T>(path: string, asked: Asked = {}): Promise<T> {
  const response = await send(path, asked)
  if (response.status === 204) return undefined as T
  try {
    return (await response.json()) as T
  } catch {
    throw new Unreachable()
  }
}

const PAUSES = [250, 500, 1000, 2000, 4000]

/** A write that happens once however often it is sent: sent again while the server can't be reached. */
export async function once<T>(path: string, asked: Asked & { key: string }): Promise<T> {
  for (const pause of PAUSES) {
    try {
      return await request<T>(path, asked)
    } catch (error) {
      if (!isPassing(error)) throw error
      await new Promise((resolve) => setTimeout(resolve, pause))
    }
  }
  return request<T>(path, asked)
}

function isPassing(error: unknown): boolean {
  return error instanceof Unreachable || (error instanceof Refused && [502, 504].includes(error.status))
}

async function refusal(response: Response): Promise<Error> {
  const told = await response.json().catch(() => null)
  if (isErrorBody(told)) return new Refused(response.status, told.error)
  const message = strings.errors.status(response.status)
  return new Refused(response.status, { message, type: 'server_error', param: null, code: null })
}

function isErrorBody(value: unknown): value is ErrorBody {
  return typeof value === 'object' && value !== null && typeof (value as ErrorBody).error?.message === 'string'
}

export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16))
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')
}
