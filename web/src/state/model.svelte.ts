// The model in use and the available models.
import * as api from '../transport/api'
import { ApiError } from '../transport/http'
import type { ModelCard, Switch, SwitchKind } from '../transport/types'
import { notices } from './notices.svelte'

const POLL_MS = 500
const DEMO = 'sprout'

class Model {
  card: ModelCard | null = $state.raw(null)
  names: string[] = $state.raw([])
  #timer: ReturnType<typeof setTimeout> | undefined
  /** The model of the open conversation; empty: the server's default. */
  #name = ''

  get isReady(): boolean {
    return this.card?.state === 'ready'
  }

  /** Whether a reply can be requested, now or once the model is loaded. */
  get isAvailable(): boolean {
    return this.card !== null && ['ready', 'loading', 'available'].includes(this.card.state)
  }

  /** Whether it is the embedded demo model. */
  get isDemo(): boolean {
    return this.card?.name === DEMO
  }

  switch(kind: SwitchKind): Switch | null {
    return this.card?.switches.find((one) => one.kind === kind) ?? null
  }

  /** Selects the model whose card is loaded. */
  select(name: string): void {
    if (name === this.#name) return
    this.#name = name
    void this.refresh()
  }

  async refresh(): Promise<void> {
    clearTimeout(this.#timer)
    const name = this.#name
    try {
      const card = await api.getModel(name).catch((error: unknown) => {
        if (name !== '' && error instanceof ApiError && error.status === 404) return api.getModel() // the model is no longer available
        throw error
      })
      if (name === this.#name) this.card = card
    } catch {
      return // the banner shows that the server is unreachable; the stream triggers a reload
    }
    if (this.card?.state === 'loading') this.#timer = setTimeout(() => void this.refresh(), POLL_MS)
  }

  async loadNames(): Promise<void> {
    this.names = await api.listModels().catch(() => this.names)
  }

  async load(name: string): Promise<void> {
    try {
      this.card = await api.loadModel(name)
      notices.clear('action', 'connection')
    } catch (error) {
      notices.showError(error)
    }
    await this.refresh()
  }

  async unload(): Promise<void> {
    try {
      this.card = await api.unloadModel()
      notices.clear('action', 'connection')
    } catch (error) {
      notices.showError(error)
    }
  }
}

export const model = new Model()
