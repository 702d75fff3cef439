// Keeps a growing, scrolling element at its end until its reader scrolls back.

const THRESHOLD = 60 // pixels from the end that count as the end

export class StickToBottom {
  /** Whether the reader is at the end, or was when the element grew. */
  atEnd = $state(true)
  private element: HTMLElement | null = null

  /** `sticks`: whether the element is to be kept at its end at all. */
  constructor(private readonly sticks: () => boolean = () => true) {}

  scrollToEnd(): void {
    this.atEnd = true
    if (this.element) this.element.scrollTop = this.element.scrollHeight
  }

  readonly attach = (element: HTMLElement): (() => void) => {
    this.element = element
    this.atEnd = true
    const observer = new ResizeObserver(() => {
      if (this.atEnd && this.sticks()) element.scrollTop = element.scrollHeight
    })
    for (const child of element.children) observer.observe(child)
    observer.observe(element)
    let lastTop = 0
    const handleScroll = (): void => {
      const isNear = element.scrollHeight - element.scrollTop - element.clientHeight < THRESHOLD
      if (isNear) this.atEnd = true
      else if (element.scrollTop < lastTop) this.atEnd = false // content that grows or shrinks scrolls nothing back
      lastTop = element.scrollTop
    }
    element.addEventListener('scroll', handleScroll, { passive: true })
    return () => {
      observer.disconnect()
      element.removeEventListener('scroll', handleScroll)
    }
  }
}
