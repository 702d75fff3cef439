// Speech that the browser itself writes down. Only where it does so on this device: what is said leaves it nowhere.
import { strings } from '../strings'
import { reason } from './recording'

interface Recognised extends Event {
  results: ArrayLike<ArrayLike<{ transcript: string }>>
}

interface Recognition {
  lang: string
  continuous: boolean
  interimResults: boolean
  processLocally: boolean
  onresult: (event: Recognised) => void
  onerror: (event: Event & { error: string }) => void
  onend: () => void
  start: () => void
  stop: () => void
  abort: () => void
}

interface Recogniser {
  new (): Recognition
  available?: (options: { langs: string[]; processLocally: boolean }) => Promise<string>
  prototype: Recognition
}

const recogniser = (): Recogniser | undefined => (window as { SpeechRecognition?: Recogniser }).SpeechRecognition

/** Whether the browser has what it needs for the reader's language on this device. It downloads nothing. */
export async function canDictate(): Promise<boolean> {
  const found = recogniser()
  if (!found?.available || !('processLocally' in found.prototype)) return false
  try {
    return (await found.available({ langs: [navigator.language], processLocally: true })) === 'available'
  } catch {
    return false
  }
}

/** One dictation, from the moment it is made. */
export class Dictation {
  readonly #recognition: Recognition
  #words = ''
  #ended: () => void = () => undefined
  readonly #end = new Promise<void>((resolve) => (this.#ended = resolve))

  /** `heard`: called with all words so far. `failed`: why it can't go on. */
  constructor(heard: (words: string) => void, failed: (why: string) => void) {
    const recognition = (this.#recognition = new (recogniser()!)())
    recognition.lang = navigator.language
    recognition.continuous = true
    recognition.interimResults = true
    recognition.processLocally = true
    recognition.onresult = ({ results }) => {
      this.#words = Array.from(results, (one) => one[0]?.transcript.trim() ?? '').join(' ')
      heard(this.#words)
    }
    recognition.onerror = ({ error }) => {
      if (error === 'not-allowed' || error === 'audio-capture') failed(reason(new DOMException('', error === 'not-allowed' ? 'NotAllowedError' : 'NotFoundError'), 'microphone'))
      else if (error !== 'aborted' && error !== 'no-speech') failed(strings.recorder.broken('microphone'))
    }
    recognition.onend = () => this.#ended()
    recognition.start()
  }

  /** Ends it, and returns what was said. */
  async end(): Promise<string> {
    this.#recognition.stop()
    await this.#end
    return this.#words
  }

  cancel(): void {
    this.#recognition.abort()
  }
}
