// Written by web/wire_types.py from the server's OpenAPI document. Do not edit.

/** A tool server at a public address. A command is code that runs: only the operator of the server adds one. */
export interface AddToolServer {
  name: string
  url: string
  headers?: Record<string, string>
}

export interface Alternative {
  token_id: number
  text: string
  logprob: number | "-Infinity"
}

export interface AnswerDelta {
  type: "answer_delta"
  text: string
}

export interface Append {
  parent: string | null
  message: Message
  key?: string | null
}

/** A picture, sound or video by its digest: `GET /api/blobs/{digest}` returns it. */
export interface Blob {
  type: "blob"
  kind: "image" | "audio" | "video"
  media_type: string
  digest: string
  size: number
  name?: string
  width?: number
  height?: number
  seconds?: number
}

/** The fields of a part of type `blob`. */
export interface BlobPut {
  digest: string
  size: number
  kind: "image" | "audio" | "video"
  media_type: string
  name: string
  width: number
  height: number
  seconds: number
}

/** What the user decided about a call that waits. `arguments` are those to run it with, if they were edited. */
export interface CallDecision {
  position: number
  allowed: boolean
  arguments?: string | null
  remember?: Remember
  reason?: string
}

export type CallState = "new" | "waiting" | "approved" | "running" | "interrupted" | "done" | "denied"

/** Something changed in a conversation: clients that show it should read it again. */
export interface Change {
  conversation_id: string
  what: string
  message_id: string | null
}

/** What is given is set. The parameters are set as a whole. */
export interface ChangeConversation {
  title?: string | null
  system?: string | null
  parameters?: Record<string, unknown> | null
  tags?: (string)[] | null
  pinned?: boolean | null
}

export interface Changed {
  type: "change"
  change: Change
}

/** The preferred reply; null: no reply is better than the others. */
export interface ChooseReply {
  reply: string | null
}

export interface Client {
  client: string
}

/** The server shuts down: reconnect soon. */
export interface Closing {
  type: "closing"
}

/** One reply of a comparison: its parameters and its name, which may both be left out. */
export interface Column {
  parameters?: Record<string, unknown>
  name?: string
}

/** One message to several models or settings. Without a message, `parent` is replied to. */
export interface Compare {
  parent: string | null
  message?: Message | null
  columns: (Column)[]
  blind?: boolean
  key?: string | null
}

/** One column of a comparison; without a name while a blind choice is open. */
export interface ComparedReply {
  reply_id: string
  name: string
  model: string
  parameters: Record<string, unknown>
}

/** Replies to one message that are compared. `chosen_id` is null if no reply is better. */
export interface Comparison {
  id: string
  conversation_id: string
  parent_id: string
  blind: boolean
  replies: (ComparedReply)[]
  created_at: string
  decided_at: string | null
  chosen_id: string | null
}

export interface Constraint {
  grammar: Grammar
  text: string
}

export interface Continue {
  key?: string | null
}

export interface Conversation {
  id: string
  owner_id: string
  title: string
  title_given: boolean
  system: string
  parameters: Record<string, unknown>
  tags: (string)[]
  head_id: string | null
  created_at: string
  updated_at: string
  deleted_at: string | null
  pinned: boolean
}

/** Text whose tokens are counted; without a model, by the one in use. */
export interface CountTokens {
  text: string
  model?: string
}

export interface Create {
  title?: string
  system?: string
  parameters?: Record<string, unknown>
  tags?: (string)[]
  key?: string | null
}

/** The message at which a client is; null is before the first message. */
export interface Cursor {
  message_id: string | null
  can_undo: boolean
  can_redo: boolean
}

export interface DecideCalls {
  decisions: (CallDecision)[]
}

/** The system prompt and the parameters that a user's new conversations begin with. */
export interface Defaults {
  system: string
  parameters: Record<string, unknown>
}

export interface DeletePreset {
  name: string
}

/** A document as the text of a part. */
export interface Document {
  text: string
}

/** The block that a diffusion model denoises: a text for each token, null while it is masked. It has no number, and each replaces the one before. */
export interface DraftBlock {
  type: "draft_block"
  position: number
  texts: (string | null)[]
  confidence: (number)[]
}

export interface Edit {
  parts: (Text | Thinking | ToolCall | ToolResult | Blob | Media)[]
  key?: string | null
}

