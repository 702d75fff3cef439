// Text files in a message: each is a part of its own that begins with the file's name.
import { strings } from '../strings'

const HEAD = /^File ([^\n]{1,200}):\n\n/
const MOST = 1_000_000

export interface TextFile {
  name: string
  text: string
}

export function written(file: TextFile): string {
  return `File ${file.name}:\n\n${file.text}`
}

export function fileOf(text: string): TextFile | null {
  const head = HEAD.exec(text)
  return head ? { name: head[1]!, text: text.slice(head[0].length) } : null
}

/** The file's text, or why it can't be taken. */
export async function taken(file: File): Promise<TextFile | string> {
  const name = file.name.replace(/[\p{Cc}:]+/gu, ' ').slice(0, 200) || strings.files.unnamed
  const kind = /^(image|audio|video)\//.exec(file.type)?.[1]
  if (kind) return strings.files.media(name, kind)
  if (file.size > MOST) return strings.files.tooLarge(name)
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer())
    if (text.includes('\0')) return strings.files.notText(name)
    return { name, text }
  } catch {
    return strings.files.notUtf8(name)
  }
}
