// Finds text in elements, across their child elements.

import { createPattern } from '../state/find.svelte'

const MAX_MATCHES = 2000

/** Returns the ranges of a text, case-insensitively; a space matches any white space. */
export function findText(elements: readonly HTMLElement[], text: string): Range[] {
  const pattern = createPattern(text)
  if (pattern === null) return []
  const ranges: Range[] = []
  for (const element of elements) {
    const nodes = textNodes(element)
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
      ranges.push(range)
      if (ranges.length >= MAX_MATCHES) return ranges
    }
  }
  return ranges
}

/** The text nodes except the labels of buttons and text for screen readers. */
function textNodes(element: HTMLElement): Text[] {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement?.closest('button, .unseen, figcaption, .katex-mathml') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT,
  )
  const nodes: Text[] = []
  while (walker.nextNode()) nodes.push(walker.currentNode as Text)
  return nodes
}
