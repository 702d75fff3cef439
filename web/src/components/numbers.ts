// Numbers as people read them.

export function seconds(value: number): string {
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`
  const whole = Math.round(value)
  return `${Math.floor(whole / 60)} min ${whole % 60} s`
}

export function count(value: number): string {
  return value.toLocaleString('en')
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : ''
}

export function day(text: string): string {
  const then = new Date(text)
  const today = new Date()
  if (then.toDateString() === today.toDateString()) return then.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' })
  const sameYear = then.getFullYear() === today.getFullYear()
  return then.toLocaleDateString([], { day: 'numeric', month: 'short', ...(sameYear ? {} : { year: 'numeric' }) })
}
