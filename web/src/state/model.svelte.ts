// The model in use, and those at hand.
import * as api from '../transport/api'
import { ApiError } from '../transport/http'
import type { ModelCard, Switch, SwitchKind } from '../transport/types'
import { notices } from './notices.svelte'

const LOOK_AGAIN = 500
const DEMO = 'sprout'

class Model {
  card: ModelCard | null = $state.raw(null)
  names: string[] = $state.raw([])
  #timer: ReturnType<typeof setTimeout> | undefined
  /** The model that the open conversation names; empty: the one that is used by default. */
  #name = ''

  get isReady(): boolean {
    return this.card?.state === 'ready'
  }

  /** Whether a reply can be asked for, now or as soon as the model is loaded. */
  get isAvailable(): boolean {
    return this.card !== null && ['ready', 'loading', 'available'].includes(this.card.state)
  }

  /** Whether it is the one that comes with Palaver, to try things out. */
  get isDemo(): boolean {
    return this.card?.name === DEMO
  }

  switch(kind: SwitchKind): Switch | null {
    return this.card?.switches.find((one) => one.kind === kind) ?? null
  }

  /** From now on the card is that of this model. */
  follow(name: string): void {
    if (name === this.#name) return
    this.#name = name
    void this.look()
  }

  async look(): Promise<void> {
    clearTimeout(this.#timer)
    const name = this.#name
    try {
      const card = await api.getModel(name).catch((error: unknown) => {
        if (name !== '' && error instanceof ApiError && error.status === 404) return api.getModel() // it is not offered any more
        throw error
      })
      if (name === this.#name) this.card = card
    } catch {
      return // the banner tells; the stream looks again when it is back
    }
    if (this.card?.state === 'loading') this.#timer = setTimeout(() => void this.look(), LOOK_AGAIN)
  }

  async lookForNames(): Promise<void> {
    this.names = await api.listModels().catch(() => this.names)
  }

  async load(name: string): Promise<void> {
    try {
      this.card = await api.loadModel(name)
      notices.settle('action', 'connection')
    } catch (error) {
      notices.fail(error)
    }
    await this.look()
  }

  async unload(): Promise<void> {
    try {
      this.card = await api.unloadModel()
      notices.settle('action', 'connection')
    } catch (error) {
      notices.fail(error)
    }
  }
}

export const model = new Model()
