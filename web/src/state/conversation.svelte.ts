// The open conversation: one branch of its tree, its running turns, and the actions of the user.
//
// Every write names its parent, so that two tabs create two branches instead of overwriting each other.
import { SvelteMap, SvelteSet } from 'svelte/reactivity'
import { strings } from '../strings'
import * as api from '../transport/api'
import { ApiError, newKey } from '../transport/http'
import type { Stream } from '../transport/stream'
import type { CallDecision, Change, Comparison, Conversation as About, Cursor, Gauge, ModelCard, Part, Said, Stored, ToolRound } from '../transport/types'
import { compareMode, type CompareSettings } from './compare.svelte'
import { conversations } from './conversations.svelte'
import { model } from './model.svelte'
import { ErrorWithAction, notices } from './notices.svelte'
import { tab } from './tab.svelte'
import { Tree } from './tree'
import { Turn } from './turn.svelte'

const NO_CURSOR: Cursor = { message_id: null, can_undo: false, can_redo: false }
const RETRY_MS = 1000
const TITLE_CHARS = 80
const MAX_DELETED = 1000 // the newest of the deleted conversations, among which a missing one is looked for

export interface Pending {
  parts: Part[]
  key: string
}

/** A message does not fit into the context: the user decides whether to shorten the conversation. */
export interface ContextOverflow {
  tokens: number
  limit: number
  choose: (choice: 'once' | 'always' | null) => void
}

export class Conversation {
  about: About | null = $state.raw(null)
  path: Stored[] = $state.raw([])
  tree: Tree = $state.raw(new Tree())
  cursor: Cursor = $state.raw(NO_CURSOR)
  gauge: Gauge | null = $state.raw(null)
  /** The message that the server has not stored yet. */
  pending: Pending | null = $state.raw(null)
  overflow: ContextOverflow | null = $state.raw(null)
  /** The model that is being loaded for the next reply. */
  loading: ModelCard | null = $state.raw(null)
  missing = $state(false)
  /** Whether it is missing because it was deleted: it can be restored. */
  isDeleted = $state(false)
  loaded = $state(false)
  readonly turns = new SvelteMap<string, Turn>()
  /** The tool calls that the server runs, by reply. */
  readonly rounds = new SvelteMap<string, ToolRound>()
  /** The comparisons of this conversation, oldest first. */
  comparisons: Comparison[] = $state.raw([])
  /** The branches of the comparison on screen. They receive the events of this conversation. */
  readonly columns = new SvelteSet<Conversation>()
  #writing = 0
  #stale = false
  /** The number of the branch that was chosen last. */
  #pathNumber = 0
  #changing: Promise<unknown> = Promise.resolve()
  #closed = false
  #refreshing: Promise<void> | null = null
  #roundRequests = new Map<string, number>()
  #timers = new Set<ReturnType<typeof setTimeout>>()

  constructor(
    readonly id: string,
    private readonly stream: Stream,
    /** Whether this is a column of a comparison. A column has no cursor. */
    private readonly isColumn = false,
  ) {}

  /** The comparison at the end of the branch. */
  get comparison(): Comparison | null {
    const { leaf } = this
    return leaf === null || this.isColumn ? null : (this.comparisons.findLast((one) => one.parent_id === leaf) ?? null)
  }

  /** Opens the branch of one reply as a column of a comparison. */
  openColumn(reply: string): Conversation {
    const column = new Conversation(this.id, this.stream, true)
    this.columns.add(column)
    void column.open(reply)
    return column
  }

  closeColumn(column: Conversation): void {
    this.columns.delete(column)
    column.close()
  }

  /** The title, or the first words until the first message is stored; may be empty. */
  get title(): string {
    return this.about?.title || (this.path.length === 0 ? this.pending?.parts.find((part) => part.type === 'text')?.text.trim().slice(0, TITLE_CHARS) : '') || ''
  }

