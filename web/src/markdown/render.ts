// Renders a block of Markdown as DOM elements. Content is never executed: HTML in the source is shown as text, and the
// result is sanitized as well.
import DOMPurify from 'dompurify'
import MarkdownIt from 'markdown-it'
import { strings } from '../strings'
import { math } from './math'

const markdown = new MarkdownIt({ html: false, linkify: true, typographer: false })
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false })
markdown.use(math)
markdown.validateLink = (link) => /^(?:https?:|mailto:|#)/i.test(link.trim())
// an external image would reveal the reader to its server, so it becomes a link
markdown.renderer.rules['image'] = (tokens, index, _options, env) => {
  const token = tokens[index]!
  const label = markdown.renderer.renderInlineAsText(token.children ?? [], markdown.options, env)
  const escape = markdown.utils.escapeHtml
  return `<a href="${escape(String(token.attrGet('src') ?? ''))}">${escape(label || strings.markdown.picture)}</a>`
}

// column alignment becomes a class: the Content-Security-Policy forbids inline styles
for (const name of ['th_open', 'td_open']) {
  markdown.renderer.rules[name] = (tokens, index, options, _env, self) => {
    const token = tokens[index]!
    const alignment = /^text-align:(left|center|right)$/.exec(String(token.attrGet('style') ?? ''))?.[1]
    token.attrs = alignment ? [['class', alignment]] : []
    return self.renderToken(tokens, index, options)
  }
}

const ALLOWED = {
  ALLOWED_TAGS: [
    ...['a', 'blockquote', 'br', 'code', 'del', 'div', 'em', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'hr', 'li', 'ol', 'p'],
    ...['pre', 's', 'span', 'strong', 'table', 'tbody', 'td', 'th', 'thead', 'tr', 'ul'],
  ],
  ALLOWED_ATTR: ['href', 'class', 'start', 'align', 'title'],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#)/i,
  RETURN_DOM_FRAGMENT: true as const,
}

const WITHOUT_DIRECTION = 'code, .math'

/** The targets of reference links, shared by the blocks of a text. */
export type References = Record<string, unknown>

/** `breaks`: newlines in the source are line breaks. */
export function renderMarkdown(source: string, references: References, breaks = false): DocumentFragment {
  markdown.set({ breaks })
  const fragment = DOMPurify.sanitize(markdown.render(source, references), ALLOWED)
  for (const link of fragment.querySelectorAll('a')) {
    link.target = '_blank'
    link.rel = 'noopener noreferrer nofollow'
  }
  for (const item of fragment.querySelectorAll('li')) drawCheckbox(item)
  // code and formulas do not affect the direction of the surrounding text: `auto` skips elements with a direction
  for (const element of fragment.querySelectorAll<HTMLElement>(WITHOUT_DIRECTION)) element.dir = 'ltr'
  for (const element of fragment.querySelectorAll<HTMLElement>('td, th')) element.dir = 'auto'
  // the first letter decides the direction, so that lists and quotes have their markers on the correct side
  for (const block of fragment.children) if (block instanceof HTMLElement && block.tagName !== 'TABLE' && !block.matches(WITHOUT_DIRECTION)) block.dir = 'auto'
  for (const table of fragment.querySelectorAll('table')) {
    table.dir = direction(plainText(table))
    const wrapper = document.createElement('div')
    wrapper.className = 'wide'
    wrapper.dir = table.dir
    wrapper.tabIndex = 0
    wrapper.role = 'group'
    wrapper.ariaLabel = strings.markdown.table
    table.replaceWith(wrapper)
    wrapper.append(table)
  }
  return fragment
}

/** Replaces the brackets of an item of a task list, `[ ]` or `[x]`, with a box. */
function drawCheckbox(item: HTMLLIElement): void {
  const lead = [...item.childNodes].find((node) => node.textContent?.trim())
  const first = lead instanceof HTMLParagraphElement ? lead.firstChild : lead
  const mark = first instanceof Text ? /^\s*\[([ xX])\]\s/.exec(first.data) : null
  if (!(first instanceof Text) || !mark) return
  const isDone = mark[1] !== ' '
  const box = document.createElement('span')
  box.className = isDone ? 'checkbox done' : 'checkbox'
  box.role = 'img'
  box.ariaLabel = isDone ? strings.markdown.done : strings.markdown.open
  first.data = first.data.slice(mark[0].length)
  first.before(box)
  item.className = 'task'
}

/** The text of an element without its code and formulas. */
function plainText(element: Element): string {
  const copy = element.cloneNode(true) as Element
  for (const one of copy.querySelectorAll(WITHOUT_DIRECTION)) one.remove()
  return copy.textContent ?? ''
}

/** The direction of a table, from its first letter. */
export function direction(text: string): 'ltr' | 'rtl' {
  const letter = /\p{L}/u.exec(text)?.[0] ?? ''
  return /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(letter) ? 'rtl' : 'ltr'
}
