// The settings of comparisons: the columns that each message is sent to, stored by the browser.
import type { Column } from '../transport/types'
import { load, save } from './storage'

interface StoredComparison {
  on: boolean
  blind: boolean
  columns: Column[]
}

const DEFAULT_COLUMNS: Column[] = [{ parameters: {} }, { parameters: { temperature: 1.2 } }]

class CompareMode {
  on = $state(false)
  blind = $state(false)
  columns: Column[] = $state.raw(DEFAULT_COLUMNS)

  constructor() {
    const { on, blind, columns } = load<StoredComparison>('compare', { on: false, blind: false, columns: DEFAULT_COLUMNS })
    if (!Array.isArray(columns) || columns.length < 2) return
    this.on = on
    this.blind = blind
    this.columns = columns
  }

  set(on: boolean, blind: boolean, columns: Column[]): void {
    this.on = on
    this.blind = blind
    this.columns = columns
    save('compare', { on, blind, columns })
  }
}

export const compareMode = new CompareMode()
