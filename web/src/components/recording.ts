// Sound and pictures from the microphone and the camera of this device.
import { strings } from '../strings'

const LEVEL_MS = 80
/** What is quieter than this, in decibels of full scale, is shown as silence. */
const QUIETEST = -60

/** Whether the browser lets this page record: only over HTTPS, or from this machine. */
export const canRecord = (): boolean => Boolean(navigator.mediaDevices) && typeof MediaRecorder !== 'undefined'
export const canPhotograph = (): boolean => Boolean(navigator.mediaDevices)

/** Why a device can't be used, in words. */
export function reason(error: unknown, device: 'microphone' | 'camera'): string {
  const name = error instanceof DOMException ? error.name : ''
  if (name === 'NotAllowedError' || name === 'SecurityError') return strings.recorder.denied(device)
  if (name === 'NotFoundError' || name === 'OverconstrainedError') return strings.recorder.missing(device)
  return strings.recorder.broken(device)
}

export function release(stream: MediaStream): void {
  for (const track of stream.getTracks()) track.stop()
}

/** One recording, from the moment it is made. */
export class Recording {
  readonly #stream: MediaStream
  readonly #recorder: MediaRecorder
  readonly #pieces: Blob[] = []
  readonly #context = new AudioContext()
  readonly #analyser: AnalyserNode
  readonly #timer: ReturnType<typeof setInterval>
  readonly #begun = performance.now()

  /** `heard`: called again and again with the level from 0 to 1 and the seconds so far. */
  constructor(stream: MediaStream, heard: (level: number, seconds: number) => void) {
    this.#stream = stream
    this.#analyser = this.#context.createAnalyser()
    this.#context.createMediaStreamSource(stream).connect(this.#analyser)
    this.#recorder = new MediaRecorder(stream)
    this.#recorder.ondataavailable = (event) => this.#pieces.push(event.data)
    this.#recorder.start()
    this.#timer = setInterval(() => heard(this.#level(), this.#seconds()), LEVEL_MS)
  }

  /** Ends it, and returns the sound as a file. */
  async end(): Promise<File> {
    const ended = new Promise((resolve) => (this.#recorder.onstop = resolve))
    this.#recorder.stop()
    await ended
    this.cancel()
    const type = this.#recorder.mimeType.split(';')[0] || 'audio/webm'
    return new File(this.#pieces, strings.recorder.file(type.split('/')[1] ?? 'webm'), { type })
  }

  /** Ends it without a result. May be called twice. */
  cancel(): void {
    clearInterval(this.#timer)
    release(this.#stream)
    if (this.#context.state !== 'closed') void this.#context.close()
  }

  #seconds(): number {
    return (performance.now() - this.#begun) / 1000
  }

  #level(): number {
    const samples = new Float32Array(this.#analyser.fftSize)
    this.#analyser.getFloatTimeDomainData(samples)
    const power = samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length
    return power === 0 ? 0 : Math.min(1, Math.max(0, 1 - (10 * Math.log10(power)) / QUIETEST))
  }
}

/** The picture that a video shows now, as a file. */
export async function photograph(video: HTMLVideoElement): Promise<File> {
  const canvas = document.createElement('canvas')
  canvas.width = video.videoWidth
  canvas.height = video.videoHeight
  canvas.getContext('2d')?.drawImage(video, 0, 0)
  const picture = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, 'image/jpeg', 0.92))
  if (!picture) throw new Error(strings.recorder.broken('camera'))
  return new File([picture], strings.camera.file, { type: 'image/jpeg' })
}
