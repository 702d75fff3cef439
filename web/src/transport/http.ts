// One request to the server and its response. URLs are relative to the page, so that a proxy can serve it at any path.
import { strings } from '../strings'
import type { Error as WireError, ErrorBody } from './types'

export type Query = Record<string, string | number | boolean | null | undefined>

export interface RequestOptions {
  method?: string
  query?: Query
  json?: unknown
  body?: BodyInit
  key?: string
  signal?: AbortSignal
}

/** An error response of the server. */
export class ApiError extends Error {
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

/** The server is unreachable, or the connection was lost before the response. */
export class UnreachableError extends Error {
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

export async function send(path: string, options: RequestOptions = {}): Promise<Response> {
  const headers: Record<string, string> = {}
  if (options.json !== undefined) headers['content-type'] = 'application/json'
  if (options.key) headers['idempotency-key'] = options.key
  const init: RequestInit = { method: options.method ?? 'GET', headers, cache: 'no-store', credentials: 'same-origin' }
  if (options.json !== undefined) init.body = JSON.stringify(options.json)
  else if (options.body !== undefined) init.body = options.body
  if (options.signal) init.signal = options.signal
  const response = await fetch(address(path, options.query), init).catch((error: unknown) => {
    if (options.signal?.aborted) throw error
    throw new UnreachableError()
  })
  if (!response.ok) throw await readError(response)
  return response
}

export async function request<T>(path: string, options: RequestOptions = {}): Promise<T> {
  const response = await send(path, options)
  if (response.status === 204) return undefined as T
  try {
    return (await response.json()) as T
  } catch {
    throw new UnreachableError()
  }
}

const RETRY_DELAYS = [250, 500, 1000, 2000, 4000]

/** Sends a write with an idempotency key, which takes effect once. Retries while the server is unreachable. */
export const requestOnce = <T>(path: string, options: RequestOptions & { key: string }): Promise<T> => requestWithRetries(path, options)

/** Sends a request that may be repeated. Retries while the server is unreachable. */
export async function requestWithRetries<T>(path: string, options: RequestOptions): Promise<T> {
  for (const delay of RETRY_DELAYS) {
    try {
      return await request<T>(path, options)
    } catch (error) {
      if (!isTransient(error)) throw error
      await new Promise((resolve) => setTimeout(resolve, delay))
    }
  }
  return request<T>(path, options)
}

function isTransient(error: unknown): boolean {
  return error instanceof UnreachableError || (error instanceof ApiError && [502, 504].includes(error.status))
}

async function readError(response: Response): Promise<Error> {
  const body = await response.json().catch(() => null)
  if (isErrorBody(body)) return new ApiError(response.status, body.error)
  const message = strings.errors.status(response.status)
  return new ApiError(response.status, { message, type: 'server_error', param: null, code: null })
}

function isErrorBody(value: unknown): value is ErrorBody {
  return typeof value === 'object' && value !== null && typeof (value as ErrorBody).error?.message === 'string'
}

export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16))
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')
}
