// Removes the drafts and queued messages of conversations that the server does not have any more.
//
// A deleted conversation can be restored, so its drafts stay. They also stay for a while if it is unknown, since the server may run on
// another database for a time.
import * as api from '../transport/api'
import { ApiError } from '../transport/http'
import { DRAFTS } from './drafts'
import { QUEUES } from './queue.svelte'
import { listNames, load, save, saveToTab } from './storage'
import { user } from './user.svelte'

const KEEP_MS = 30 * 24 * 3_600_000
const PAGE_SIZE = 100

/** Removes what belongs to conversations that have been unknown for `KEEP_MS`. Each call notes which are unknown. */
export async function removeOrphans(now = Date.now()): Promise<void> {
  const prefixes = [user.key(DRAFTS), user.key(QUEUES)]
  const ids = new Set(prefixes.flatMap((prefix) => listNames(prefix).map((name) => name.slice(prefix.length))))
  ids.delete('new')
  const before = load<Record<string, number>>(user.key('unknown'), {})
  const unknown: Record<string, number> = {}
  for (const id of await findUnknown([...ids])) {
    const since = before[id] ?? now
    if (now - since < KEEP_MS) unknown[id] = since
    else prefixes.forEach((prefix) => remove(prefix + id))
  }
  save(user.key('unknown'), Object.keys(unknown).length > 0 ? unknown : null)
}

function remove(name: string): void {
  save(name, null)
  saveToTab(name, null)
}

/** The conversations that the server has neither as open nor as deleted ones. */
async function findUnknown(ids: string[]): Promise<string[]> {
  const missing: string[] = []
  for (const id of ids) if (!(await exists(id))) missing.push(id)
  if (missing.length === 0) return []
  const deleted = new Set<string>()
  for (let before: string | undefined = ''; before !== undefined; ) {
    const found = await api.listConversations({ deleted: true, limit: PAGE_SIZE, before })
    for (const one of found) deleted.add(one.id)
    before = found.length < PAGE_SIZE ? undefined : found.at(-1)?.id
  }
  return missing.filter((id) => !deleted.has(id))
}

async function exists(id: string): Promise<boolean> {
  try {
    await api.getConversation(id)
    return true
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return false
    throw error
  }
}
