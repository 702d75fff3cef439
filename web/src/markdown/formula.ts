// Formulas are drawn by KaTeX, which is fetched when the first one is shown. It builds elements, never a string of HTML,
// so the page's policy needs no exception for styles.
type Katex = typeof import('katex').default
let katex: Promise<Katex> | null = null

export function drawFormulas(root: ParentNode): void {
  const found = [...root.querySelectorAll<HTMLElement>('.math:not([data-drawn])')]
  if (found.length === 0) return
  for (const element of found) element.dataset['drawn'] = ''
  katex ??= Promise.all([import('katex'), import('katex/dist/katex.min.css')]).then(([module]) => module.default)
  katex.then((katex) => found.forEach((element) => draw(katex, element))).catch(() => undefined)
}

function draw(katex: Katex, element: HTMLElement): void {
  const tex = element.textContent ?? ''
  const displayMode = element.tagName === 'DIV'
  try {
    katex.render(tex, element, { displayMode, throwOnError: false, trust: false, maxExpand: 200, maxSize: 20 })
  } catch {
    element.textContent = tex
  }
}
