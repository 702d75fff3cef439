// What the page asks of the server, one function for each.
import { address, once, request, send } from './http'
import type {
  BlobPut,
  CallDecision,
  ChangeConversation,
  Column,
  Comparison,
  Conversation,
  Create,
  Cursor,
  Defaults,
  Document,
  Format,
  Gauge,
  Hit,
  ImportReport,
  Leaf,
  Message,
  ModelCard,
  NewShare,
  Node,
  Part,
  Preset,
  Raw,
  ReadToolResource,
  Said,
  Share,
  ShareBranch,
  Stored,
  TallyRow,
  TextTokens,
  Token,
  ToolResource,
  ToolRound,
  ToolRule,
  ToolServer,
  ToolSignIn,
  Transcription,
} from './types'

export interface Session {
  needs_key: boolean
  signed_in: boolean
  name: string
  admin: boolean
  /** Whether the server can write down speech. */
  transcribes: boolean
  /** Whether conversations may be shared by links. */
  shares: boolean
}

export type Values = Record<string, unknown>

const at = (...parts: string[]): string => ['api', ...parts.map(encodeURIComponent)].join('/')

export const session = (): Promise<Session> => request(at('session'))
export const signIn = (key: string): Promise<Session> => request(at('session'), { method: 'POST', json: { key } })
export const signOut = (): Promise<void> => request(at('session'), { method: 'DELETE' })

export const model = (name = ''): Promise<ModelCard> => request(`${at('model')}?name=${encodeURIComponent(name)}`)
export const models = (): Promise<string[]> => request(at('models'))
export const load = (name: string): Promise<ModelCard> =>
  request(at('model', 'load'), { method: 'POST', json: { name } })
export const unload = (): Promise<ModelCard> => request(at('model', 'unload'), { method: 'POST' })

export interface Listing {
  limit?: number
  before?: string
  tag?: string
  title?: string
  deleted?: boolean
  pinned?: boolean
}

export const conversations = (asked: Listing): Promise<Conversation[]> =>
  request(at('conversations'), { query: { ...asked } })
export const conversation = (id: string): Promise<Conversation> => request(at('conversations', id))
export const create = (asked: Create, key: string): Promise<Conversation> =>
  once(at('conversations'), { method: 'POST', json: asked, key })
export const change = (id: string, asked: ChangeConversation): Promise<Conversation> =>
  request(at('conversations', id), { method: 'PATCH', json: asked })
export const remove = (id: string): Promise<void> => request(at('conversations', id), { method: 'DELETE' })
export const restore = (id: string): Promise<Conversation> =>
  request(at('conversations', id, 'undelete'), { method: 'POST' })
export const tags = (): Promise<string[]> => request(at('tags'))
export const search = (query: string): Promise<Hit[]> => request(at('search'), { query: { query, limit: 30 } })

export const presets = (): Promise<Preset[]> => request(at('presets'))
export const savePreset = (preset: Preset): Promise<Preset> => request(at('presets'), { method: 'PUT', json: preset })
export const deletePreset = (name: string): Promise<void> =>
  request(at('presets', 'delete'), { method: 'POST', json: { name } })

export const defaults = (): Promise<Defaults> => request(at('defaults'))
export const saveDefaults = (asked: Defaults): Promise<Defaults> => request(at('defaults'), { method: 'PUT', json: asked })

export const shares = (id: string): Promise<Share[]> => request(at('conversations', id, 'shares'))
export const share = (id: string, asked: ShareBranch): Promise<NewShare> =>
  request(at('conversations', id, 'shares'), { method: 'POST', json: asked })
export const revokeShare = (id: string): Promise<void> => request(at('shares', id), { method: 'DELETE' })

export const nodes = (id: string): Promise<Node[]> => request(at('conversations', id, 'nodes'))
/** The beginning of every message, by its id. */
export const previews = (id: string): Promise<Record<string, string>> => request(at('conversations', id, 'previews'))
export const newestLeaf = (id: string, start: string): Promise<Leaf> =>
  request(at('conversations', id, 'newest-leaf'), { query: { start } })
export const message = (id: string): Promise<Stored> => request(at('messages', id))
export const path = (leaf: string): Promise<Stored[]> => request(at('messages', leaf, 'path'))
export const edit = (id: string, parts: Part[], key: string): Promise<Stored> =>
  once(at('messages', id, 'edit'), { method: 'POST', json: { parts }, key })

export const cursor = (id: string, client: string): Promise<Cursor> =>
  request(at('conversations', id, 'cursor'), { query: { client } })
export const move = (id: string, client: string, to: string | null): Promise<Cursor> =>
  request(at('conversations', id, 'cursor'), { method: 'PUT', json: { client, to } })
export const undo = (id: string, client: string): Promise<Cursor> =>
  request(at('conversations', id, 'cursor', 'undo'), { method: 'POST', json: { client } })
export const redo = (id: string, client: string): Promise<Cursor> =>
  request(at('conversations', id, 'cursor', 'redo'), { method: 'POST', json: { client } })

