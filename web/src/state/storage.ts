// Values in the browser's storage, such as drafts and the colour scheme. No sent message depends on them.

/** The names of all values in the browser's storage begin so. */
export const PREFIX = 'palaver.'

export function load<T>(name: string, fallback: T): T {
  try {
    return parse(localStorage.getItem(PREFIX + name), fallback)
  } catch {
    return fallback
  }
}

/** The names of stored values that begin so. */
export function listNames(prefix: string): string[] {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX + prefix)).map((name) => name.slice(PREFIX.length))
  } catch {
    return []
  }
}

/** Reads a stored value. */
export function parse<T>(text: string | null, fallback: T): T {
  try {
    return text === null ? fallback : (JSON.parse(text) as T)
  } catch {
    return fallback
  }
}

/** Removes the entry if the value is empty. Returns false if the storage is full or forbidden. */
export function save(name: string, value: unknown): boolean {
  try {
    if (value === null || value === undefined || value === '') localStorage.removeItem(PREFIX + name)
    else localStorage.setItem(PREFIX + name, JSON.stringify(value))
    return true
  } catch {
    return false
  }
}

/** The values of this tab that the browser's storage has no room for, or forbids. They are lost with the page. */
const unstored = new Map<string, unknown>()

/** Reads a value of this tab, which survives a reload; undefined if there is none. */
export function loadFromTab<T>(name: string): T | undefined {
  if (unstored.has(name)) return unstored.get(name) as T
  try {
    const text = sessionStorage.getItem(PREFIX + name)
    return text === null ? undefined : (JSON.parse(text) as T)
  } catch {
    return undefined
  }
}

/** Removes the entry if the value is null. */
export function saveToTab(name: string, value: unknown): void {
  unstored.delete(name)
  try {
    sessionStorage.removeItem(PREFIX + name)
    if (value !== null) sessionStorage.setItem(PREFIX + name, JSON.stringify(value))
  } catch {
    if (value !== null) unstored.set(name, value)
  }
}
