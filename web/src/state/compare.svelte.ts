// What messages are compared by: the columns that each is sent to, kept by the browser.
import type { Column } from '../transport/types'
import { keep, kept } from './storage'

interface Kept {
  on: boolean
  blind: boolean
  columns: Column[]
}

const TWO: Column[] = [{ parameters: {} }, { parameters: { temperature: 1.2 } }]

class CompareMode {
  on = $state(false)
  blind = $state(false)
  columns: Column[] = $state.raw(TWO)

  constructor() {
    const { on, blind, columns } = kept<Kept>('compare', { on: false, blind: false, columns: TWO })
    if (!Array.isArray(columns) || columns.length < 2) return
    this.on = on
    this.blind = blind
    this.columns = columns
  }

  set(on: boolean, blind: boolean, columns: Column[]): void {
    this.on = on
    this.blind = blind
    this.columns = columns
    keep('compare', { on, blind, columns })
  }
}

export const compareMode = new CompareMode()
