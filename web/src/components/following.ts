// A scrolling element that stays at its end while it grows, unless its reader has gone elsewhere.

export function following(element: HTMLElement, told: (atEnd: boolean) => void = () => undefined): () => void {
  let atEnd = true
  const observer = new ResizeObserver(() => {
    if (atEnd) element.scrollTop = element.scrollHeight
  })
  const scrolled = (): void => {
    const is = element.scrollHeight - element.scrollTop - element.clientHeight < 48
    if (is !== atEnd) told(is)
    atEnd = is
  }
  for (const child of element.children) observer.observe(child)
  observer.observe(element)
  element.addEventListener('scroll', scrolled, { passive: true })
  return () => {
    observer.disconnect()
    element.removeEventListener('scroll', scrolled)
  }
}
