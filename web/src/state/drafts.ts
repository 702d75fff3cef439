// What was typed and not sent, for each conversation, with the key under which it will be sent: a message whose answer
// got lost is not said twice.
import type { Attachment } from '../components/attachments'
import { newKey } from '../transport/http'
import { keep, kept } from './storage'

export interface Draft {
  text: string
  files: Attachment[]
  key: string
}

const name = (conversation: string | null): string => `draft.${conversation ?? 'new'}`

export function draft(conversation: string | null): Draft {
  const found = kept<Draft | null>(name(conversation), null)
  return found && typeof found.text === 'string' && Array.isArray(found.files) ? found : { text: '', files: [], key: newKey() }
}

export function keepDraft(conversation: string | null, draft: Draft): void {
  const empty = draft.text === '' && draft.files.length === 0
  keep(name(conversation), empty ? null : draft)
}

/** A message that comes back unsent, before what was written since. */
export function joined(unsent: Draft, since: Draft): Draft {
  if (since.text.trim() === '' && since.files.length === 0) return unsent
  return { text: `${unsent.text}\n${since.text}`, files: [...unsent.files, ...since.files], key: newKey() }
}