/** One event of one turn. `number` counts the numbered events up to here: reconnect with it. */
export interface Entry {
  number: number
  event: Waiting | Started | DraftBlock | Snapshot | PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice | Finished | Failed
}

export interface Error {
  message: string
  type: string
  param: string | null
  code: string | null
  name?: string | null
  details?: Record<string, unknown> | null
}

export interface ErrorBody {
  error: Error
}

/** The turn ended with an error; its text so far is kept. */
export interface Failed {
  type: "failed"
  error: string
  tail: (PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice)[]
}

export type Finish = "end" | "stop_string" | "length" | "stopped"

/** What the browser brought back. */
export interface FinishToolSignIn {
  state: string
  code: string
  issuer?: string | null
}

/** `tail` is text that was held back because it could have become a marker; remove it if the reply is continued. */
export interface Finished {
  type: "finished"
  finish: Finish
  usage: Usage
  stop: string | null
  tail: (PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice)[]
}

/** Many turns, each after a number, and whether to tell what changes. */
export interface Follow {
  turns?: (Followed)[]
  changes?: boolean
}

export interface Followed {
  turn: string
  after?: number
}

/** How many rules were removed. */
export interface Forgotten {
  forgotten: number
}

/** A sibling that begins with the reply's first `tokens`, then the token `instead`. */
export interface Fork {
  tokens: number
  instead?: number | null
  key?: string | null
}

/** What can be written. */
export type Format = "jsonl" | "branches" | "tree" | "markdown" | "sharegpt"

/** How full the context is: the tokens of the next turn's prompt, and the model's limit. */
export interface Gauge {
  used: number
  limit: number
  cached: number
}

export type Grammar = "json_schema" | "regex" | "lark"

/** A message that a search found. */
export interface Hit {
  conversation_id: string
  title: string
  message_id: string
  role: Role
  created_at: string
  snippet: string
  in_thought?: boolean
}

export interface ImportReport {
  conversations: (Conversation)[]
  skipped?: (SkippedConversation)[]
}

/** A message's id, or null where there is none. */
export interface Leaf {
  id: string | null
}

export interface Load {
  name: string
}

export interface MeasureContext {
  leaf: string | null
  parameters?: Record<string, unknown>
}

/** A picture, sound or video with its data. */
export interface Media {
  type: "image" | "audio" | "video"
  media_type: string
  data: string
  name?: string
  width?: number
  height?: number
  seconds?: number
}

export interface Message {
  role: Role
  parts: (Text | Thinking | ToolCall | ToolResult | Blob | Media)[]
}

/** The model in use or being loaded. Some fields are empty until it is loaded. */
export interface ModelCard {
  name: string
  state: ModelState
  progress: number | null
  note: string
  context_length: number
  device: string
  dtype: string
  reuse: string
  exactness?: string
  steps?: string
  fingerprint?: string
  lacks?: Record<string, string>
  block_length?: number | null
  defaults: Sampling
  thinks: boolean
  switches: (Switch)[]
  takes_tools: boolean
  media: (string)[]
  notices: (string)[]
}

export type ModelState = "none" | "loading" | "ready" | "failed" | "available"

export interface Move {
  client: string
  to: string | null
}

/** A link that was created: its record, and its address relative to the server's, which is returned only once. */
export interface NewShare {
  share: Share
  path: string
}

/** A message's place in the tree, without its content. */
export interface Node {
  id: string
  parent_id: string | null
  role: Role
  created_at: string
}

/** Information about the reply for its reader, in one sentence. */
export interface Notice {
  type: "notice"
  text: string
}

/** The first event in a stream of many turns. Earlier changes are not sent. */
export interface Opened {
  type: "opened"
}

export type Phase = "thinking" | "answer" | "tool_call" | "control" | "end"

/** From here on the model is thinking, answering or calling a tool. */
export interface PhaseOpened {
  type: "phase_opened"
  phase: Phase
  tokens?: number
}

/** A system prompt and parameters that a user saved under a name. */
export interface Preset {
  name: string
  system: string
  parameters: Record<string, unknown>
}

/** A reply as the model wrote it, markers and all. */
export interface Raw {
  text: string
}

