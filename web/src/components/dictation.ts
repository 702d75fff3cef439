// Speech recognition by the browser, only where it runs on this device, so that no recording leaves it.
import { strings } from '../strings'
import { describeDeviceError } from './recording'

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

/** Whether the browser can recognize the user's language on this device without a download. */
export async function canDictate(): Promise<boolean> {
  const found = recogniser()
  if (!found?.available || !('processLocally' in found.prototype)) return false
  try {
    return (await found.available({ langs: [navigator.language], processLocally: true })) === 'available'
  } catch {
    return false
  }
}

/** A dictation, which starts with its construction. */
export class Dictation {
  readonly #recognition: Recognition
  #words = ''
  #resolveEnd: () => void = () => undefined
  readonly #end = new Promise<void>((resolve) => (this.#resolveEnd = resolve))

  /** `onText`: called with the text so far. `onError`: called with an error message. */
  constructor(onText: (words: string) => void, onError: (why: string) => void) {
    const recognition = (this.#recognition = new (recogniser()!)())
    recognition.lang = navigator.language
    recognition.continuous = true
    recognition.interimResults = true
    recognition.processLocally = true
    recognition.onresult = ({ results }) => {
      this.#words = Array.from(results, (one) => one[0]?.transcript.trim() ?? '').join(' ')
      onText(this.#words)
    }
    recognition.onerror = ({ error }) => {
      if (error === 'not-allowed' || error === 'audio-capture') onError(describeDeviceError(new DOMException('', error === 'not-allowed' ? 'NotAllowedError' : 'NotFoundError'), 'microphone'))
      else if (error !== 'aborted' && error !== 'no-speech') onError(strings.recorder.broken('microphone'))
    }
    recognition.onend = () => this.#resolveEnd()
    recognition.start()
  }

  /** Ends the dictation and returns its text. */
  async end(): Promise<string> {
    this.#recognition.stop()
    await this.#end
    return this.#words
  }

  cancel(): void {
    this.#recognition.abort()
  }
}