  get leaf(): string | null {
    return this.path.at(-1)?.id ?? null
  }

  /** The running reply of this branch. */
  get running(): Stored | null {
    return this.path.findLast((one) => this.isRunning(one)) ?? null
  }

  /** The reply whose tool calls are running. */
  get calling(): Stored | null {
    const runs = (id: string): boolean => {
      const round = this.rounds.get(id)
      return round?.state === 'open' && round.calls.some((call) => call.state === 'running' || call.state === 'approved')
    }
    return this.path.findLast((one) => runs(one.id)) ?? null
  }

  /** Whether a message is being sent, a reply is running, or its tools are. */
  get isBusy(): boolean {
    return [this, ...this.columns].some((one) => one.pending !== null || one.running !== null || one.calling !== null)
  }

  /** Whether tool calls wait for the user. */
  get needsApproval(): boolean {
    return this.path.some((one) => this.rounds.get(one.id)?.state === 'open')
  }

  isRunning(message: Stored): boolean {
    const turn = this.turns.get(message.id)
    return turn ? !turn.ended : message.reply?.status === 'running'
  }

  /** Whether a reply is incomplete, or an edited one at the end of the branch. */
  canContinue(message: Stored): boolean {
    if (message.role !== 'assistant' || this.isRunning(message) || !model.isAvailable) return false
    if (!message.reply) return message.edit_of !== null && message.id === this.leaf
    const round = this.rounds.get(message.id)
    if (round) return round.state === 'stopped' || round.state === 'failed'
    if (message.reply.status === 'running') return false // it has just ended; its final status is not loaded yet
    return message.reply.status !== 'done' && !this.fillsContext(message)
  }

  /** Whether a reply ended because the context was full, not at `max_tokens`. */
  fillsContext({ reply }: Stored): boolean {
    if (reply?.status !== 'length' || !reply.usage || !model.card?.context_length) return false
    return reply.usage.prompt_tokens + reply.usage.reply_tokens >= model.card.context_length
  }

