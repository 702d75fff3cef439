// The attachments of a message. A text file, a long paste or a document (its text is extracted by the server) becomes a text part
// that starts with the file name; media become parts of their own.
import { type FileKind, strings } from '../strings'
import * as api from '../transport/api'
import type { Blob as BlobPart, Part } from '../transport/types'

const FILE_HEADER = /^\n*File ([^\n]{1,200}):\n\n/
const MAX_SIZE = 1_000_000
const DOCUMENT = /\.(pdf|docx|html?)$/i
const LONG_PASTE_CHARS = 4000 // a pasted text of this length is attached as a file
const LONG_PASTE_LINES = 80

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

export function formatTextFile(file: TextFile): string {
  return `\n\nFile ${file.name}:\n\n${file.text}`
}

export function parseTextFile(text: string): TextFile | null {
  const header = FILE_HEADER.exec(text)
  return header ? { name: header[1]!, text: text.slice(header[0].length) } : null
}

export function toPart(file: Attachment): Part {
  return 'blob' in file ? file.blob : { type: 'text', text: formatTextFile(file) }
}

/** Whether pasted files are only a picture of text: cells or paragraphs of an office program. Copied pictures and files have no such text. */
export function isRichText(input: DataTransfer): boolean {
  const isPicture = [...input.files].every((file) => file.type.startsWith('image/'))
  return isPicture && input.types.includes('text/html') && input.getData('text/plain').trim() !== ''
}

export function isLongPaste(text: string): boolean {
  return text.length >= LONG_PASTE_CHARS || text.split('\n', LONG_PASTE_LINES + 1).length > LONG_PASTE_LINES
}

/** Creates a file from a pasted text, or returns an error message. */
export function createPastedFile(text: string, others: readonly Attachment[]): TextFile | string {
  const number = others.filter((one) => 'pasted' in one && one.pasted).length + 1
  const name = strings.files.pasted(number)
  return text.length > MAX_SIZE ? strings.files.tooLarge(name) : { name, text, pasted: true }
}

/** Reads or uploads a file. Returns the attachment or an error message. `accepted`: the media that the model accepts, if known. */
export async function readAttachment(file: File, accepted?: readonly string[]): Promise<Attachment | string> {
  const name = file.name.replace(/[\p{Cc}:]+/gu, ' ').slice(0, 200) || strings.files.unnamed
  const kind = /^(image|audio|video)\//.exec(file.type)?.[1] as FileKind | undefined
  try {
    if (kind && accepted && !accepted.includes(kind)) return strings.files.media(name, kind)
    if (kind) return await uploadMedia(file, name)
    if (DOCUMENT.test(name) || file.type === 'application/pdf') return await extractText(file, name)
  } catch (error) {
    return error instanceof Error ? error.message : String(error)
  }
  if (file.size > MAX_SIZE) return strings.files.tooLarge(name)
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer())
    if (text.includes('\0')) return strings.files.notText(name)
    return { name, text }
  } catch {
    return strings.files.notUtf8(name)
  }
}

async function uploadMedia(file: File, name: string): Promise<MediaFile> {
  return { name, blob: { type: 'blob', ...(await api.putBlob(file, name)) } }
}

async function extractText(file: File, name: string): Promise<TextFile> {
  const { text } = await api.readDocument(file, name)
  return { name, text: parseTextFile(text)?.text.trimEnd() ?? text }
}
