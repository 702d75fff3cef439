import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { compareMode } from '../src/state/compare.svelte'
import { Conversation } from '../src/state/conversation.svelte'
import { model } from '../src/state/model.svelte'
import { notices } from '../src/state/notices.svelte'
import { requestOnce, ApiError, UnreachableError } from '../src/transport/http'
import type { Stream } from '../src/transport/stream'
import type { Comparison, ModelCard, Node, Status, Stored, StoredReply } from '../src/transport/types'

/** A server with one conversation, whose messages contain their ids. */
class Server {
  nodes: Node[] = []
  cursor: string | null = null
  requests: { method: string; path: string; body: unknown; key: string | null }[] = []
  failing = 0
  gone = false
  full = false
  comparisons: Comparison[] = []

  add(id: string, parent: string | null, role: Node['role'] = 'user'): void {
    this.nodes.push({ id, parent_id: parent, role, created_at: '' })
  }

  stored(id: string): Stored {
    const node = this.nodes.find((one) => one.id === id)!
    return { ...node, conversation_id: 'c', parts: [{ type: 'text', text: id }], edit_of: null, reply: null }
  }

  path(leaf: string): Stored[] {
    const parent = this.nodes.find((one) => one.id === leaf)!.parent_id
    return [...(parent === null ? [] : this.path(parent)), this.stored(leaf)]
  }

  newest(start: string): string {
    const child = this.nodes.findLast((one) => one.parent_id === start)
    return child ? this.newest(child.id) : start
  }

  fetch = async (input: string, init: RequestInit): Promise<Response> => {
    const url = new URL(input)
    const method = init.method ?? 'GET'
    const body = typeof init.body === 'string' ? JSON.parse(init.body) : null
    const key = (init.headers as Record<string, string>)['idempotency-key'] ?? null
    this.requests.push({ method, path: url.pathname, body, key })
    if (this.failing > 0) {
      this.failing -= 1
      throw new TypeError('network')
    }
    if (this.gone) return Response.json({ error: { message: 'gone', type: 'x', param: null, code: null } }, { status: 404 })
    if (this.full && url.pathname.endsWith('/say') && !(body as { parameters?: unknown }).parameters) {
      const details = { tokens: 400, limit: 300 }
      const error = { message: 'too long', type: 'x', param: null, code: null, name: 'context_overflow', details }
      return Response.json({ error }, { status: 400 })
    }
    return Response.json(this.answer(method, url, body))
  }

  answer(method: string, url: URL, body: { to?: string; parent?: string } | null): unknown {
    const [, , kind, id, what] = url.pathname.split('/')
    if (kind === 'messages') return what === 'path' ? this.path(id!) : this.stored(id!)
    if (what === 'nodes') return this.nodes
    if (what === 'comparisons') return this.comparisons
    if (what === 'compare') {
      this.add('question', body?.parent ?? null)
      const replies = ['one', 'two'].map((reply_id) => ({ reply_id, name: reply_id, model: 'm', parameters: {} }))
      for (const { reply_id } of replies) this.add(reply_id, 'question', 'assistant')
      const made = { id: 'k', conversation_id: 'c', parent_id: 'question', blind: false, replies, created_at: '', decided_at: null, chosen_id: null }
      this.comparisons.push(made)
      return made
    }
    if (kind === 'comparisons') {
      const decided = { ...this.comparisons[0]!, chosen_id: (body as { reply?: string }).reply ?? null, decided_at: 'now' }
      this.comparisons = [decided]
      return decided
    }
    if (what === 'newest-leaf') return { id: this.newest(url.searchParams.get('start')!) }
    if (what === 'gauge') return { used: 1, limit: 2, cached: 0 }
    if (what === 'cursor') {
      if (method === 'PUT') this.cursor = body?.to ?? null
      return { message_id: this.cursor, can_undo: false, can_redo: false }
    }
    if (kind === 'turns') {
      if (what === 'fork') this.add('forked', 'a', 'assistant')
      return this.stored(what === 'fork' ? 'forked' : id!)
    }
    if (what === 'say') {
      this.add('question', body?.parent ?? null)
      this.add('reply', 'question', 'assistant')
      return { message: this.stored('question'), reply: this.stored('reply') }
    }
    return { id: 'c', title: 't', parameters: {}, tags: [], system: '' }
  }
}

const stream = { subscribe: () => undefined, unsubscribe: () => undefined } as unknown as Stream
let server: Server

