// Formatting of numbers.

const COUNT = new Intl.NumberFormat('en')
const RATE = new Intl.NumberFormat('en', { minimumFractionDigits: 1, maximumFractionDigits: 1 })

/** 1,234 */
export function count(value: number): string {
  return COUNT.format(value)
}

/** "1 token", "2 tokens" */
export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`
}

/** "3.2 s", "42 s", "1 min 5 s" */
export function seconds(value: number): string {
  if (value < 9.95) return `${RATE.format(value)} s`
  const whole = Math.round(value)
  return whole < 60 ? `${whole} s` : `${count(Math.floor(whole / 60))} min ${whole % 60} s`
}

/** "42%", "0.3%", "< 0.1%" of a share from 0 to 1 */
export function percent(share: number): string {
  const value = 100 * share
  if (value > 0 && value < 0.1) return '< 0.1%'
  return `${value >= 10 || value === 0 ? Math.round(value) : RATE.format(value)}%`
}

/** "51.3 tokens/s" */
export function rate(tokens: number, time: number): string {
  return `${RATE.format(tokens / Math.max(0.001, time))} tokens/s`
}
