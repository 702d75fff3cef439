// The unsent text and files of each conversation, with the idempotency key of the message: a message whose response is
// lost is stored once.
//
// Each tab keeps its own drafts over a reload. The newest draft of all tabs is shared with tabs that are opened later. When a tab
// sends or deletes the shared draft, its copies in other tabs go, and a tab that has written something else shares that.
//
// Drafts belong to a user. What is written before the user is known is not stored until then.
import type { Attachment } from '../components/attachments'
import { newKey } from '../transport/http'
import { load, loadFromTab, parse, PREFIX, save, saveToTab } from './storage'
import { user } from './user.svelte'

export interface Draft {
  text: string
  files: Attachment[]
  key: string
  /** Once it is sent, the leaf after which; empty for the first message. The server may have it although no response came. */
  after?: string
}

/** The storage names of drafts begin so, those of the user. */
export const DRAFTS = 'draft.'
const storageKey = (conversation: string | null): string => user.key(`${DRAFTS}${conversation ?? 'new'}`)
/** The drafts that are written before the user is known, by conversation. */
const early = new Map<string | null, Draft>()

export const emptyDraft = (): Draft => ({ text: '', files: [], key: newKey() })
const isEmpty = (draft: Draft): boolean => draft.text.trim() === '' && draft.files.length === 0

/** The draft of this tab. Without one, that of another tab becomes its own, too. */
export function loadDraft(conversation: string | null): Draft {
  const own = loadOwnDraft(conversation)
  if (user.name === null) return own ?? emptyDraft()
  const name = storageKey(conversation)
  const shared = own === null ? validDraft(load(name, null)) : null
  if (shared) saveToTab(name, shared)
  return own ?? shared ?? emptyDraft()
}

export function loadOwnDraft(conversation: string | null): Draft | null {
  if (user.name === null) return early.get(conversation) ?? null
  return validDraft(loadFromTab(storageKey(conversation)) ?? null)
}

/** An empty draft removes that of this tab, but not what another tab has written since. */
export function saveDraft(conversation: string | null, draft: Draft): void {
  if (draft.text === '' && draft.files.length === 0) return removeDraft(conversation, loadOwnDraft(conversation)?.key ?? draft.key)
  if (user.name === null) return void early.set(conversation, draft)
  saveToTab(storageKey(conversation), draft)
  save(storageKey(conversation), draft)
}

/** The user is known: what was written before is put behind the user's drafts. */
export function adoptEarlyDrafts(): void {
  for (const [conversation, draft] of early) saveDraft(conversation, mergeDrafts(loadDraft(conversation), draft))
  early.clear()
}

/** The draft as it is sent. If it is not shared any more, another tab may have sent it while this one was asleep: it is another message then. */
export function prepareDraft(conversation: string | null, draft: Draft): Draft {
  const name = storageKey(conversation)
  if (draft.after !== undefined || validDraft(load(name, null))?.key === draft.key) return draft
  const renewed = { ...draft, key: newKey() }
  saveToTab(name, renewed)
  return renewed
}

/** Removes the draft with this key. */
export function removeDraft(conversation: string | null, key: string): void {
  const isOwn = loadOwnDraft(conversation)?.key === key
  if (user.name === null) return void (isOwn && early.delete(conversation))
  const name = storageKey(conversation)
  if (isOwn) saveToTab(name, null)
  if (validDraft(load(name, null))?.key === key) save(name, null)
}

/** Another tab removed the shared draft. Returns the key of the copy that this tab had of it, or null. */
export function handleDraftRemoval({ key, oldValue, newValue }: StorageEvent): string | null {
  if (user.name === null || newValue !== null || !key?.startsWith(PREFIX + user.key(DRAFTS))) return null
  const name = key.slice(PREFIX.length)
  const own = validDraft(loadFromTab(name) ?? null)
  const removed = validDraft(parse(oldValue, null))
  if (own === null || removed === null) return null
  if (own.key === removed.key) saveToTab(name, null)
  else save(name, own)
  return own.key === removed.key ? own.key : null
}

function validDraft(stored: Draft | null): Draft | null {
  return stored && typeof stored.text === 'string' && Array.isArray(stored.files) ? stored : null
}

/** Puts a message that could not be sent before the draft that was written since. */
export function mergeDrafts(unsent: Draft, since: Draft): Draft {
  if (isEmpty(since)) return unsent
  if (isEmpty(unsent)) return since
  return { text: `${unsent.text}\n${since.text}`, files: [...unsent.files, ...since.files], key: newKey() }
}