/** A resource of a tool server by its URI, or a prompt by its name, with the prompt's arguments. */
export interface ReadToolResource {
  server: string
  name: string
  arguments?: Record<string, string>
}

/** This turn can't be read; the others go on. */
export interface Refused {
  type: "refused"
  turn: string
  error: Error
}

export type Remember = "once" | "tool" | "server"

export interface RemoveToolServer {
  name: string
}

export interface Reply {
  parent: string
  parameters?: Record<string, unknown>
  key?: string | null
}

export type Role = "system" | "user" | "assistant" | "tool"

/** A tool call that runs on the server. `edited`: the user's own arguments, if they changed them. */
export interface RoundCall {
  position: number
  call_id: string
  name: string
  arguments: string
  state: CallState
  edited: string | null
  result: string | null
  is_error: boolean
  media?: (Blob)[]
  started_at: string | null
  ended_at: string | null
}

export type RoundState = "open" | "stopped" | "failed" | "done"

export type Rule = "always" | "never"

/** A message and the reply that was started. */
export interface Said {
  message: Stored
  reply: Stored
}

export interface Sampling {
  temperature: number
  top_k: number
  top_p: number
  min_p: number
  typical_p?: number
  top_a?: number
  dynatemp_range?: number
  dynatemp_exponent?: number
  xtc_probability?: number
  xtc_threshold?: number
  dry_multiplier?: number
  dry_base?: number
  dry_allowed_length?: number
  dry_penalty_last_n?: number
  dry_sequence_breakers?: (string)[]
  repetition_penalty: number
  presence_penalty: number
  frequency_penalty: number
  end_penalty: number
  logit_bias: ([number, number])[]
  banned_ids: (number)[]
  banned_strings: (string)[]
  stop: (string)[]
  stop_ids: (number)[]
  min_tokens: number
  max_tokens: number | null
  thinking_budget: number | null
  seed: number
  logprobs: number
  constraint: Constraint | null
  spoken?: boolean
  steps?: number | null
  block_length?: number | null
  remasking?: "confidence" | "entropy"
}

/** The system prompt and the parameters that new conversations begin with. */
export interface SaveDefaults {
  system?: string
  parameters?: Record<string, unknown>
}

export interface SavePreset {
  name: string
  system?: string
  parameters?: Record<string, unknown>
}

export interface Say {
  parent: string | null
  message: Message
  parameters?: Record<string, unknown>
  key?: string | null
}

/** A tool of a server; `name` is the name that models use, `tool` its name at the server. */
export interface ServerTool {
  name: string
  server: string
  tool: string
  description: string
  parameters: Record<string, unknown>
  title: string
  read_only: boolean
}

/** Everything that determines a reply. */
export interface Settings {
  model: string
  sampling: Sampling
  tokenizer: string
  options: Record<string, unknown>
  tools: (Tool)[]
  choice: number
  fingerprints?: ([number, string])[]
  answer_at?: number | null
}

/** A link's record. The secret part of the link is shown once, when it is created. */
export interface Share {
  id: string
  conversation_id: string
  leaf_id: string
  thoughts: boolean
  tools: boolean
  created_at: string
  expires_at: string
}

/** A link to a read-only page of the branch that ends with the message `leaf`. */
export interface ShareBranch {
  leaf: string
  days?: number
  thoughts?: boolean
  tools?: boolean
}

/** A part of a file that was not imported, and the reason. */
export interface SkippedConversation {
  item: string
  reason: string
}

/** The message up to here, in place of events that can't be sent again. */
export interface Snapshot {
  type: "snapshot"
  message: Message
}

/** A tool server to sign in to. `redirect_uri` is where the browser comes back to: an address on the caller's */
export interface StartToolSignIn {
  server: string
  redirect_uri?: string
}

/** The prompt is in the cache, the first token comes next. */
export interface Started {
  type: "started"
  prompt_tokens: number
  cached_tokens: number
  notice?: string
  thinking_seconds?: number | null
}

/** Where a reply stands. Every one but RUNNING and DONE can be continued. */
export type Status = "running" | "done" | "stopped" | "length" | "interrupted" | "failed"

/** A message in its place in the tree. `reply` is null if no model generated the message here. */
export interface Stored {
  id: string
  conversation_id: string
  parent_id: string | null
  role: Role
  parts: (Text | Thinking | ToolCall | ToolResult | Blob)[]
  created_at: string
  edit_of: string | null
  reply: StoredReply | null
}

