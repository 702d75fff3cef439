// Groups of a list by relative dates, newest first.
import { strings } from '../strings'

const DAY = 86_400_000
const MONTH = new Intl.DateTimeFormat('en', { month: 'long' })
const MONTH_OF_YEAR = new Intl.DateTimeFormat('en', { month: 'long', year: 'numeric' })
const MOMENT = new Intl.DateTimeFormat([], { dateStyle: 'medium', timeStyle: 'short' })

export interface Group<T> {
  name: string
  all: T[]
}

/** "Today", "Yesterday", "Previous 7 days", "Previous 30 days", "March", "March 2024" */
function groupName(then: Date, now: Date): string {
  const midnight = (date: Date): number => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime()
  const days = Math.round((midnight(now) - midnight(then)) / DAY)
  if (days <= 0) return strings.sidebar.today
  if (days === 1) return strings.sidebar.yesterday
  if (days <= 7) return strings.sidebar.week
  if (days <= 30) return strings.sidebar.month
  return (then.getFullYear() === now.getFullYear() ? MONTH : MONTH_OF_YEAR).format(then)
}

/** Groups a sorted list by date. */
export function groupByDate<T>(all: readonly T[], date: (one: T) => Date, now = new Date()): Group<T>[] {
  const groups: Group<T>[] = []
  for (const one of all) {
    const name = groupName(date(one), now)
    const last = groups.at(-1)
    if (last?.name === name) last.all.push(one)
    else groups.push({ name, all: [one] })
  }
  return groups
}

/** Formats an ISO date with its time. */
export const formatDateTime = (text: string): string => MOMENT.format(new Date(text))
