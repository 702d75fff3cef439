// The unsent text and files of each conversation, with the idempotency key of the message: a message whose response is
// lost is stored once.
import type { Attachment } from '../components/attachments'
import { newKey } from '../transport/http'
import { load, save } from './storage'

export interface Draft {
  text: string
  files: Attachment[]
  key: string
  /** Once it is sent, the leaf after which; empty for the first message. The server may have it although no response came. */
  after?: string
}

const storageKey = (conversation: string | null): string => `draft.${conversation ?? 'new'}`

export function loadDraft(conversation: string | null): Draft {
  const stored = load<Draft | null>(storageKey(conversation), null)
  return stored && typeof stored.text === 'string' && Array.isArray(stored.files) ? stored : { text: '', files: [], key: newKey() }
}

export function saveDraft(conversation: string | null, draft: Draft): void {
  const empty = draft.text === '' && draft.files.length === 0
  save(storageKey(conversation), empty ? null : draft)
}

/** Puts a message that could not be sent before the draft that was written since. */
export function mergeDrafts(unsent: Draft, since: Draft): Draft {
  if (since.text.trim() === '' && since.files.length === 0) return unsent
  return { text: `${unsent.text}\n${since.text}`, files: [...unsent.files, ...since.files], key: newKey() }
}
