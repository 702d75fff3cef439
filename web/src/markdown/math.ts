// Formulas in Markdown: $…$ and \(…\) in a line, $$…$$, \[…\] and \begin{align}…\end{align} as a block. This plugin only marks them; formula.ts renders them.
import type { MarkdownIt } from 'markdown-it'

const PAIRS: [string, string, boolean][] = [
  ['$$', '$$', true],
  ['\\[', '\\]', true],
  ['\\(', '\\)', false],
  ['$', '$', false],
]

const MAX_OPENING = 24 // characters, of the longest one
// environments that KaTeX knows and that are formulas of their own
const ENVIRONMENT = /^\\begin\{((?:equation|align|alignat|gather)\*?)\}/

/** The end of the environment that begins here, with its name; null without one. */
export function endOfEnvironment(source: string): string | null {
  const name = ENVIRONMENT.exec(source)?.[1]
  return name ? `\\end{${name}}` : null
}

/** The formula that begins here: its opening, its closing, and whether it is a block. An environment has no opening: its name is part of it. */
function findPair(source: string): [string, string, boolean] | undefined {
  const end = endOfEnvironment(source)
  return end ? ['', end, true] : PAIRS.find(([opening]) => source.startsWith(opening))
}

export function math(markdown: MarkdownIt): void {
  markdown.inline.ruler.before('escape', 'math', (state, silent) => {
    const char = state.src[state.pos]
    const pair = char === '$' || char === '\\' ? findPair(state.src.slice(state.pos, state.pos + MAX_OPENING)) : undefined
    if (!pair) return false
    const [opening, closing, display] = pair
    const start = state.pos + opening.length
    const end = state.src.indexOf(closing, start)
    if (end < 0 || end >= state.posMax) return false
    const tex = state.src.slice(start, opening === '' ? end + closing.length : end)
    if (tex.trim() === '' || (opening === '$' && !isFormula(tex, state.src[end + 1]))) return false
    if (!silent) {
      const token = state.push('math', 'math', 0)
      token.content = tex
      token.block = display
    }
    state.pos = end + closing.length
    return true
  })
  markdown.block.ruler.before('fence', 'math', (state, from, to, silent) => {
    const first = state.src.slice(state.bMarks[from]! + state.tShift[from]!, state.eMarks[from])
    const pair = findPair(first)
    if (!pair?.[2]) return false
    const [opening, closing] = pair
    let line = from
    let text = first.slice(opening.length)
    while (!text.includes(closing) && line + 1 < to) {
      line += 1
      text += '\n' + state.src.slice(state.bMarks[line]! + Math.min(state.tShift[line]!, state.blkIndent), state.eMarks[line])
    }
    const end = text.indexOf(closing)
    if (end < 0 || text.slice(end + closing.length).trim() !== '') return false
    if (silent) return true
    const token = state.push('math', 'math', 0)
    token.content = text.slice(0, opening === '' ? end + closing.length : end)
    token.block = true
    state.line = line + 1
    return true
  })
  markdown.renderer.rules['math'] = (tokens, index) => {
    const token = tokens[index]!
    const tag = token.block ? 'div' : 'span'
    return `<${tag} class="math">${markdown.utils.escapeHtml(token.content)}</${tag}>`
  }
}

/** Dollars delimit a formula only without spaces inside them and without a digit after them; otherwise they are money. */
function isFormula(tex: string, next: string | undefined): boolean {
  return !/^\s|\s$|\n\s*\n/.test(tex) && !/\d/.test(next ?? '')
}