  async open(at: string | null = null): Promise<void> {
    try {
      const [about, cursor, nodes, comparisons] = await Promise.all([
        api.getConversation(this.id),
        this.#loadCursor(),
        api.listNodes(this.id),
        this.#loadComparisons(),
      ])
      if (this.#closed) return
      this.about = about
      this.comparisons = comparisons
      this.cursor = cursor
      this.tree = new Tree(nodes)
      const leaf = at && this.tree.has(at) ? (await api.getNewestLeaf(this.id, at)).id : cursor.message_id
      await this.#loadPath(leaf)
      if (leaf !== cursor.message_id) await this.#moveCursor(leaf)
      this.loaded = true
      this.missing = false
      this.#refreshIfStale()
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) await this.#handleMissing()
      else if (!this.#closed) this.#retryLater(() => void this.open(at))
    }
  }

  close(): void {
    this.#closed = true
    this.overflow?.choose(null) // its question is gone from the screen
    for (const timer of this.#timers) clearTimeout(timer)
    for (const [id, turn] of this.turns) this.stream.unsubscribe(id, turn)
  }

  /** Pauses the clocks of thoughts while the server is unreachable. */
  handleDisconnect(): void {
    for (const turn of this.turns.values()) turn.pause()
    for (const column of this.columns) column.handleDisconnect()
  }

  /** Handles a change by any client, including this one. */
  handleChange(change: Change): void {
    for (const column of this.columns) column.handleChange(change)
    if (change.what === 'turn' && change.message_id) this.#resumeTurn(change.message_id)
    if (change.what === 'tools' && change.message_id) void this.#loadRound(change.message_id)
    else this.refresh()
  }

  /** Loads the current state. If the branch has grown, its new end is shown. */
  refresh(): void {
    if (this.#closed) return
    if (!this.loaded) {
      if (this.missing) void this.open() // it may have been restored
      else this.#stale = true // what is being loaded may be older than the change
      return
    }
    for (const column of this.columns) column.refresh()
    if (this.#writing > 0 || this.#refreshing) {
      this.#stale = true
      return
    }
    this.#refreshing = this.#refresh()
      .catch((error: unknown) => {
        if (error instanceof ApiError && error.status === 404) return this.#handleMissing()
      })
      .finally(() => {
        this.#refreshing = null
        this.#refreshIfStale()
      })
  }

  async #refresh(): Promise<void> {
    const [about, nodes, cursor, comparisons] = await Promise.all([
      api.getConversation(this.id),
      api.listNodes(this.id),
      this.#loadCursor(),
      this.#loadComparisons(),
    ])
    if (this.#closed || this.#writing > 0) {
      this.#stale = true
      return
    }
    for (const [id, round] of this.rounds) if (round.state === 'open') void this.#loadRound(id)
    const previous = this.tree
    this.missing = false
    this.about = about
    this.cursor = cursor
    this.comparisons = comparisons
    this.tree = new Tree(nodes)
    if (this.comparison) return // its replies are shown in columns
    const leaf = this.leaf
    const hasGrown = nodes.some((node) => !previous.has(node.id) && (leaf === null || this.tree.path(node.id).includes(leaf)))
    if (!hasGrown) return
    const to = leaf === null ? nodes.at(-1)!.id : (await api.getNewestLeaf(this.id, leaf)).id
    if (this.leaf !== leaf) return
    if (await this.#loadPath(to)) await this.#moveCursor(to)
  }

  #refreshIfStale(): void {
    if (this.#stale && this.#writing === 0 && !this.#closed) {
      this.#stale = false
      this.refresh()
    }
  }

  // Actions of the user

  /** Sends a message behind the branch. Returns its id, or null if it was not sent. */
  async send(parts: Part[], key: string, role: 'user' | 'tool' = 'user'): Promise<string | null> {
    this.pending = { parts, key }
    let sent: string | null = null
    const done = await this.#write(async () => {
      await this.#changing
      const comparing = compareMode.get(this.id)
      const parent = this.leaf
      if (comparing && role === 'user') {
        sent = await this.#compare({ parent, message: { role, parts } }, comparing, key)
        return
      }
      const result = await this.#sendMessage({ parent, message: { role, parts } }, key)
      if (!result) return
      sent = result.message.id
      this.pending = null
      const isShown = this.leaf === parent // else another branch was chosen meanwhile
      await this.#moveTo(result.reply.id, isShown ? [...this.path, result.message, result.reply] : null)
    })
    this.pending = null
    return done ? sent : null
  }

