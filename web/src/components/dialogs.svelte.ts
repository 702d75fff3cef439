// The dialogs that are open: they take notices and keys before the page behind them does.

class Dialogs {
  open = $state(0)
}

export const dialogs = new Dialogs()
