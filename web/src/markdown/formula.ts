// Renders formulas with KaTeX, which is loaded with the first formula. KaTeX builds elements instead of an HTML string,
// so that the Content-Security-Policy needs no exception for styles.
type Katex = typeof import('katex').default
let katex: Promise<Katex> | null = null

export function renderFormulas(root: ParentNode): void {
  const elements = [...root.querySelectorAll<HTMLElement>('.math:not([data-drawn])')]
  if (elements.length === 0) return
  for (const element of elements) element.dataset['drawn'] = ''
  katex ??= Promise.all([import('katex'), import('katex/dist/katex.min.css')]).then(([module]) => module.default)
  katex.then((katex) => elements.forEach((element) => renderFormula(katex, element))).catch(() => undefined)
}

function renderFormula(katex: Katex, element: HTMLElement): void {
  const tex = element.textContent ?? ''
  const displayMode = element.tagName === 'DIV'
  try {
    katex.render(tex, element, { displayMode, throwOnError: false, trust: false, maxExpand: 200, maxSize: 20 })
  } catch {
    element.textContent = tex
  }
}
