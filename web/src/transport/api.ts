// One function per endpoint of the server.
import { address, request, requestOnce, requestWithRetries, send } from './http'
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
  /** Whether the server transcribes speech. */
  transcribes: boolean
  /** Whether conversations may be shared by links. */
  shares: boolean
}

export type Values = Record<string, unknown>

const apiPath = (...parts: string[]): string => ['api', ...parts.map(encodeURIComponent)].join('/')

export const getSession = (): Promise<Session> => request(apiPath('session'))
export const signIn = (key: string): Promise<Session> => request(apiPath('session'), { method: 'POST', json: { key } })
export const signOut = (): Promise<void> => request(apiPath('session'), { method: 'DELETE' })

export const getModel = (name = ''): Promise<ModelCard> => request(`${apiPath('model')}?name=${encodeURIComponent(name)}`)
export const listModels = (): Promise<string[]> => request(apiPath('models'))
export const loadModel = (name: string): Promise<ModelCard> =>
  request(apiPath('model', 'load'), { method: 'POST', json: { name } })
export const unloadModel = (): Promise<ModelCard> => request(apiPath('model', 'unload'), { method: 'POST' })

export interface ListQuery {
  limit?: number
  before?: string
  tag?: string
  title?: string
  deleted?: boolean
  pinned?: boolean
}

export const listConversations = (query: ListQuery): Promise<Conversation[]> =>
  request(apiPath('conversations'), { query: { ...query } })
export const getConversation = (id: string): Promise<Conversation> => request(apiPath('conversations', id))
export const createConversation = (body: Create, key: string): Promise<Conversation> =>
  requestOnce(apiPath('conversations'), { method: 'POST', json: body, key })
export const updateConversation = (id: string, body: ChangeConversation): Promise<Conversation> =>
  request(apiPath('conversations', id), { method: 'PATCH', json: body })
export const deleteConversation = (id: string): Promise<void> => request(apiPath('conversations', id), { method: 'DELETE' })
export const restoreConversation = (id: string): Promise<Conversation> =>
  request(apiPath('conversations', id, 'undelete'), { method: 'POST' })
export const listTags = (): Promise<string[]> => request(apiPath('tags'))
export const search = (query: string): Promise<Hit[]> => request(apiPath('search'), { query: { query, limit: 30 } })

export const listPresets = (): Promise<Preset[]> => request(apiPath('presets'))
export const savePreset = (preset: Preset): Promise<Preset> => request(apiPath('presets'), { method: 'PUT', json: preset })
export const deletePreset = (name: string): Promise<void> =>
  request(apiPath('presets', 'delete'), { method: 'POST', json: { name } })

export const getDefaults = (): Promise<Defaults> => requestWithRetries(apiPath('defaults'), {})
export const saveDefaults = (body: Defaults): Promise<Defaults> => request(apiPath('defaults'), { method: 'PUT', json: body })

export const listShares = (id: string): Promise<Share[]> => request(apiPath('conversations', id, 'shares'))
export const createShare = (id: string, body: ShareBranch): Promise<NewShare> =>
  request(apiPath('conversations', id, 'shares'), { method: 'POST', json: body })
export const revokeShare = (id: string): Promise<void> => request(apiPath('shares', id), { method: 'DELETE' })

export const listNodes = (id: string): Promise<Node[]> => request(apiPath('conversations', id, 'nodes'))
/** The first words of every message, by message id. */
export const getPreviews = (id: string): Promise<Record<string, string>> => request(apiPath('conversations', id, 'previews'))
export const getNewestLeaf = (id: string, start: string): Promise<Leaf> =>
  request(apiPath('conversations', id, 'newest-leaf'), { query: { start } })
export const getMessage = (id: string): Promise<Stored> => request(apiPath('messages', id))
export const getPath = (leaf: string): Promise<Stored[]> => request(apiPath('messages', leaf, 'path'))
export const editMessage = (id: string, parts: Part[], key: string): Promise<Stored> =>
  requestOnce(apiPath('messages', id, 'edit'), { method: 'POST', json: { parts }, key })

export const getCursor = (id: string, client: string): Promise<Cursor> =>
  request(apiPath('conversations', id, 'cursor'), { query: { client } })
export const moveCursor = (id: string, client: string, to: string | null): Promise<Cursor> =>
  request(apiPath('conversations', id, 'cursor'), { method: 'PUT', json: { client, to } })
export const undo = (id: string, client: string): Promise<Cursor> =>
  request(apiPath('conversations', id, 'cursor', 'undo'), { method: 'POST', json: { client } })
export const redo = (id: string, client: string): Promise<Cursor> =>
  request(apiPath('conversations', id, 'cursor', 'redo'), { method: 'POST', json: { client } })

export interface SendMessageRequest {
  parent: string | null
  message: Message
  parameters?: Values
}

export const sendMessage = (id: string, body: SendMessageRequest, key: string): Promise<Said> =>
  requestOnce(apiPath('conversations', id, 'say'), { method: 'POST', json: body, key })