export interface Saying {
  parent: string | null
  message: Message
  parameters?: Values
}

export const say = (id: string, asked: Saying, key: string): Promise<Said> =>
  once(at('conversations', id, 'say'), { method: 'POST', json: asked, key })
export const reply = (id: string, parent: string, key: string): Promise<Stored> =>
  once(at('conversations', id, 'replies'), { method: 'POST', json: { parent }, key })
export const goOn = (id: string, key: string): Promise<Stored> =>
  once(at('turns', id, 'continue'), { method: 'POST', key })
export const fork = (id: string, tokens: number, instead: number | null, key: string): Promise<Stored> =>
  once(at('turns', id, 'fork'), { method: 'POST', json: { tokens, instead }, key })
export const stop = (id: string): Promise<void> => request(at('turns', id, 'stop'), { method: 'POST' })
export const answerNow = (id: string): Promise<void> => request(at('turns', id, 'answer-now'), { method: 'POST' })
export const tokens = (id: string): Promise<Token[]> => request(at('turns', id, 'tokens'))
export const raw = (id: string): Promise<Raw> => request(at('turns', id, 'raw'))
export const gauge = (id: string, leaf: string | null): Promise<Gauge> =>
  request(at('conversations', id, 'gauge'), { method: 'POST', json: { leaf } })

export const countTokens = (text: string, model: string, signal: AbortSignal): Promise<TextTokens> =>
  request(at('tokens'), { method: 'POST', json: { text, model }, signal })

export interface Comparing {
  parent: string | null
  message: Message | null
  columns: Column[]
  blind: boolean
}

export const compare = (id: string, asked: Comparing, key: string): Promise<Comparison> =>
  once(at('conversations', id, 'compare'), { method: 'POST', json: asked, key })
export const comparisons = (id: string): Promise<Comparison[]> => request(at('conversations', id, 'comparisons'))
export const choose = (id: string, reply: string | null): Promise<Comparison> =>
  request(at('comparisons', id, 'choose'), { method: 'POST', json: { reply } })
export const tally = (): Promise<TallyRow[]> => request(at('comparisons', 'tally'))
export const preferences = (): string => address(at('comparisons', 'preferences'))

/** `connect`: waits until they are connected, or have failed. */
export const toolServers = (connect = true): Promise<ToolServer[]> => request(at('tools'), { query: { connect } })
export const addToolServer = (name: string, url: string, headers: Record<string, string>): Promise<ToolServer> =>
  request(at('tools'), { method: 'POST', json: { name, url, headers } })
export const removeToolServer = (name: string): Promise<void> =>
  request(at('tools', 'remove'), { method: 'POST', json: { name } })
export const startToolSignIn = (server: string): Promise<ToolSignIn> =>
  request(at('tools', 'sign-in'), { method: 'POST', json: { server } })
export const toolResources = (server: string): Promise<ToolResource[]> =>
  request(at('tools', 'resources'), { query: { server } })
export const readToolResource = async (asked: ReadToolResource): Promise<Blob> =>
  (await send(at('tools', 'resources', 'read'), { method: 'POST', json: asked })).blob()
export const toolRules = (): Promise<ToolRule[]> => request(at('tools', 'rules'))
export const forgetToolRule = ({ name, conversation_id }: ToolRule): Promise<void> =>
  request(at('tools', 'rules'), { method: 'DELETE', query: { name, conversation: conversation_id } })
export const toolRound = (id: string): Promise<ToolRound | null> => request(at('turns', id, 'tools'))
export const decideCalls = (id: string, decisions: CallDecision[]): Promise<ToolRound> =>
  request(at('turns', id, 'tools'), { method: 'POST', json: { decisions } })

export const exported = (id: string, form: Format, leaf: string | null): string =>
  address(at('conversations', id, 'export'), { form, leaf })
export const takeIn = (file: Blob): Promise<ImportReport> =>
  request(at('import'), { method: 'POST', query: { report: true }, body: new Blob([file], { type: 'application/octet-stream' }) })
/** Sound; it comes while it is made. */
export const speech = (id: string): string => address(at('messages', id, 'speech'))
export const voices = (): Promise<{ model: string; voices: string[] }> => request('v1/audio/voices')
const octets = (file: File): Blob => new Blob([file], { type: 'application/octet-stream' })
export const putBlob = (file: File, name: string): Promise<BlobPut> =>
  request(at('blobs'), { method: 'POST', query: { name }, body: octets(file) })
/** The text of a PDF or text file, under its name. */
export const readDocument = (file: File, name: string): Promise<Document> =>
  request(at('documents'), { method: 'POST', query: { name }, body: octets(file) })
/** The words of a recording. */
export const transcribe = (file: File): Promise<Transcription> =>
  request(at('transcriptions'), { method: 'POST', query: { name: file.name }, body: octets(file) })
export const blob = (digest: string, type: string): string => address(at('blobs', digest), { type })
