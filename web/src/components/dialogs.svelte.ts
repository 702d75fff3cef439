// The dialogs that are open: they take notices and keys before the page behind them does.

class Dialogs {
  open = $state(0)
  /** Whether one of them holds edits that are not saved: then no key of the page opens another. */
  edited = $state(false)
}

export const dialogs = new Dialogs()