  /** Creates another reply to the same message. */
  retry(reply: Stored): Promise<boolean> {
    return this.#write(async () => {
      if (reply.parent_id === null) return
      await this.#changing
      const comparing = compareMode.get(this.id)
      if (comparing) return void (await this.#compare({ parent: reply.parent_id, message: null }, comparing, newKey()))
      await this.#moveTo((await api.createReply(this.id, reply.parent_id, newKey())).id)
    })
  }

  /** Creates a reply to a message that has none on this branch. */
  answer(message: Stored): Promise<boolean> {
    return this.#write(async () => this.#moveTo((await api.createReply(this.id, message.id, newKey())).id))
  }

  /** Creates an edited version of a message. An edited user message gets a new reply. */
  edit(message: Stored, parts: Part[], key: string): Promise<boolean> {
    return this.#write(async () => {
      const edited = await api.editMessage(message.id, parts, key)
      const reply = message.role === 'user' ? await api.createReply(this.id, edited.id, `${key} reply`) : edited
      await this.#moveTo(reply.id)
    })
  }

  continueReply(reply: Stored): Promise<boolean> {
    return this.#write(async () => {
      const continued = await api.continueReply(reply.id, newKey())
      if (continued.id !== reply.id) return this.#moveTo(continued.id)
      this.#replace(continued)
      if (this.rounds.has(continued.id)) return this.#loadRound(continued.id)
      this.#resumeTurn(continued.id)
    })
  }

  /** Approves or denies waiting tool calls. */
  async decide(reply: Stored, decisions: CallDecision[]): Promise<boolean> {
    return this.#try(async () => {
      await api.decideCalls(reply.id, decisions)
      await this.#loadRound(reply.id)
    })
  }

  fork(reply: Stored, tokens: number, instead: number | null): Promise<boolean> {
    return this.#write(async () => this.#moveTo((await api.forkReply(reply.id, tokens, instead, newKey())).id))
  }

  /** Chooses the better reply, whose branch continues; null: none is better. */
  choose(comparison: Comparison, reply: string | null): Promise<boolean> {
    return this.#write(async () => {
      const updated = await api.chooseReply(comparison.id, reply)
      this.comparisons = this.comparisons.map((one) => (one.id === updated.id ? updated : one))
      if (comparison.blind && !comparison.decided_at) notices.show(strings.compare.revealed(updated.replies.map((one) => one.name)))
      if (reply !== null) await this.#moveTo((await api.getNewestLeaf(this.id, reply)).id ?? reply)
    })
  }

  /** Moves the cursor to a message, even if messages follow it. */
  moveTo(message: string): Promise<boolean> {
    return this.#write(() => this.#moveTo(message))
  }

  /** Stops the running reply, or all replies of a comparison. */
  async stopAll(): Promise<void> {
    const running = [this, ...this.columns].flatMap((one) => one.running?.id ?? [])
    const comparedIds = this.comparison?.replies.map((one) => one.reply_id) ?? [] // including replies that are not loaded yet
    await Promise.all([...new Set([...running, ...comparedIds])].map((id) => this.#try(() => api.stopReply(id))))
  }

  async stop(reply: Stored): Promise<void> {
    await this.#try(() => api.stopReply(reply.id))
  }

  async answerNow(reply: Stored): Promise<void> {
    await this.#try(() => api.answerNow(reply.id))
  }

  /** Shows the newest leaf below a message. */
  async goTo(message: string): Promise<void> {
    await this.#write(async () => {
      const leaf = (await api.getNewestLeaf(this.id, message)).id ?? message
      if (await this.#loadPath(leaf)) await this.#moveCursor(leaf)
    })
  }

  undo(): Promise<boolean> {
    return this.#stepHistory(api.undo)
  }

  redo(): Promise<boolean> {
    return this.#stepHistory(api.redo)
  }

  /** Changes the conversation. Later messages wait for the change. */
  change(request: Parameters<typeof api.updateConversation>[1]): Promise<boolean> {
    const changing = this.#write(async () => {
      this.about = await api.updateConversation(this.id, request)
      void this.#loadGauge()
    })
    this.#changing = Promise.all([this.#changing, changing])
    return changing
  }

  // Implementation

  /** Sends a message. Returns null if the context is full and the user cancelled. */
  async #sendMessage(request: api.SendMessageRequest, key: string): Promise<Said | null> {
    try {
      return await api.sendMessage(this.id, request, key)
    } catch (error) {
      const isOverflow = error instanceof ApiError && error.name === 'context_overflow' && this.path.length > 0
      if (!isOverflow) throw error
      const { tokens, limit } = error.error.details as { tokens: number; limit: number }
      const choice = await new Promise<'once' | 'always' | null>((choose) => (this.overflow = { tokens, limit, choose }))
      this.overflow = null
      if (choice === null) return null
      const shorten = { overflow: 'shorten' }
      if (choice === 'always') this.about = await api.updateConversation(this.id, { parameters: { ...this.about?.parameters, ...shorten } })
      return api.sendMessage(this.id, { ...request, parameters: shorten }, key)
    }
  }

  /** Starts a comparison. Returns the id of the message that is replied to. */
  async #compare(request: Pick<api.CompareRequest, 'parent' | 'message'>, settings: CompareSettings, key: string): Promise<string> {
    const { columns, blind } = settings
    const created = await api.startComparison(this.id, { ...request, columns, blind }, key).catch(async (error: unknown) => {
      throw await this.#explainRefusal(error, request.message?.parts ?? [], settings)
    })
    this.comparisons = [...this.comparisons.filter((one) => one.id !== created.id), created]
    await this.#moveTo(created.parent_id)
    return created.parent_id
  }

  /** A message that a model of a comparison can't take: names the model, and offers to stop comparing. */
  async #explainRefusal(error: unknown, parts: readonly Part[], settings: CompareSettings): Promise<unknown> {
    if (!(error instanceof ApiError) || error.name !== 'unsupported_content') return error
    const names = [...new Set(settings.columns.map((one) => String(one.parameters?.['model'] ?? this.about?.parameters['model'] ?? '')))]
    const cards = await Promise.all(names.map((name) => api.getModel(name).catch(() => null)))
    const kinds = parts.flatMap((part) => (part.type === 'blob' ? [part.kind] : []))
    const [refusal] = cards.flatMap((card) => kinds.flatMap((kind) => (card && !card.media.includes(kind) ? [strings.compare.cannotRead(card.name, kind)] : [])))
    return new ErrorWithAction(refusal ?? error.message, { label: strings.compare.end, run: () => compareMode.stop(settings) })
  }

  #loadCursor(): Promise<Cursor> {
    return this.isColumn ? Promise.resolve(NO_CURSOR) : api.getCursor(this.id, tab.name)
  }

  async #handleMissing(): Promise<void> {
    const deleted = await api.listConversations({ limit: MAX_DELETED, deleted: true }).catch(() => [])
    this.isDeleted = deleted.some((one) => one.id === this.id)
    this.missing = true
  }

  #loadComparisons(): Promise<Comparison[]> {
    return this.isColumn ? Promise.resolve([]) : api.listComparisons(this.id)
  }

  #stepHistory(step: typeof api.undo): Promise<boolean> {
    return this.#write(async () => {
      const cursor = await step(this.id, tab.name)
      await this.#loadPath(cursor.message_id)
      this.cursor = cursor
    })
  }

  async #moveTo(leaf: string, path: Stored[] | null = null): Promise<void> {
    if (path) this.#pathNumber += 1
    if (path) this.#display(path)
    if (path || (await this.#loadPath(leaf))) await this.#moveCursor(leaf)
    this.tree = new Tree(await api.listNodes(this.id))
  }

  async #moveCursor(leaf: string | null): Promise<void> {
    if (!this.isColumn) this.cursor = await api.moveCursor(this.id, tab.name, leaf)
  }

  /** Shows a branch. Returns false if another one was chosen while it was loaded. */
  async #loadPath(leaf: string | null): Promise<boolean> {
    const number = ++this.#pathNumber
    const path = leaf === null ? [] : await api.getPath(leaf)
    if (number !== this.#pathNumber) return false
    if (!this.#closed) this.#display(path)
    return true
  }

  #display(path: Stored[]): void {
    const previous = new Map(this.path.map((one) => [one.id, one]))
    this.path = path.map((one) => reuseUnchanged(previous.get(one.id), one)) // unchanged messages are not rendered again
    for (const message of path) {
      if (message.reply?.status === 'running') this.#subscribe(message.id)
      else if (callsTools(message) && this.rounds.get(message.id)?.state !== 'done') void this.#loadRound(message.id)
    }
    if (!this.running) void this.#loadGauge()
  }

  #subscribe(id: string): void {
    if (this.#closed) return
    let turn = this.turns.get(id)
    if (!turn) {
      turn = new Turn((turn) => void this.#finishTurn(id, turn))
      this.turns.set(id, turn)
    }
    this.stream.subscribe(id, turn)
  }

  /** Only the response to the newest request is used: responses may arrive out of order. */
  async #loadRound(id: string): Promise<void> {
    if (!this.path.some((one) => one.id === id)) return
    const number = (this.#roundRequests.get(id) ?? 0) + 1
    this.#roundRequests.set(id, number)
    try {
      const round = await api.getToolRound(id)
      if (round && !this.#closed && this.#roundRequests.get(id) === number) this.rounds.set(id, round)
    } catch {
      this.#retryLater(() => void this.#loadRound(id))
    }
  }

  /** Subscribes to a turn again if its message is on this branch. */
  #resumeTurn(id: string): void {
    if (this.path.some((one) => one.id === id)) this.#subscribe(id)
  }

  async #finishTurn(id: string, turn: Turn): Promise<void> {
    notices.clear('running')
    try {
      const message = await api.getMessage(id)
      this.#replace(message)
      if (callsTools(message)) void this.#loadRound(id)
      // a restarted server resumes the turn shortly
      if (message.reply?.status === 'running' && turn.ended) this.#retryLater(() => this.#resumeTurn(id))
      else void this.#loadGauge()
    } catch {
      this.#retryLater(() => void this.#finishTurn(id, turn))
    }
  }

  #replace(message: Stored): void {
    this.path = this.path.map((one) => (one.id === message.id ? message : one))
  }

  async #loadGauge(): Promise<void> {
    const leaf = this.leaf
    try {
      const gauge = await api.getGauge(this.id, leaf)
      if (leaf === this.leaf) this.gauge = gauge
    } catch {
      // no model is loaded
    }
  }

  async #write(action: () => Promise<void>): Promise<boolean> {
    this.#writing += 1
    const polling = setInterval(() => void this.#findLoadingModel(), RETRY_MS)
    const done = await this.#try(action)
    clearInterval(polling)
    this.#writing -= 1
    if (this.loading) void model.refresh()
    this.loading = null
    this.#refreshIfStale()
    return done
  }

  async #findLoadingModel(): Promise<void> {
    const models = compareMode.get(this.id)?.columns.map((one) => one.parameters?.['model']) ?? []
    const names = new Set([this.about?.parameters['model'], ...models].map((name) => String(name ?? '')))
    const cards = await Promise.all([...names].map((name) => api.getModel(name).catch(() => null)))
    if (this.#writing > 0) this.loading = cards.find((card) => card?.state === 'loading') ?? null
  }

  async #try(action: () => Promise<void>): Promise<boolean> {
    try {
      await action()
      notices.clear('action', 'connection')
      return true
    } catch (error) {
      notices.showError(await this.#explainMissing(error))
      return false
    }
  }

  /** An action in this conversation after it was deleted: says so, and offers to restore it. */
  async #explainMissing(error: unknown): Promise<unknown> {
    if (!(error instanceof ApiError) || error.name !== 'not_found' || error.error.details?.['id'] !== this.id) return error
    await this.#handleMissing()
    if (!this.isDeleted) return error
    return new ErrorWithAction(strings.chat.deletedMeanwhile, { label: strings.restore, run: () => void conversations.restore(this.id) })
  }

  #retryLater(action: () => void): void {
    if (this.#closed) return
    const timer = setTimeout(() => {
      this.#timers.delete(timer)
      action()
    }, RETRY_MS)
    this.#timers.add(timer)
  }
}

/** Whether the server runs the tool calls of this reply. */
function callsTools(message: Stored): boolean {
  return message.reply?.settings.options['loop'] !== undefined && message.parts.some((part) => part.type === 'tool_call')
}

/** Returns the previous object if the message is unchanged. Only the status of a reply can change. */
function reuseUnchanged(previous: Stored | undefined, now: Stored): Stored {
  const is = previous?.reply?.status === now.reply?.status && previous?.reply?.ended_at === now.reply?.ended_at
  return previous && is ? previous : now
}
