// The list of conversations, and what was found in them.
import * as api from '../transport/api'
import { strings } from '../strings'
import type { Conversation, Hit } from '../transport/types'
import { notices } from './notices.svelte'

const PAGE = 50
const PAUSE = 200

class Conversations {
  all: Conversation[] = $state.raw([])
  hits: Hit[] = $state.raw([])
  tags: string[] = $state.raw([])
  query = $state('')
  tag: string | null = $state(null)
  deleted = $state(false)
  more = $state(false)
  loaded = $state(false)
  #timer: ReturnType<typeof setTimeout> | undefined
  #searching: ReturnType<typeof setTimeout> | undefined
  #asked = 0

  /** Looks soon, once for all that changed meanwhile. */
  refresh(): void {
    clearTimeout(this.#timer)
    this.#timer = setTimeout(() => void this.look(), PAUSE)
  }

  async look(): Promise<void> {
    const asked = ++this.#asked
    const count = Math.max(PAGE, this.all.length)
    try {
      const [found, tags] = await Promise.all([api.conversations(this.#listing(count)), api.tags()])
      if (asked !== this.#asked) return
      this.all = found
      this.tags = tags
      this.more = found.length >= count
      this.loaded = true
    } catch {
      // the banner tells; the stream looks again when it is back
    }
  }

  async lookFurther(): Promise<void> {
    const before = this.all.at(-1)?.id
    if (!before) return
    const found = await api.conversations({ ...this.#listing(PAGE), before }).catch(() => [])
    this.all = [...this.all, ...found]
    this.more = found.length >= PAGE
  }

  /** Shows others: those with a tag, or the deleted ones. */
  choose(tag: string | null, deleted: boolean): void {
    this.tag = tag
    this.deleted = deleted
    this.all = []
    void this.look()
  }

  search(query: string): void {
    this.query = query
    clearTimeout(this.#searching)
    if (query.trim() === '') this.hits = []
    this.#searching = setTimeout(() => void this.#search(query), PAUSE)
  }

  async remove(id: string): Promise<boolean> {
    const title = this.all.find((one) => one.id === id)?.title || strings.untitled
    try {
      await api.remove(id)
    } catch (error) {
      notices.fail(error)
      return false
    }
    this.forget(id)
    notices.tell(strings.notices.deleted(title), { act: { label: strings.restore, run: () => void this.restore(id) } })
    return true
  }

  /** No longer in the list; the server knows. */
  forget(id: string): void {
    this.all = this.all.filter((one) => one.id !== id)
  }

  async restore(id: string): Promise<void> {
    try {
      await api.restore(id)
    } catch (error) {
      notices.fail(error)
    }
    await this.look()
  }

  async takeIn(files: Iterable<File>): Promise<Conversation[]> {
    const taken: Conversation[] = []
    let failed = false
    notices.settle('file')
    for (const file of files) {
      try {
        taken.push(...(await api.takeIn(await file.text())))
      } catch (error) {
        notices.fail(error, 'file')
        failed = true
      }
    }
    if (!failed || taken.length > 0) notices.tell(taken.length > 0 ? strings.notices.imported(taken.length) : strings.notices.importedNone)
    await this.look()
    return taken
  }

  async #search(query: string): Promise<void> {
    void this.look()
    if (query.trim() === '') return
    try {
      const hits = await api.search(query)
      if (query === this.query) this.hits = hits
    } catch {
      if (query === this.query) this.hits = []
    }
  }

  #listing(limit: number): api.Listing {
    return {
      limit,
      deleted: this.deleted,
      ...(this.tag ? { tag: this.tag } : {}),
      ...(this.query.trim() ? { title: this.query.trim() } : {}),
    }
  }
}

export const conversations = new Conversations()
