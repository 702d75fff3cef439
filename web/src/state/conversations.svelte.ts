// The list of conversations, and what was found in them.
import * as api from '../transport/api'
import { strings } from '../strings'
import type { ChangeConversation, Conversation, Hit } from '../transport/types'
import { notices } from './notices.svelte'

const PAGE = 50
const MOST = 1000 // that are pinned
const PAUSE = 200

class Conversations {
  /** Those that are not pinned, page by page; in the list of deleted ones, all. */
  all: Conversation[] = $state.raw([])
  pinned: Conversation[] = $state.raw([])
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
      const pinned = this.deleted ? [] : api.listConversations({ ...this.#listing(MOST), pinned: true })
      const [found, tags, fixed] = await Promise.all([api.listConversations(this.#listing(count)), api.listTags(), pinned])
      if (asked !== this.#asked) return
      this.all = found
      this.pinned = fixed
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
    const found = await api.listConversations({ ...this.#listing(PAGE), before }).catch(() => [])
    this.all = [...this.all, ...found]
    this.more = found.length >= PAGE
  }

  /** Shows others: those with a tag, or the deleted ones. */
  choose(tag: string | null, deleted: boolean): void {
    this.tag = tag
    this.deleted = deleted
    this.all = []
    this.pinned = []
    void this.look()
  }

  search(query: string): void {
    this.query = query
    clearTimeout(this.#searching)
    if (query.trim() === '') this.hits = []
    this.#searching = setTimeout(() => void this.#search(query), PAUSE)
  }

  /** Returns those that were deleted. */
  async remove(...ids: string[]): Promise<string[]> {
    const removed: string[] = []
    const title = this.#find(ids[0])?.title || strings.untitled
    for (const id of ids) {
      try {
        await api.deleteConversation(id)
      } catch (error) {
        notices.fail(error)
        break
      }
      removed.push(id)
      this.forget(id)
    }
    const told = ids.length === 1 ? strings.notices.deleted(title) : strings.notices.deletedSeveral(removed.length)
    if (removed.length > 0) notices.tell(told, { cause: 'deleted', act: { label: strings.restore, run: () => void this.restore(...removed) } })
    return removed
  }

  /** No longer in the list; the server knows. */
  forget(id: string): void {
    this.all = this.all.filter((one) => one.id !== id)
    this.pinned = this.pinned.filter((one) => one.id !== id)
  }

  async restore(...ids: string[]): Promise<void> {
    notices.settle('deleted')
    try {
      await Promise.all(ids.map(api.restoreConversation))
    } catch (error) {
      notices.fail(error)
    }
    await this.look()
  }

  rename(id: string, title: string): Promise<void> {
    if (this.#find(id)?.title === title) return Promise.resolve()
    return this.#change([id], { title })
  }

  pin(pinned: boolean, ...ids: string[]): Promise<void> {
    return this.#change(ids, { pinned })
  }

  async #change(ids: string[], asked: ChangeConversation): Promise<void> {
    try {
      await Promise.all(ids.map((id) => api.updateConversation(id, asked)))
    } catch (error) {
      notices.fail(error)
    }
    await this.look()
  }

  #find(id: string | undefined): Conversation | undefined {
    return [...this.pinned, ...this.all].find((one) => one.id === id)
  }

  async takeIn(files: Iterable<File>): Promise<Conversation[]> {
    const taken: Conversation[] = []
    let failed = false
    notices.settle('file')
    for (const file of files) {
      try {
        const { conversations: made, skipped = [] } = await api.importFile(file)
        taken.push(...made)
        if (skipped[0]) notices.fail(strings.notices.importSkipped(skipped.length, skipped[0].item, skipped[0].reason), 'file')
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

  #listing(limit: number): api.ListQuery {
    return {
      limit,
      deleted: this.deleted,
      ...(this.deleted ? {} : { pinned: false }),
      ...(this.tag ? { tag: this.tag } : {}),
      ...(this.query.trim() ? { title: this.query.trim() } : {}),
    }
  }
}

export const conversations = new Conversations()
