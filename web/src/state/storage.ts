// What a browser keeps for itself: drafts, looks. Losing it loses nothing that was sent.

export function kept<T>(name: string, otherwise: T): T {
  try {
    const text = localStorage.getItem(`palaver.${name}`)
    return text === null ? otherwise : (JSON.parse(text) as T)
  } catch {
    return otherwise
  }
}

/** False where the browser keeps nothing (full, or forbidden). */
export function keep(name: string, value: unknown): boolean {
  try {
    if (value === null || value === undefined || value === '') localStorage.removeItem(`palaver.${name}`)
    else localStorage.setItem(`palaver.${name}`, JSON.stringify(value))
    return true
  } catch {
    return false
  }
}

/** What this tab keeps over a reload; undefined where it kept nothing. */
export function keptByTab<T>(name: string): T | undefined {
  try {
    const text = sessionStorage.getItem(`palaver.${name}`)
    return text === null ? undefined : (JSON.parse(text) as T)
  } catch {
    return undefined
  }
}

/** Does nothing where the browser keeps nothing (full, or forbidden). */
export function keepByTab(name: string, value: unknown): void {
  try {
    sessionStorage.setItem(`palaver.${name}`, JSON.stringify(value))
  } catch {
    // it is gone with the page, then
  }
}

/** The name under which this tab has its cursors: it survives a reload, and no other tab has it. */
export function tabName(): string {
  const made = `web-${Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, '0')).join('')}`
  try {
    const known = sessionStorage.getItem('palaver.tab')
    if (known) return known
    sessionStorage.setItem('palaver.tab', made)
  } catch {
    // a browser that keeps nothing: the cursor ends with the page
  }
  return made
}
