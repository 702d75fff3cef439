// Keeps a growing, scrolling element at its end until its reader scrolls away. Chat.svelte has its own variant, which
// ignores shrinking content and the first screen.

const THRESHOLD = 48 // pixels from the end that count as the end

export function stickToBottom(element: HTMLElement): () => void {
  let atEnd = true
  const observer = new ResizeObserver(() => {
    if (atEnd) element.scrollTop = element.scrollHeight
  })
  const handleScroll = (): void => {
    atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < THRESHOLD
  }
  for (const child of element.children) observer.observe(child)
  observer.observe(element)
  element.addEventListener('scroll', handleScroll, { passive: true })
  return () => {
    observer.disconnect()
    element.removeEventListener('scroll', handleScroll)
  }
}
