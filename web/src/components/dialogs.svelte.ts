// The open dialogs. They receive notices and keys before the page.

class Dialogs {
  open = $state(0)
  /** Whether a dialog has unsaved edits: then the shortcuts of the page are off. */
  edited = $state(false)
}

export const dialogs = new Dialogs()