export const createReply = (id: string, parent: string, key: string): Promise<Stored> =>
  requestOnce(apiPath('conversations', id, 'replies'), { method: 'POST', json: { parent }, key })
export const continueReply = (id: string, key: string): Promise<Stored> =>
  requestOnce(apiPath('turns', id, 'continue'), { method: 'POST', key })
export const forkReply = (id: string, tokens: number, instead: number | null, key: string): Promise<Stored> =>
  requestOnce(apiPath('turns', id, 'fork'), { method: 'POST', json: { tokens, instead }, key })
export const stopReply = (id: string): Promise<void> => request(apiPath('turns', id, 'stop'), { method: 'POST' })
export const answerNow = (id: string): Promise<void> => request(apiPath('turns', id, 'answer-now'), { method: 'POST' })
export const getTokens = (id: string): Promise<Token[]> => request(apiPath('turns', id, 'tokens'))
export const getRawText = (id: string): Promise<Raw> => request(apiPath('turns', id, 'raw'))
export const getGauge = (id: string, leaf: string | null): Promise<Gauge> =>
  request(apiPath('conversations', id, 'gauge'), { method: 'POST', json: { leaf } })

export const countTokens = (text: string, model: string, signal: AbortSignal): Promise<TextTokens> =>
  request(apiPath('tokens'), { method: 'POST', json: { text, model }, signal })

export interface CompareRequest {
  parent: string | null
  message: Message | null
  columns: Column[]
  blind: boolean
}

export const startComparison = (id: string, body: CompareRequest, key: string): Promise<Comparison> =>
  requestOnce(apiPath('conversations', id, 'compare'), { method: 'POST', json: body, key })
export const listComparisons = (id: string): Promise<Comparison[]> => request(apiPath('conversations', id, 'comparisons'))
export const chooseReply = (id: string, reply: string | null): Promise<Comparison> =>
  request(apiPath('comparisons', id, 'choose'), { method: 'POST', json: { reply } })
export const getTally = (): Promise<TallyRow[]> => request(apiPath('comparisons', 'tally'))
export const preferencesUrl = (): string => address(apiPath('comparisons', 'preferences'))

/** `connect`: waits until each server is connected or has failed. */
export const listToolServers = (connect = true): Promise<ToolServer[]> => request(apiPath('tools'), { query: { connect } })
export const addToolServer = (name: string, url: string, headers: Record<string, string>): Promise<ToolServer> =>
  request(apiPath('tools'), { method: 'POST', json: { name, url, headers } })
export const removeToolServer = (name: string): Promise<void> =>
  request(apiPath('tools', 'remove'), { method: 'POST', json: { name } })
export const startToolSignIn = (server: string): Promise<ToolSignIn> =>
  request(apiPath('tools', 'sign-in'), { method: 'POST', json: { server } })
export const listToolResources = (server: string): Promise<ToolResource[]> =>
  request(apiPath('tools', 'resources'), { query: { server } })
export const readToolResource = async (body: ReadToolResource): Promise<Blob> =>
  (await send(apiPath('tools', 'resources', 'read'), { method: 'POST', json: body })).blob()
export const listToolRules = (): Promise<ToolRule[]> => request(apiPath('tools', 'rules'))
export const deleteToolRule = ({ name, conversation_id }: ToolRule): Promise<void> =>
  request(apiPath('tools', 'rules'), { method: 'DELETE', query: { name, conversation: conversation_id } })
export const getToolRound = (id: string): Promise<ToolRound | null> => request(apiPath('turns', id, 'tools'))
export const decideCalls = (id: string, decisions: CallDecision[]): Promise<ToolRound> =>
  request(apiPath('turns', id, 'tools'), { method: 'POST', json: { decisions } })

export const exportUrl = (id: string, form: Format, leaf: string | null): string =>
  address(apiPath('conversations', id, 'export'), { form, leaf })
export const importFile = (file: Blob): Promise<ImportReport> =>
  request(apiPath('import'), { method: 'POST', query: { report: true }, body: new Blob([file], { type: 'application/octet-stream' }) })
/** The URL of the spoken message. The server streams the sound while it is synthesized. */
export const speechUrl = (id: string): string => address(apiPath('messages', id, 'speech'))
export const listVoices = (): Promise<{ model: string; voices: string[] }> => request('v1/audio/voices')
const toOctets = (file: File): Blob => new Blob([file], { type: 'application/octet-stream' })
export const putBlob = (file: File, name: string): Promise<BlobPut> =>
  requestWithRetries(apiPath('blobs'), { method: 'POST', query: { name }, body: toOctets(file) })
/** The text of a PDF or text file, under its name. */
export const readDocument = (file: File, name: string): Promise<Document> =>
  requestWithRetries(apiPath('documents'), { method: 'POST', query: { name }, body: toOctets(file) })
/** Transcribes a recording. */
export const transcribe = (file: File): Promise<Transcription> =>
  requestWithRetries(apiPath('transcriptions'), { method: 'POST', query: { name: file.name }, body: toOctets(file) })
export const blobUrl = (digest: string, type: string): string => address(apiPath('blobs', digest), { type })
