// Where words are in the text of elements, across the elements inside of them.

import { createPattern } from '../state/find.svelte'

const MOST = 2000

/** The places of a text, in any case; a space stands for any white space. */
export function findText(places: readonly HTMLElement[], text: string): Range[] {
  const pattern = createPattern(text)
  if (pattern === null) return []
  const found: Range[] = []
  for (const place of places) {
    const nodes = textNodes(place)
    const whole = nodes.map((node) => node.data).join('')
    let index = 0
    let before = 0
    for (const match of whole.matchAll(pattern)) {
      const range = document.createRange()
      const ends = [match.index, match.index + match[0].length - 1]
      for (const [which, end] of ends.entries()) {
        while (before + nodes[index]!.length <= end) before += nodes[index++]!.length
        if (which === 0) range.setStart(nodes[index]!, end - before)
        else range.setEnd(nodes[index]!, end - before + 1)
      }
      found.push(range)
      if (found.length >= MOST) return found
    }
  }
  return found
}

/** Without the labels of buttons, and without what only a screen reader reads. */
function textNodes(place: HTMLElement): Text[] {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement?.closest('button, .unseen, figcaption, .katex-mathml') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT,
  )
  const nodes: Text[] = []
  while (walker.nextNode()) nodes.push(walker.currentNode as Text)
  return nodes
}
