// Everything that keys do, in one table: what runs them and what the page tells about them are the same.

export interface Shortcut {
  keys: string[]
  label: string
  does: (event: KeyboardEvent) => boolean
  run: () => void
}

/** Where Alt types letters: there it does so in a text field. */
export const ALT_TYPES = /^(Mac|iP)/.test(navigator.platform)

/** Alt and a key by its place, whatever letters a layout or an Alt makes of it. */
export function alt(code: string, shift = false): (event: KeyboardEvent) => boolean {
  return (event) =>
    event.altKey && !event.ctrlKey && !event.metaKey && event.shiftKey === shift && event.code === code &&
    !(ALT_TYPES && isTyping(event.target))
}

/** A key alone, where nothing is being typed. */
export function bare(key: string): (event: KeyboardEvent) => boolean {
  return (event) => event.key === key && !event.altKey && !event.ctrlKey && !event.metaKey && !isTyping(event.target)
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))
}

/** Enter sends and saves, wherever a message is written; on a phone it is a new line. */
export function submits(event: KeyboardEvent): boolean {
  if (event.key !== 'Enter' || event.shiftKey || event.altKey || event.isComposing) return false
  return event.ctrlKey || event.metaKey || !matchMedia('(pointer: coarse)').matches
}

export function pressed(shortcuts: readonly Shortcut[], event: KeyboardEvent): void {
  if (event.isComposing || event.defaultPrevented) return
  const found = shortcuts.find((one) => one.does(event))
  if (!found) return
  event.preventDefault()
  found.run()
}
