// Tells that a reply ended while the tab was hidden: by a mark in the tab's title, and by a notification of the browser.
import { strings } from '../strings'
import type { Conversation } from './conversation.svelte'
import { page } from './page.svelte'
import { preferences } from './preferences.svelte'

const SETTLE_MS = 1500 // after a reply its tools may run, or a queued message may be sent

class ReplyNotifier {
  /** Whether a reply ended since the tab was last visible. */
  hasNews = $state(false)
  #awaited: Conversation | null = null
  #timer: ReturnType<typeof setTimeout> | undefined
  #notification: Notification | null = null

  constructor() {
    document.addEventListener('visibilitychange', () => document.visibilityState === 'visible' && this.#clear())
  }

  /** Called when the open conversation becomes busy or idle, or another one is opened. */
  update(conversation: Conversation | null, isBusy: boolean): void {
    clearTimeout(this.#timer)
    if (isBusy) this.#awaited = conversation
    else if (conversation === null || conversation !== this.#awaited) this.#awaited = null
    else this.#timer = setTimeout(() => this.#handleEnd(conversation), SETTLE_MS)
  }

  #handleEnd(conversation: Conversation): void {
    this.#awaited = null
    if (document.visibilityState === 'visible') return
    if (preferences.notifies) this.#notify(conversation)
    page.releaseIfHidden()
  }

  #notify({ id, title, needsApproval }: Conversation): void {
    this.hasNews = true
    if (!canNotify() || Notification.permission !== 'granted') return
    try {
      const body = needsApproval ? strings.notification.approval : strings.notification.ended
      this.#notification = new Notification(title || strings.untitled, { body, tag: id, icon: new URL('icon-192.png', document.baseURI).href })
      this.#notification.onclick = () => focus()
    } catch {
      // browsers of phones allow it to service workers alone
    }
  }

  #clear(): void {
    this.hasNews = false
    this.#notification?.close()
    this.#notification = null
  }
}

/** Whether the browser has notifications: over HTTPS, or from the machine itself. */
export const canNotify = (): boolean => 'Notification' in globalThis

export const replyNotifier = new ReplyNotifier()
