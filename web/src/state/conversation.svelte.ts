// The conversation that is open: one branch of its tree, the turns that run in it, and what a person does with it.
//
// Every write names its parent, so two tabs that don't know of each other make two branches and never overwrite.
import { SvelteMap } from 'svelte/reactivity'
import { strings } from '../strings'
import * as api from '../transport/api'
import { ApiError, newKey } from '../transport/http'
import type { Stream } from '../transport/stream'
import type { CallDecision, Change, Comparison, Conversation as About, Cursor, Gauge, ModelCard, Part, Said, Stored, ToolRound } from '../transport/types'
import { compareMode } from './compare.svelte'
import { model } from './model.svelte'
import { notices } from './notices.svelte'
import { tabName } from './storage'
import { Tree } from './tree'
import { Turn } from './turn.svelte'

const NOWHERE: Cursor = { message_id: null, can_undo: false, can_redo: false }
const LOOK_AGAIN = 1000

export interface Pending {
  parts: Part[]
  key: string
}

/** What was said doesn't fit into the context any more: a person chooses, or goes back to the message. */
export interface Full {
  tokens: number
  limit: number
  choose: (choice: 'once' | 'always' | null) => void
}

export class Conversation {
  about: About | null = $state.raw(null)
  path: Stored[] = $state.raw([])
  tree: Tree = $state.raw(new Tree())
  cursor: Cursor = $state.raw(NOWHERE)
  gauge: Gauge | null = $state.raw(null)
  /** What was sent and not yet taken. */
  pending: Pending | null = $state.raw(null)
  full: Full | null = $state.raw(null)
  /** The model that the next reply waits for, while it is loaded. */
  loading: ModelCard | null = $state.raw(null)
  missing = $state(false)
  loaded = $state(false)
  readonly turns = new SvelteMap<string, Turn>()
  /** The tool calls that the server runs, by the reply that made them. */
  readonly rounds = new SvelteMap<string, ToolRound>()
  /** The comparisons of this conversation, the oldest first. */
  comparisons: Comparison[] = $state.raw([])
  /** The branches of the comparison that is shown. They hear what this one hears. */
  readonly columns = new Set<Conversation>()
  #client = tabName()
  #writing = 0
  #stale = false
  #changing: Promise<unknown> = Promise.resolve()
  #closed = false
  #looking: Promise<void> | null = null
  #roundRequests = new Map<string, number>()
  #timers = new Set<ReturnType<typeof setTimeout>>()

  constructor(
    readonly id: string,
    private readonly stream: Stream,
    /** Whether it is a column of a comparison: it has no cursor, and ends with its branch. */
    private readonly isColumn = false,
  ) {}

  /** The comparison that is shown: that of the message where we stand. */
  get comparison(): Comparison | null {
    const { leaf } = this
    return leaf === null || this.isColumn ? null : (this.comparisons.findLast((one) => one.parent_id === leaf) ?? null)
  }

  /** A column of a comparison: the branch of one reply. */
  column(reply: string): Conversation {
    const column = new Conversation(this.id, this.stream, true)
    this.columns.add(column)
    void column.open(reply)
    return column
  }

  drop(column: Conversation): void {
    this.columns.delete(column)
    column.close()
  }

  get leaf(): string | null {
    return this.path.at(-1)?.id ?? null
  }

  /** The reply that is being said on this branch. */
  get running(): Stored | null {
    return this.path.findLast((one) => this.isRunning(one)) ?? null
  }

  /** The reply whose tool calls run now. */
  get calling(): Stored | null {
    const runs = (id: string): boolean => {
      const round = this.rounds.get(id)
      return round?.state === 'open' && round.calls.some((call) => call.state === 'running' || call.state === 'approved')
    }
    return this.path.findLast((one) => runs(one.id)) ?? null
  }

  isRunning(message: Stored): boolean {
    const turn = this.turns.get(message.id)
    return turn ? !turn.ended : message.reply?.status === 'running'
  }

  /** Whether a reply was cut short, or is an edited one at the end: all others are whole. */
  canContinue(message: Stored): boolean {
    if (message.role !== 'assistant' || this.isRunning(message) || !model.isAvailable) return false
    if (!message.reply) return message.edit_of !== null && message.id === this.leaf
    const round = this.rounds.get(message.id)
    if (round) return round.state === 'stopped' || round.state === 'failed'
    if (message.reply.status === 'running') return false // it has just ended, and how is not known yet
    return message.reply.status !== 'done' && !this.fillsContext(message)
  }

  /** Whether a reply was cut off because the context was full, not at a limit that was set. */
  fillsContext({ reply }: Stored): boolean {
    if (reply?.status !== 'length' || !reply.usage || !model.card?.context_length) return false
    return reply.usage.prompt_tokens + reply.usage.reply_tokens >= model.card.context_length
  }

