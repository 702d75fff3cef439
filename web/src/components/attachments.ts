// Attachments of a message (long pastes become one, too): a text file or a document (read by the server) is a part of text that begins with its name, media are parts of their own.
import { type FileKind, strings } from '../strings'
import * as api from '../transport/api'
import type { Blob as BlobPart, Part } from '../transport/types'

const HEAD = /^\n*File ([^\n]{1,200}):\n\n/
const MOST = 1_000_000
const DOCUMENT = /\.(pdf|docx|html?)$/i
const LONG_PASTE = 4000 // characters from which on a pasted text is attached
const MANY_LINES = 80

export interface TextFile {
  name: string
  text: string
  /** Whether it was pasted into the message. */
  pasted?: boolean
}

export interface MediaFile {
  name: string
  blob: BlobPart
}

export type Attachment = TextFile | MediaFile

export function written(file: TextFile): string {
  return `\n\nFile ${file.name}:\n\n${file.text}`
}

export function fileOf(text: string): TextFile | null {
  const head = HEAD.exec(text)
  return head ? { name: head[1]!, text: text.slice(head[0].length) } : null
}

export function partOf(file: Attachment): Part {
  return 'blob' in file ? file.blob : { type: 'text', text: written(file) }
}

export function isLongPaste(text: string): boolean {
  return text.length >= LONG_PASTE || text.split('\n', MANY_LINES + 1).length > MANY_LINES
}

/** A pasted text as a file beside these, or why it can't be one. */
export function pasted(text: string, others: readonly Attachment[]): TextFile | string {
  const number = others.filter((one) => 'pasted' in one && one.pasted).length + 1
  const name = strings.files.pasted(number)
  return text.length > MOST ? strings.files.tooLarge(name) : { name, text, pasted: true }
}

/** The file as it is attached, or why it can't be. `accepted`: the media that the model accepts, if that is known. */
export async function taken(file: File, accepted?: readonly string[]): Promise<Attachment | string> {
  const name = file.name.replace(/[\p{Cc}:]+/gu, ' ').slice(0, 200) || strings.files.unnamed
  const kind = /^(image|audio|video)\//.exec(file.type)?.[1] as FileKind | undefined
  try {
    if (kind && accepted && !accepted.includes(kind)) return strings.files.media(name, kind)
    if (kind) return await uploaded(file, name)
    if (DOCUMENT.test(name) || file.type === 'application/pdf') return await document(file, name)
  } catch (error) {
    return error instanceof Error ? error.message : String(error)
  }
  if (file.size > MOST) return strings.files.tooLarge(name)
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer())
    if (text.includes('\0')) return strings.files.notText(name)
    return { name, text }
  } catch {
    return strings.files.notUtf8(name)
  }
}

async function uploaded(file: File, name: string): Promise<MediaFile> {
  return { name, blob: { type: 'blob', ...(await api.putBlob(file, name)) } }
}

async function document(file: File, name: string): Promise<TextFile> {
  const { text } = await api.readDocument(file, name)
  return { name, text: fileOf(text)?.text.trimEnd() ?? text }
}
