// Matching of keyboard shortcuts. One table of shortcuts serves both the handler and the help dialog.
import { preferences } from '../state/preferences.svelte'

export interface Shortcut {
  keys: string[]
  label: string
  /** Whether the key also works in a dialog, whose place the other one takes. All others act on what is behind it. */
  opensDialog?: boolean
  matches: (event: KeyboardEvent) => boolean
  run: () => void
}

/** On Macs, Alt types letters, so shortcuts with Alt are off in text fields. */
export const ALT_TYPES = /^(Mac|iP)/.test(navigator.platform)

/** Matches Alt and a physical key, independent of the keyboard layout. */
export function altKey(code: string, shift = false): (event: KeyboardEvent) => boolean {
  return (event) =>
    event.altKey && !event.ctrlKey && !event.metaKey && event.shiftKey === shift && event.code === code &&
    !(ALT_TYPES && isTyping(event.target))
}

/** Matches a key without modifiers outside text fields. */
export function plainKey(key: string): (event: KeyboardEvent) => boolean {
  return (event) => event.key === key && !event.altKey && !event.ctrlKey && !event.metaKey && !isTyping(event.target)
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))
}

/** Whether a key submits a message: Ctrl+Enter; or Enter, except on touch screens and where the user prefers a new line. */
export function isSubmitKey(event: KeyboardEvent): boolean {
  if (event.key !== 'Enter' || event.shiftKey || event.altKey || event.isComposing) return false
  return event.ctrlKey || event.metaKey || (!preferences.ctrlEnter && !matchMedia('(pointer: coarse)').matches)
}

export function handleShortcut(shortcuts: readonly Shortcut[], event: KeyboardEvent): void {
  if (event.isComposing || event.defaultPrevented) return
  const shortcut = shortcuts.find((one) => one.matches(event))
  if (!shortcut) return
  event.preventDefault()
  shortcut.run()
}