/** The settings and the outcome of a reply. It can be continued in every status but running and done. */
export interface StoredReply {
  status: Status
  settings: Settings
  usage: Usage | null
  timings: Record<string, number>
  error: string | null
  started_at: string | null
  ended_at: string | null
}

/** One variable of the model's chat template. */
export interface Switch {
  name: string
  kind: SwitchKind
  type: string
  values: (unknown)[]
  others: boolean
  default: unknown
  on: unknown
  off: unknown
  form: string
  changes: string
}

export type SwitchKind = "thinking" | "effort" | "budget" | "keeping" | "date" | "tools" | "other"

/** How often the replies of one name were compared and chosen, and how often blind. */
export interface TallyRow {
  name: string
  compared: number
  chosen: number
  blind_compared: number
  blind_chosen: number
}

export interface Text {
  type: "text"
  text: string
}

/** How many tokens a text has for a model. */
export interface TextTokens {
  tokens: number
}

/** A thought of the model; never part of its answer. */
export interface Thinking {
  type: "thinking"
  text: string
}

/** `tokens`: the thinking tokens of the reply up to here, as in `PhaseOpened`. */
export interface ThinkingDelta {
  type: "thinking_delta"
  text: string
  tokens?: number
}

/** One token of a reply as a person sees it. `logprob` is null for text that was not sampled. */
export interface Token {
  token_id: number
  text: string
  logprob: number | "-Infinity" | null
  alternatives: (Alternative)[]
}

/** A function offered to the model; `parameters` is a JSON schema. */
export interface Tool {
  name: string
  description: string
  parameters: Record<string, unknown>
}

/** `arguments` is the JSON text as the model wrote it; it may be cut off or wrong. */
export interface ToolCall {
  type: "tool_call"
  id: string
  name: string
  arguments: string
  in_thought: boolean
}

/** The next piece of the arguments' JSON text. */
export interface ToolCallDelta {
  type: "tool_call_delta"
  index: number
  arguments: string
}

export interface ToolCallOpened {
  type: "tool_call_opened"
  index: number
  id: string
  name: string
  in_thought: boolean
}

/** What a server has to be attached to a message: a resource, or the text of a prompt. */
export interface ToolResource {
  kind: "resource" | "prompt"
  name: string
  title?: string
  description?: string
  media_type?: string
  arguments?: (string)[]
}

export interface ToolResult {
  type: "tool_result"
  call_id: string
  content: string
  name: string
}

/** The tool calls of one reply that run on the server; `next_id` is the reply to their results. */
export interface ToolRound {
  reply_id: string
  conversation_id: string
  state: RoundState
  calls: (RoundCall)[]
  next_id: string | null
  error: string | null
  continued: boolean
}

/** A user's rule about a tool in a conversation, or about a server in all conversations. */
export interface ToolRule {
  name: string
  rule: Rule
  conversation_id: string
}

/** A tool server and its state. */
export interface ToolServer {
  name: string
  transport: string
  state: ToolServerState
  error: string
  tools: (ServerTool)[]
  notices: (string)[]
  is_own: boolean
  needs_sign_in?: boolean
}

export type ToolServerState = "idle" | "connecting" | "ready" | "failed"

/** The URL to open in a browser. */
export interface ToolSignIn {
  url: string
}

/** The transcript of an audio file. */
export interface Transcription {
  text: string
}

export interface TurnEvent {
  type: "turn"
  turn: string
  number: number
  event: Waiting | Started | DraftBlock | Snapshot | PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice | Finished | Failed
}

export interface Usage {
  prompt_tokens: number
  cached_tokens: number
  reply_tokens: number
  thinking_tokens: number
}

/** The turn is queued; 1 is next. */
export interface Waiting {
  type: "waiting"
  position: number
  seconds: number | null
  loading?: string
  progress?: number | null
}

export type Event = Waiting | Started | DraftBlock | Snapshot | PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice | Finished | Failed

export type ReadEvent = PhaseOpened | ThinkingDelta | AnswerDelta | ToolCallOpened | ToolCallDelta | Notice

