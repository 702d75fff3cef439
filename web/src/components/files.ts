// Text files in a message: each is a part of its own that begins with the file's name.

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
  const name = file.name.replace(/[\p{Cc}:]+/gu, ' ').slice(0, 200) || 'file'
  const kind = /^(image|audio|video)\//.exec(file.type)?.[1]
  if (kind) return `${name}: this model can’t take ${{ image: 'pictures', audio: 'sound', video: 'video' }[kind]}.`
  if (file.size > MOST) return `${name}: too large; text files up to 1 MB can be attached.`
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer())
    if (text.includes('\0')) return `${name}: not a text file.`
    return { name, text }
  } catch {
    return `${name}: not a text file in UTF-8.`
  }
}
