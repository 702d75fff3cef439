// The user of this page, and the names under which the browser stores what is the user's own. A page has one user: for another one it
// is loaded again, so that nothing of the one before stays in it.
import { load, PREFIX, save } from './storage'

/** The user where no key is needed. The names of this user's values are those that they had before there were users. */
const LOCAL = 'local'

/** The user of the last page, by the address of the server: several may share this storage behind a proxy. */
const lastUser = (): string => `user:${new URL('.', document.baseURI).pathname}`

class User {
  /** Null until it is known. What is written before belongs to whoever it turns out to be. */
  name: string | null = $state(null)

  /** The session is known. Returns false if it is that of another user, for whom the page must be loaded again. */
  identify(name: string = LOCAL): boolean {
    if (this.name !== null && this.name !== name) return false
    this.name = name
    save(lastUser(), name)
    return true
  }

  /** While the server is unreachable, it is the user of the last page who has not signed out. Returns whether that is known only now. */
  assumeLast(): boolean {
    if (this.name !== null) return false
    this.name = load<string | null>(lastUser(), null)
    return this.name !== null
  }

  /** The user has signed out, or the key is not valid any more. */
  forget(): void {
    save(lastUser(), null)
  }

  /** Whether another tab of this browser has signed in or out. */
  isChange(event: StorageEvent): boolean {
    return event.key === PREFIX + lastUser()
  }

  /** The name under which the browser stores a value of the user, who must be known. */
  key(name: string): string {
    if (this.name === null) throw new Error('the user is not known')
    return this.name === LOCAL ? name : `user.${encodeURIComponent(this.name).replaceAll('.', '%2E')}.${name}`
  }
}

export const user = new User()
