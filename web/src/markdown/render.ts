// A block of Markdown as elements of the page. What a model, a file or another person wrote runs nothing here: HTML in it
// is text, and what is made of it goes through a sanitiser all the same.
import DOMPurify from 'dompurify'
import MarkdownIt from 'markdown-it'
import { strings } from '../strings'
import { math } from './math'

const markdown = new MarkdownIt({ html: false, linkify: true, typographer: false })
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false })
markdown.use(math)
markdown.validateLink = (link) => /^(?:https?:|mailto:|#)/i.test(link.trim())
// a picture from elsewhere would tell its server who reads this, and when: it is shown as a link
markdown.renderer.rules['image'] = (tokens, index, _options, env) => {
  const token = tokens[index]!
  const label = markdown.renderer.renderInlineAsText(token.children ?? [], markdown.options, env)
  const escape = markdown.utils.escapeHtml
  return `<a href="${escape(String(token.attrGet('src') ?? ''))}">${escape(label || strings.markdown.picture)}</a>`
}

// a column's side is said with a class: the page's policy takes no styles inside of HTML
for (const name of ['th_open', 'td_open']) {
  markdown.renderer.rules[name] = (tokens, index, options, _env, self) => {
    const token = tokens[index]!
    const side = /^text-align:(left|center|right)$/.exec(String(token.attrGet('style') ?? ''))?.[1]
    token.attrs = side ? [['class', side]] : []
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

/** What reference links of one text name, shared by its blocks. */
export type References = Record<string, unknown>

/** `breaks`: every line of the source is a line of its own. */
export function rendered(source: string, references: References, breaks = false): DocumentFragment {
  markdown.set({ breaks })
  const fragment = DOMPurify.sanitize(markdown.render(source, references), ALLOWED)
  for (const link of fragment.querySelectorAll('a')) {
    link.target = '_blank'
    link.rel = 'noopener noreferrer nofollow'
  }
  // code and formulas say nothing about which way the words around them go: `auto` passes over what has a direction
  for (const element of fragment.querySelectorAll<HTMLElement>(WITHOUT_DIRECTION)) element.dir = 'ltr'
  for (const element of fragment.querySelectorAll<HTMLElement>('td, th')) element.dir = 'auto'
  // by the first letter in it: a list and a quote have their marks on the side where its lines begin
  for (const block of fragment.children) if (block instanceof HTMLElement && block.tagName !== 'TABLE' && !block.matches(WITHOUT_DIRECTION)) block.dir = 'auto'
  for (const table of fragment.querySelectorAll('table')) {
    table.dir = direction(words(table))
    const wide = document.createElement('div')
    wide.className = 'wide'
    wide.dir = table.dir
    wide.tabIndex = 0
    wide.role = 'group'
    wide.ariaLabel = strings.markdown.table
    table.replaceWith(wide)
    wide.append(table)
  }
  return fragment
}

/** The text of an element without its code and formulas. */
function words(element: Element): string {
  const copy = element.cloneNode(true) as Element
  for (const one of copy.querySelectorAll(WITHOUT_DIRECTION)) one.remove()
  return copy.textContent ?? ''
}

/** Which way the columns of a table go. */
export function direction(text: string): 'ltr' | 'rtl' {
  const first = /\p{L}/u.exec(text)?.[0] ?? ''
  return /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(first) ? 'rtl' : 'ltr'
}