beforeEach(() => {
  server = new Server()
  vi.stubGlobal('fetch', server.fetch)
  vi.stubGlobal('document', { baseURI: 'http://here/' })
  vi.useFakeTimers()
})
afterEach(() => {
  vi.useRealTimers()
  vi.unstubAllGlobals()
})

async function openConversation(): Promise<Conversation> {
  const conversation = new Conversation('c', stream)
  await conversation.open()
  return conversation
}

async function settled(): Promise<void> {
  await vi.advanceTimersByTimeAsync(5)
}

const ids = (conversation: Conversation): string[] => conversation.path.map((one) => one.id)
const change = (message_id: string): Parameters<Conversation['handleChange']>[0] => ({ conversation_id: 'c', what: 'message', message_id })

describe('the open conversation', () => {
  it('opens at the cursor of this tab', async () => {
    server.add('a', null)
    server.add('b', 'a')
    server.cursor = 'a'
    expect(ids(await openConversation())).toEqual(['a'])
  })

  it('follows a branch that grows below its leaf, and no other', async () => {
    server.add('a', null)
    server.cursor = 'a'
    const conversation = await openConversation()
    server.add('b', 'a')
    conversation.handleChange(change('b'))
    await settled()
    expect(ids(conversation)).toEqual(['a', 'b'])
    server.add('c', 'a')
    conversation.handleChange(change('c'))
    await settled()
    expect(ids(conversation)).toEqual(['a', 'b'])
    expect(conversation.tree.place('b').count).toBe(2)
    expect(server.cursor).toBe('b')
  })

  it('shows the replies of a comparison in columns until one is chosen', async () => {
    const conversation = await openConversation()
    const comparing = { blind: false, columns: [{ parameters: {} }, { parameters: { temperature: 0 } }] }
    compareMode.start('c', comparing)
    expect(compareMode.get('another')).toBe(null)
    expect(await conversation.send([{ type: 'text', text: 'a' }], 'key')).toBe('question')
    compareMode.stop(comparing)
    expect(compareMode.get('c')).toBe(null)
    expect(server.requests.find((one) => one.path.endsWith('/compare'))?.key).toBe('key')
    expect(ids(conversation)).toEqual(['question'])
    expect(conversation.comparison?.id).toBe('k')
    const column = conversation.openColumn('two')
    await settled()
    expect(ids(column)).toEqual(['question', 'two'])
    expect(column.comparison).toBe(null)
    server.add('three', 'two', 'tool') // as a round of tool calls does
    conversation.handleChange(change('three'))
    await settled()
    expect(ids(column)).toEqual(['question', 'two', 'three'])
    expect(ids(conversation)).toEqual(['question'])
    expect(server.cursor).toBe('question')
    conversation.closeColumn(column)
    expect(await conversation.choose(conversation.comparison!, 'two')).toBe(true)
    expect(ids(conversation)).toEqual(['question', 'two', 'three'])
    expect(conversation.comparison).toBe(null)
    await conversation.moveTo('question')
    expect(conversation.comparison?.chosen_id).toBe('two')
  })

  it('keeps its cursor whatever other changes arrive', async () => {
    server.add('a', null)
    server.add('b', 'a')
    server.cursor = 'a'
    const conversation = await openConversation()
    conversation.handleChange({ conversation_id: 'c', what: 'ended', message_id: 'b' })
    await settled()
    expect(ids(conversation)).toEqual(['a'])
  })

  it('sends below the shown leaf, with a key, and once', async () => {
    server.add('a', null)
    server.cursor = 'a'
    const conversation = await openConversation()
    server.failing = 0
    const saying = conversation.send([{ type: 'text', text: 'hi' }], 'key')
    expect(conversation.pending?.key).toBe('key')
    conversation.handleChange(change('question')) // own changes are received, too, possibly before the response
    expect(await saying).toBe('question')
    await settled()
    expect(ids(conversation)).toEqual(['a', 'question', 'reply'])
    expect(conversation.pending).toBe(null)
    const sent = server.requests.filter((one) => one.path.endsWith('/say'))
    expect(sent).toHaveLength(1)
    expect(sent[0]).toMatchObject({ key: 'key', body: { parent: 'a' } })
    expect(server.requests.filter((one) => one.method === 'PUT')).toHaveLength(1)
  })

  it('continues and forks with a key, and retries with the same key', async () => {
    server.add('a', null)
    server.add('b', 'a', 'assistant')
    server.cursor = 'b'
    const conversation = await openConversation()
    for (const what of ['continue', 'fork']) {
      server.failing = 2
      const doing = what === 'fork' ? conversation.fork(server.stored('b'), 3, 7) : conversation.continueReply(server.stored('b'))
      await vi.advanceTimersByTimeAsync(5000)
      expect(await doing).toBe(true)
      const sent = server.requests.filter((one) => one.path.endsWith(`/${what}`))
      expect(sent).toHaveLength(3)
      expect(sent[0]?.key).toMatch(/^[0-9a-f]{32}$/)
      expect(new Set(sent.map((one) => one.key)).size).toBe(1)
    }
    expect(ids(conversation)).toEqual(['a', 'forked'])
  })

  it('lets the user choose when the context is full', async () => {
    server.add('a', null)
    server.cursor = 'a'
    server.full = true
    const conversation = await openConversation()
    const parts = [{ type: 'text' as const, text: 'hi' }]
    const back = conversation.send(parts, 'key')
    await settled()
    expect(conversation.overflow).toMatchObject({ tokens: 400, limit: 300 })
    conversation.overflow?.choose(null)
    expect(await back).toBe(null)
    expect(conversation.overflow).toBe(null)
    const always = conversation.send(parts, 'key')
    await settled()
    conversation.overflow?.choose('always')
    expect(await always).toBe('question')
    expect(ids(conversation)).toEqual(['a', 'question', 'reply'])
    expect(server.requests.find((one) => one.method === 'PATCH')?.body).toEqual({ parameters: { overflow: 'shorten' } })
    expect(server.requests.findLast((one) => one.path.endsWith('/say'))?.body).toMatchObject({ parameters: { overflow: 'shorten' } })
  })

  it('shows an error until the action succeeds', async () => {
    server.add('a', null)
    server.cursor = 'a'
    const conversation = await openConversation()
    server.gone = true
    expect(await conversation.send([{ type: 'text', text: 'hi' }], 'key')).toBe(null)
    expect(notices.all.map((one) => one.lines[0]?.text)).toEqual(['gone'])
    server.gone = false
    expect(await conversation.send([{ type: 'text', text: 'hi' }], 'key')).toBe('question')
    expect(notices.all).toEqual([])
  })

  it('can continue incomplete replies only', async () => {
    server.add('a', null)
    server.add('b', 'a', 'assistant')
    server.cursor = 'b'
    const conversation = await openConversation()
    const card = { state: 'ready', context_length: 100 } as ModelCard
    const usage = { prompt_tokens: 40, cached_tokens: 0, reply_tokens: 20, thinking_tokens: 0 }
    const can = (status: Status | null, given: Partial<Stored> = {}, tokens = usage): boolean => {
      const reply = status && ({ status, usage: tokens } as StoredReply)
      return conversation.canContinue({ ...server.stored('b'), reply, ...given })
    }
    model.card = card
    expect((['stopped', 'length', 'interrupted', 'failed'] as const).map((status) => can(status))).toEqual([true, true, true, true])
    expect(can('done')).toBe(false)
    expect(can('running')).toBe(false)
    expect(can(null)).toBe(false) // imported
    expect(can(null, { edit_of: 'x' })).toBe(true)
    expect(can(null, { edit_of: 'x', id: 'elsewhere' })).toBe(false)
    expect(can('length', {}, { ...usage, reply_tokens: 60 })).toBe(false) // the context is full
    model.card = { ...card, state: 'none' }
    expect(can('stopped')).toBe(false)
  })

  it('reports a missing conversation', async () => {
    server.gone = true
    expect((await openConversation()).missing).toBe(true)
  })
})

describe('a write with an idempotency key', () => {
  it('is retried while the server is unreachable', async () => {
    server.add('a', null)
    server.failing = 2
    const writing = requestOnce('api/conversations/c/say', { method: 'POST', json: { parent: 'a' }, key: 'k' })
    await vi.advanceTimersByTimeAsync(5000)
    await writing
    expect(server.requests.map((one) => one.key)).toEqual(['k', 'k', 'k'])
  })

  it('fails after several attempts, and at once on an error response', async () => {
    server.failing = 100
    const lost = expect(requestOnce('api/x', { method: 'POST', key: 'k' })).rejects.toBeInstanceOf(UnreachableError)
    await vi.advanceTimersByTimeAsync(60_000)
    await lost
    server.failing = 0
    server.gone = true
    await expect(requestOnce('api/x', { method: 'POST', key: 'k' })).rejects.toBeInstanceOf(ApiError)
  })
})
