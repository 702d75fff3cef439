// Formulas in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] as a block. This plugin only marks them; formula.ts renders them.
import type { MarkdownIt } from 'markdown-it'

const PAIRS: [string, string, boolean][] = [
  ['$$', '$$', true],
  ['\\[', '\\]', true],
  ['\\(', '\\)', false],
  ['$', '$', false],
]

export function math(markdown: MarkdownIt): void {
  markdown.inline.ruler.before('escape', 'math', (state, silent) => {
    const pair = PAIRS.find(([opening]) => state.src.startsWith(opening, state.pos))
    if (!pair) return false
    const [opening, closing, display] = pair
    const start = state.pos + opening.length
    const end = state.src.indexOf(closing, start)
    if (end < 0 || end >= state.posMax) return false
    const tex = state.src.slice(start, end)
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
    const pair = PAIRS.find(([opening, , display]) => display && first.startsWith(opening))
    if (!pair) return false
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
    token.content = text.slice(0, end)
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
