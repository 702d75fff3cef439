// The list of conversations and the results of a search.
import * as api from '../transport/api'
import { strings } from '../strings'
import type { ChangeConversation, Conversation, Hit } from '../transport/types'
import { notices } from './notices.svelte'

const PAGE_SIZE = 50
const MAX_PINNED = 1000
const DELAY_MS = 200

class Conversations {
  /** The unpinned conversations, in pages; in the list of deleted conversations, all of them. */
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
  #searchTimer: ReturnType<typeof setTimeout> | undefined
  #requestNumber = 0
  #newestLoad: Promise<void> = Promise.resolve()
  /** The words for which the list was loaded. */
  #listedQuery = ''

  /** Loads the list after a delay, once for several changes. */
  loadSoon(): void {
    clearTimeout(this.#timer)
    this.#timer = setTimeout(() => void this.load(), DELAY_MS)
  }

  load(): Promise<void> {
    this.#newestLoad = this.#load()
    return this.#newestLoad
  }

  async #load(): Promise<void> {
    const number = ++this.#requestNumber
    const { query } = this
    const count = Math.max(PAGE_SIZE, this.all.length)
    try {
      const pinned = this.deleted ? [] : api.listConversations({ ...this.#listQuery(MAX_PINNED), pinned: true })
      const [found, tags, pinnedNow] = await Promise.all([api.listConversations(this.#listQuery(count)), api.listTags(), pinned])
      if (number !== this.#requestNumber) return this.#newestLoad
      this.#listedQuery = query
      this.all = found
      this.pinned = pinnedNow
      this.tags = tags
      this.more = found.length >= count
      this.loaded = true
    } catch {
      // the banner shows that the server is unreachable; the stream triggers a reload
    }
  }

  async loadMore(): Promise<void> {
    const before = this.all.at(-1)?.id
    if (!before) return
    const found = await api.listConversations({ ...this.#listQuery(PAGE_SIZE), before }).catch(() => null)
    if (found === null || before !== this.all.at(-1)?.id) return // the list has changed, or has these already
    this.all = [...this.all, ...found]
    this.more = found.length >= PAGE_SIZE
  }

  /** Shows the conversations with a tag, or the deleted ones. */
  filter(tag: string | null, deleted: boolean): void {
    this.tag = tag
    this.deleted = deleted
    this.all = []
    this.pinned = []
    void this.load()
  }

  search(query: string): void {
    this.query = query
    clearTimeout(this.#searchTimer)
    if (query.trim() === '') this.hits = []
    this.#searchTimer = setTimeout(() => void this.#search(query), DELAY_MS)
  }

  /** Completes the search for the current words. Returns whether the results are theirs: the server answered, and they are still the same. */
  async finishSearch(): Promise<boolean> {
    const { query } = this
    clearTimeout(this.#searchTimer)
    await this.#search(query)
    return query === this.query && query === this.#listedQuery
  }

  /** Returns the ids of the deleted conversations. */
  async remove(...ids: string[]): Promise<string[]> {
    const removed: string[] = []
    const title = this.#find(ids[0])?.title || strings.untitled
    for (const id of ids) {
      try {
        await api.deleteConversation(id)
      } catch (error) {
        notices.showError(error)
        break
      }
      removed.push(id)
      this.forget(id)
    }
    const message = ids.length === 1 ? strings.notices.deleted(title) : strings.notices.deletedSeveral(removed.length)
    if (removed.length > 0) notices.show(message, { cause: 'deleted', action: { label: strings.restore, run: () => void this.restore(...removed) } })
    return removed
  }

  /** Removes a conversation from the list only. */
  forget(id: string): void {
    this.all = this.all.filter((one) => one.id !== id)
    this.pinned = this.pinned.filter((one) => one.id !== id)
  }

  async restore(...ids: string[]): Promise<void> {
    notices.clear('deleted', 'action')
    try {
      await Promise.all(ids.map(api.restoreConversation))
    } catch (error) {
      notices.showError(error)
    }
    await this.load()
  }

  rename(id: string, title: string): Promise<void> {
    if (this.#find(id)?.title === title) return Promise.resolve()
    return this.#change([id], { title })
  }

  pin(pinned: boolean, ...ids: string[]): Promise<void> {
    return this.#change(ids, { pinned })
  }

  async #change(ids: string[], request: ChangeConversation): Promise<void> {
    try {
      await Promise.all(ids.map((id) => api.updateConversation(id, request)))
    } catch (error) {
      notices.showError(error)
    }
    await this.load()
  }

  #find(id: string | undefined): Conversation | undefined {
    return [...this.pinned, ...this.all].find((one) => one.id === id)
  }

  async importFiles(files: Iterable<File>): Promise<Conversation[]> {
    const imported: Conversation[] = []
    let failed = false
    notices.clear('file')
    for (const file of files) {
      try {
        const { conversations: created, skipped = [] } = await api.importFile(file)
        imported.push(...created)
        if (skipped[0]) notices.showError(strings.notices.importSkipped(skipped.length, skipped[0].item, skipped[0].reason), 'file')
      } catch (error) {
        notices.showError(error, 'file')
        failed = true
      }
    }
    if (!failed || imported.length > 0) notices.show(imported.length > 0 ? strings.notices.imported(imported.length) : strings.notices.importedNone)
    await this.load()
    return imported
  }

  async #search(query: string): Promise<void> {
    const loading = this.load()
    const hits = query.trim() === '' ? [] : await api.search(query).catch(() => [])
    if (query === this.query) this.hits = hits
    await loading
  }

  #listQuery(limit: number): api.ListQuery {
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
