// The tree of a conversation: siblings, paths and the layout of the map.
import type { Node } from '../transport/types'

export interface Place {
  index: number
  count: number
  before: string | null
  after: string | null
}

export interface Dot {
  id: string
  parent: string | null
  role: Node['role']
  column: number
  row: number
}

export class Tree {
  #children = new Map<string | null, Node[]>()
  #nodes = new Map<string, Node>()

  constructor(nodes: readonly Node[] = []) {
    for (const node of nodes) this.#add(node)
  }

  get size(): number {
    return this.#nodes.size
  }

  has(id: string): boolean {
    return this.#nodes.has(id)
  }

  /** The position of a message among its siblings. */
  place(id: string): Place {
    const node = this.#nodes.get(id)
    const siblings = node ? this.children(node.parent_id) : []
    const index = siblings.findIndex((one) => one.id === id)
    return {
      index,
      count: siblings.length,
      before: siblings[index - 1]?.id ?? null,
      after: index < 0 ? null : (siblings[index + 1]?.id ?? null),
    }
  }

  children(parent: string | null): readonly Node[] {
    return this.#children.get(parent) ?? []
  }

  /** The ids from the root to this message. */
  path(leaf: string | null): string[] {
    const path: string[] = []
    for (let id = leaf; id !== null && this.#nodes.has(id); id = this.#nodes.get(id)!.parent_id) path.unshift(id)
    return path
  }

  /**
   * Every message in a row of its own, parents above their children. One child goes on straight below its parent: the one
   * in `straight`, else the newest. The others branch off before it, one column further.
   */
  dots(straight: ReadonlySet<string> = new Set()): Dot[] {
    const dots: Dot[] = []
    const stack: { node: Node; column: number }[] = []
    const push = (parent: string | null, column: number): void => {
      const children = this.children(parent)
      const on = children.findLast((child) => straight.has(child.id)) ?? children.at(-1)
      if (on) stack.push({ node: on, column })
      stack.push(...children.filter((child) => child !== on).reverse().map((node) => ({ node, column: column + 1 })))
    }
    push(null, 0)
    for (let next = stack.pop(); next; next = stack.pop()) {
      const { node, column } = next
      dots.push({ id: node.id, parent: node.parent_id, role: node.role, column, row: dots.length })
      push(node.id, column)
    }
    return dots
  }

  #add(node: Node): void {
    if (this.#nodes.has(node.id)) return
    this.#nodes.set(node.id, node)
    const siblings = this.#children.get(node.parent_id)
    if (siblings) siblings.push(node)
    else this.#children.set(node.parent_id, [node])
  }
}
