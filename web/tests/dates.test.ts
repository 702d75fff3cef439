import { describe, expect, it } from 'vitest'
import { groupByDate } from '../src/state/dates'

const now = new Date(2025, 5, 15, 9, 30)
const at = (...parts: [number, number, number, number?]): Date => new Date(...(parts as [number, number, number]))

describe('the groups of a list', () => {
  it('are by calendar days', () => {
    const dates = [at(2025, 5, 15), at(2025, 5, 14, 23), at(2025, 5, 14, 0), at(2025, 5, 9), at(2025, 4, 20), at(2025, 2, 1), at(2025, 2, 1), at(2024, 2, 1)]
    expect(groupByDate(dates, (one) => one, now).map(({ name, all }) => `${name}: ${all.length}`)).toEqual([
      'Today: 1',
      'Yesterday: 2',
      'Previous 7 days: 1',
      'Previous 30 days: 1',
      'March: 2',
      'March 2024: 1',
    ])
  })

  it('include dates in the future', () => {
    expect(groupByDate([at(2025, 5, 16)], (one) => one, now)[0]?.name).toBe('Today')
    expect(groupByDate([], (one: Date) => one, now)).toEqual([])
  })
})