  async open(at: string | null = null): Promise<void> {
    try {
      const [about, cursor, nodes, comparisons] = await Promise.all([
        api.getConversation(this.id),
        this.#cursor(),
        api.listNodes(this.id),
        this.#compared(),
      ])
      if (this.#closed) return
      this.about = about
      this.comparisons = comparisons
      this.cursor = cursor
      this.tree = new Tree(nodes)
      const leaf = at && this.tree.has(at) ? (await api.getNewestLeaf(this.id, at)).id : cursor.message_id
      await this.#show(leaf)
      if (leaf !== cursor.message_id) await this.#stand(leaf)
      this.loaded = true
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) this.missing = true
      else if (!this.#closed) this.#later(() => void this.open(at))
    }
  }

  close(): void {
    this.#closed = true
    for (const timer of this.#timers) clearTimeout(timer)
    for (const [id, turn] of this.turns) this.stream.unsubscribe(id, turn)
  }

  /** The server can't be reached: until it can, nobody knows whether the model thinks. */
  disconnected(): void {
    for (const turn of this.turns.values()) turn.pause()
    for (const column of this.columns) column.disconnected()
  }

  /** Somebody did something here, perhaps we. */
  changed(change: Change): void {
    for (const column of this.columns) column.changed(change)
    if (change.what === 'turn' && change.message_id) this.#tookUp(change.message_id)
    if (change.what === 'tools' && change.message_id) void this.#loadRound(change.message_id)
    else this.look()
  }

  /** What the server knows now. A branch that grew behind where we stand is followed. */
  look(): void {
    if (!this.loaded || this.#closed) return
    for (const column of this.columns) column.look()
    if (this.#writing > 0 || this.#looking) {
      this.#stale = true
      return
    }
    this.#looking = this.#look()
      .catch((error: unknown) => {
        if (error instanceof ApiError && error.status === 404) this.missing = true
      })
      .finally(() => {
        this.#looking = null
        this.#settled()
      })
  }

  async #look(): Promise<void> {
    const [about, nodes, cursor, comparisons] = await Promise.all([
      api.getConversation(this.id),
      api.listNodes(this.id),
      this.#cursor(),
      this.#compared(),
    ])
    if (this.#closed || this.#writing > 0) {
      this.#stale = true
      return
    }
    for (const [id, round] of this.rounds) if (round.state === 'open') void this.#loadRound(id)
    const known = this.tree
    this.about = about
    this.cursor = cursor
    this.comparisons = comparisons
    this.tree = new Tree(nodes)
    if (this.comparison) return // its replies are shown side by side
    const leaf = this.leaf
    const grown = nodes.some((node) => !known.has(node.id) && (leaf === null || this.tree.path(node.id).includes(leaf)))
    if (!grown) return
    const to = leaf === null ? nodes.at(-1)!.id : (await api.getNewestLeaf(this.id, leaf)).id
    if (this.leaf !== leaf) return
    await this.#show(to)
    await this.#stand(to)
  }

  #settled(): void {
    if (this.#stale && this.#writing === 0 && !this.#closed) {
      this.#stale = false
      this.look()
    }
  }

  // what a person does

  async say(parts: Part[], key: string, role: 'user' | 'tool' = 'user'): Promise<boolean> {
    this.pending = { parts, key }
    let sent = false
    const done = await this.#write(async () => {
      await this.#changing
      if (compareMode.on && role === 'user') {
        await this.#compare({ parent: this.leaf, message: { role, parts } }, key)
        sent = true
        return
      }
      const said = await this.#said({ parent: this.leaf, message: { role, parts } }, key)
      if (!said) return
      sent = true
      this.pending = null
      await this.#moved(said.reply.id, [...this.path, said.message, said.reply])
    })
    this.pending = null
    return done && sent
  }

  /** Another reply beside this one. */
  retry(reply: Stored): Promise<boolean> {
    return this.#write(async () => {
      if (reply.parent_id === null) return
      await this.#changing
      if (compareMode.on) return this.#compare({ parent: reply.parent_id, message: null }, newKey())
      await this.#moved((await api.createReply(this.id, reply.parent_id, newKey())).id)
    })
  }

  /** A reply to a message that has none on this branch. */
  answer(message: Stored): Promise<boolean> {
    return this.#write(async () => this.#moved((await api.createReply(this.id, message.id, newKey())).id))
  }

  /** Another wording beside the old one; one's own is answered, a model's stands as it is. */
  edit(message: Stored, parts: Part[]): Promise<boolean> {
    return this.#write(async () => {
      const edited = await api.editMessage(message.id, parts, newKey())
      const reply = message.role === 'user' ? await api.createReply(this.id, edited.id, newKey()) : edited
      await this.#moved(reply.id)
    })
  }

  goOn(reply: Stored): Promise<boolean> {
    return this.#write(async () => {
      const going = await api.continueReply(reply.id, newKey())
      if (going.id !== reply.id) return this.#moved(going.id)
      this.#replace(going)
      if (this.rounds.has(going.id)) return this.#loadRound(going.id)
      this.#tookUp(going.id)
    })
  }

  /** Approves or denies tool calls that wait. */
  async decide(reply: Stored, decisions: CallDecision[]): Promise<boolean> {
    return this.#try(async () => {
      await api.decideCalls(reply.id, decisions)
      await this.#loadRound(reply.id)
    })
  }

  fork(reply: Stored, tokens: number, instead: number | null): Promise<boolean> {
    return this.#write(async () => this.#moved((await api.forkReply(reply.id, tokens, instead, newKey())).id))
  }

  /** The reply that is better, whose branch goes on; null: none is. */
  choose(comparison: Comparison, reply: string | null): Promise<boolean> {
    return this.#write(async () => {
      const decided = await api.chooseReply(comparison.id, reply)
      this.comparisons = this.comparisons.map((one) => (one.id === decided.id ? decided : one))
      if (comparison.blind && !comparison.decided_at) notices.tell(strings.compare.revealed(decided.replies.map((one) => one.name)))
      if (reply !== null) await this.#moved((await api.getNewestLeaf(this.id, reply)).id ?? reply)
    })
  }

  /** Back to a message, whatever follows it. */
  stand(message: string): Promise<boolean> {
    return this.#write(() => this.#moved(message))
  }

  /** Stops the reply that runs, or all that are compared. */
  async stopAll(): Promise<void> {
    const running = [this, ...this.columns].flatMap((one) => one.running?.id ?? [])
    const compared = this.comparison?.replies.map((one) => one.reply_id) ?? [] // also those that are not shown yet
    await Promise.all([...new Set([...running, ...compared])].map((id) => this.#try(() => api.stopReply(id))))
  }

  async stop(reply: Stored): Promise<void> {
    await this.#try(() => api.stopReply(reply.id))
  }

  async answerNow(reply: Stored): Promise<void> {
    await this.#try(() => api.answerNow(reply.id))
  }

  /** To the newest end of the branch on which this message is. */
  async goTo(message: string): Promise<void> {
    await this.#write(async () => {
      const leaf = (await api.getNewestLeaf(this.id, message)).id ?? message
      await this.#show(leaf)
      await this.#stand(leaf)
    })
  }

  undo(): Promise<boolean> {
    return this.#back(api.undo)
  }

  redo(): Promise<boolean> {
    return this.#back(api.redo)
  }

  /** What is said after this is said with it. */
  change(asked: Parameters<typeof api.updateConversation>[1]): Promise<boolean> {
    const changing = this.#write(async () => {
      this.about = await api.updateConversation(this.id, asked)
      void this.#measure()
    })
    this.#changing = Promise.all([this.#changing, changing])
    return changing
  }

  // how it comes about

  /** Null where the context is full and the person went back to the message. */
  async #said(asked: api.SendMessageRequest, key: string): Promise<Said | null> {
    try {
      return await api.sendMessage(this.id, asked, key)
    } catch (error) {
      const full = error instanceof ApiError && error.name === 'context_overflow' && this.path.length > 0
      if (!full) throw error
      const { tokens, limit } = error.error.details as { tokens: number; limit: number }
      const choice = await new Promise<'once' | 'always' | null>((choose) => (this.full = { tokens, limit, choose }))
      this.full = null
      if (choice === null) return null
      const shorten = { overflow: 'shorten' }
      if (choice === 'always') this.about = await api.updateConversation(this.id, { parameters: { ...this.about?.parameters, ...shorten } })
      return api.sendMessage(this.id, { ...asked, parameters: shorten }, key)
    }
  }

  async #compare(asked: Pick<api.CompareRequest, 'parent' | 'message'>, key: string): Promise<void> {
    const { columns, blind } = compareMode
    const made = await api.startComparison(this.id, { ...asked, columns, blind }, key)
    this.comparisons = [...this.comparisons.filter((one) => one.id !== made.id), made]
    await this.#moved(made.parent_id)
  }

  #cursor(): Promise<Cursor> {
    return this.isColumn ? Promise.resolve(NOWHERE) : api.getCursor(this.id, this.#client)
  }

  #compared(): Promise<Comparison[]> {
    return this.isColumn ? Promise.resolve([]) : api.listComparisons(this.id)
  }

  #back(way: typeof api.undo): Promise<boolean> {
    return this.#write(async () => {
      const cursor = await way(this.id, this.#client)
      await this.#show(cursor.message_id)
      this.cursor = cursor
    })
  }

  async #moved(leaf: string, path: Stored[] | null = null): Promise<void> {
    if (path) this.#display(path)
    else await this.#show(leaf)
    await this.#stand(leaf)
    this.tree = new Tree(await api.listNodes(this.id))
  }

  async #stand(leaf: string | null): Promise<void> {
    if (!this.isColumn) this.cursor = await api.moveCursor(this.id, this.#client, leaf)
  }

  async #show(leaf: string | null): Promise<void> {
    const path = leaf === null ? [] : await api.getPath(leaf)
    if (!this.#closed) this.#display(path)
  }

  #display(path: Stored[]): void {
    const known = new Map(this.path.map((one) => [one.id, one]))
    this.path = path.map((one) => same(known.get(one.id), one)) // what did not change is not drawn again
    for (const message of path) {
      if (message.reply?.status === 'running') this.#follow(message.id)
      else if (callsTools(message) && this.rounds.get(message.id)?.state !== 'done') void this.#loadRound(message.id)
    }
    if (!this.running) void this.#measure()
  }

  #follow(id: string): void {
    if (this.#closed) return
    let turn = this.turns.get(id)
    if (!turn) {
      turn = new Turn((turn) => void this.#over(id, turn))
      this.turns.set(id, turn)
    }
    this.stream.subscribe(id, turn)
  }

  /** The newest request counts: an earlier one may be answered later, with what was true before. */
  async #loadRound(id: string): Promise<void> {
    if (!this.path.some((one) => one.id === id)) return
    const number = (this.#roundRequests.get(id) ?? 0) + 1
    this.#roundRequests.set(id, number)
    try {
      const round = await api.getToolRound(id)
      if (round && !this.#closed && this.#roundRequests.get(id) === number) this.rounds.set(id, round)
    } catch {
      this.#later(() => void this.#loadRound(id))
    }
  }

  /** The turn goes on, where we show it. */
  #tookUp(id: string): void {
    if (this.path.some((one) => one.id === id)) this.#follow(id)
  }

  async #over(id: string, turn: Turn): Promise<void> {
    notices.settle('running')
    try {
      const message = await api.getMessage(id)
      this.#replace(message)
      if (callsTools(message)) void this.#loadRound(id)
      // a server that was started again takes the turn up in a moment
      if (message.reply?.status === 'running' && turn.ended) this.#later(() => this.#tookUp(id))
      else void this.#measure()
    } catch {
      this.#later(() => void this.#over(id, turn))
    }
  }

  #replace(message: Stored): void {
    this.path = this.path.map((one) => (one.id === message.id ? message : one))
  }

  async #measure(): Promise<void> {
    const leaf = this.leaf
    try {
      const gauge = await api.getGauge(this.id, leaf)
      if (leaf === this.leaf) this.gauge = gauge
    } catch {
      // no model is loaded
    }
  }

  async #write(act: () => Promise<void>): Promise<boolean> {
    this.#writing += 1
    const looking = setInterval(() => void this.#lookForLoading(), LOOK_AGAIN)
    const done = await this.#try(act)
    clearInterval(looking)
    this.#writing -= 1
    if (this.loading) void model.look()
    this.loading = null
    this.#settled()
    return done
  }

  async #lookForLoading(): Promise<void> {
    const compared = compareMode.on ? compareMode.columns.map((one) => one.parameters?.['model']) : []
    const names = new Set([this.about?.parameters['model'], ...compared].map((name) => String(name ?? '')))
    const cards = await Promise.all([...names].map((name) => api.getModel(name).catch(() => null)))
    if (this.#writing > 0) this.loading = cards.find((card) => card?.state === 'loading') ?? null
  }

  async #try(act: () => Promise<void>): Promise<boolean> {
    try {
      await act()
      notices.settle('action', 'connection')
      return true
    } catch (error) {
      notices.fail(error)
      return false
    }
  }

  #later(act: () => void): void {
    if (this.#closed) return
    const timer = setTimeout(() => {
      this.#timers.delete(timer)
      act()
    }, LOOK_AGAIN)
    this.#timers.add(timer)
  }
}

/** Whether it is a reply whose tool calls the server runs. */
function callsTools(message: Stored): boolean {
  return message.reply?.settings.options['loop'] !== undefined && message.parts.some((part) => part.type === 'tool_call')
}

/** The one that is known, where it says the same: only how a reply stands ever changes. */
function same(known: Stored | undefined, now: Stored): Stored {
  const is = known?.reply?.status === now.reply?.status && known?.reply?.ended_at === now.reply?.ended_at
  return known && is ? known : now
}