export type Part = Text | Thinking | ToolCall | ToolResult | Blob | Media

export type StoredPart = Text | Thinking | ToolCall | ToolResult | Blob

export type StreamItem = Opened | TurnEvent | Changed | Refused | Closing

export const NUMBERS: Record<string, { whole: boolean; low: number; high: number; meaning: string }> = {
  "temperature": {
    "whole": false,
    "low": 0,
    "high": 5,
    "meaning": "0 takes the likeliest token, higher is more varied"
  },
  "top_k": {
    "whole": true,
    "low": 0,
    "high": 1000000,
    "meaning": "only the k likeliest tokens; 0 is off"
  },
  "top_p": {
    "whole": false,
    "low": 0,
    "high": 1,
    "meaning": "only the likeliest tokens that together reach this probability"
  },
  "min_p": {
    "whole": false,
    "low": 0,
    "high": 1,
    "meaning": "only tokens at least this likely relative to the likeliest"
  },
  "typical_p": {
    "whole": false,
    "low": 0,
    "high": 1,
    "meaning": "only tokens about as surprising as expected, up to this probability"
  },
  "top_a": {
    "whole": false,
    "low": 0,
    "high": 1,
    "meaning": "only tokens at least this times the square of the greatest probability"
  },
  "dynatemp_range": {
    "whole": false,
    "low": 0,
    "high": 5,
    "meaning": "the temperature varies by so much, with how sure the model is"
  },
  "dynatemp_exponent": {
    "whole": false,
    "low": 0,
    "high": 10,
    "meaning": "above 1 keeps the varying temperature low for longer"
  },
  "xtc_probability": {
    "whole": false,
    "low": 0,
    "high": 1,
    "meaning": "how often the likeliest tokens are excluded (XTC)"
  },
  "xtc_threshold": {
    "whole": false,
    "low": 0,
    "high": 1,
    "meaning": "which are excluded: all at least this likely, but for the last"
  },
  "dry_multiplier": {
    "whole": false,
    "low": 0,
    "high": 100,
    "meaning": "above 0 makes longer repetitions less likely (DRY)"
  },
  "dry_base": {
    "whole": false,
    "low": 1,
    "high": 10,
    "meaning": "how quickly DRY grows with the length of a repetition"
  },
  "dry_allowed_length": {
    "whole": true,
    "low": 1,
    "high": 1000,
    "meaning": "repetitions shorter than this are free of DRY"
  },
  "dry_penalty_last_n": {
    "whole": true,
    "low": -1,
    "high": 1000000,
    "meaning": "how many tokens DRY looks back; -1 is all, 0 is off"
  },
  "repetition_penalty": {
    "whole": false,
    "low": 0.01,
    "high": 10,
    "meaning": "above 1 makes tokens seen before less likely"
  },
  "presence_penalty": {
    "whole": false,
    "low": -2,
    "high": 2,
    "meaning": "above 0 makes tokens said in this reply less likely"
  },
  "frequency_penalty": {
    "whole": false,
    "low": -2,
    "high": 2,
    "meaning": "the same, by how often they were said"
  },
  "end_penalty": {
    "whole": false,
    "low": 0.01,
    "high": 100,
    "meaning": "above 1 makes the end of the reply less likely"
  },
  "min_tokens": {
    "whole": true,
    "low": 0,
    "high": 1000000,
    "meaning": "the reply doesn't end before so many tokens"
  },
  "max_tokens": {
    "whole": true,
    "low": 1,
    "high": 1000000,
    "meaning": "the reply is cut after so many tokens"
  },
  "thinking_budget": {
    "whole": true,
    "low": 0,
    "high": 1000000,
    "meaning": "a thought is closed after so many tokens"
  },
  "steps": {
    "whole": true,
    "low": 1,
    "high": 10000,
    "meaning": "diffusion models denoise a block in so many steps"
  },
  "block_length": {
    "whole": true,
    "low": 1,
    "high": 100000,
    "meaning": "diffusion models denoise so many tokens at once"
  },
  "seed": {
    "whole": true,
    "low": 0,
    "high": 9223372036854775807,
    "meaning": "the same seed gives the same reply"
  },
  "logprobs": {
    "whole": true,
    "low": 0,
    "high": 20,
    "meaning": "how many alternatives are reported for each token"
  }
}
