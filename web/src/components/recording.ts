// Sound and pictures from the microphone and the camera of this device.
import { strings } from '../strings'

const LEVEL_MS = 80
/** Levels below this, in decibels of full scale, are shown as silence. */
const SILENCE_DB = -60

/** Whether the browser lets this page record: only over HTTPS, or from this machine. */
export const canRecord = (): boolean => Boolean(navigator.mediaDevices) && typeof MediaRecorder !== 'undefined'
export const canPhotograph = (): boolean => Boolean(navigator.mediaDevices)

/** Returns the error message for a device. */
export function describeDeviceError(error: unknown, device: 'microphone' | 'camera'): string {
  const name = error instanceof DOMException ? error.name : ''
  if (name === 'NotAllowedError' || name === 'SecurityError') return strings.recorder.denied(device)
  if (name === 'NotFoundError' || name === 'OverconstrainedError') return strings.recorder.missing(device)
  return strings.recorder.broken(device)
}

export function stopTracks(stream: MediaStream): void {
  for (const track of stream.getTracks()) track.stop()
}

/** A recording, which starts with its construction. */
export class Recording {
  readonly #stream: MediaStream
  readonly #recorder: MediaRecorder
  readonly #pieces: Blob[] = []
  readonly #context = new AudioContext()
  readonly #analyser: AnalyserNode
  readonly #timer: ReturnType<typeof setInterval>
  readonly #startedAt = performance.now()

  /** `onLevel`: called periodically with the level from 0 to 1 and the elapsed seconds. */
  constructor(stream: MediaStream, onLevel: (level: number, seconds: number) => void) {
    this.#stream = stream
    this.#analyser = this.#context.createAnalyser()
    this.#context.createMediaStreamSource(stream).connect(this.#analyser)
    this.#recorder = new MediaRecorder(stream)
    this.#recorder.ondataavailable = (event) => this.#pieces.push(event.data)
    this.#recorder.start()
    this.#timer = setInterval(() => onLevel(this.#level(), this.#seconds()), LEVEL_MS)
  }

  /** Ends the recording and returns it as a file. */
  async end(): Promise<File> {
    const stopped = new Promise((resolve) => (this.#recorder.onstop = resolve))
    this.#recorder.stop()
    await stopped
    this.cancel()
    const type = this.#recorder.mimeType.split(';')[0] || 'audio/webm'
    return new File(this.#pieces, strings.recorder.file(type.split('/')[1] ?? 'webm'), { type })
  }

  /** Discards the recording. Idempotent. */
  cancel(): void {
    clearInterval(this.#timer)
    stopTracks(this.#stream)
    if (this.#context.state !== 'closed') void this.#context.close()
  }

  #seconds(): number {
    return (performance.now() - this.#startedAt) / 1000
  }

  #level(): number {
    const samples = new Float32Array(this.#analyser.fftSize)
    this.#analyser.getFloatTimeDomainData(samples)
    const power = samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length
    return power === 0 ? 0 : Math.min(1, Math.max(0, 1 - (10 * Math.log10(power)) / SILENCE_DB))
  }
}

/** Captures the current frame of a video as a file. */
export async function photograph(video: HTMLVideoElement): Promise<File> {
  const canvas = document.createElement('canvas')
  canvas.width = video.videoWidth
  canvas.height = video.videoHeight
  canvas.getContext('2d')?.drawImage(video, 0, 0)
  const picture = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, 'image/jpeg', 0.92))
  if (!picture) throw new Error(strings.recorder.broken('camera'))
  return new File([picture], strings.camera.file, { type: 'image/jpeg' })
}
