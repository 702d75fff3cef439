// The shape of a conversation: who is whose sibling, and a drawing of it.
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

  /** Where a message stands among those under the same parent. */
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

  /** Every message as a dot: a row for each step from the root, a column for each branch. */
  dots(): Dot[] {
    const dots: Dot[] = []
    let column = 0
    const stack = [...this.children(null)].reverse().map((node) => ({ node, row: 0, first: false }))
    if (stack.length > 0) stack.at(-1)!.first = true
    while (stack.length > 0) {
      const { node, row, first } = stack.pop()!
      if (!first) column += 1
      dots.push({ id: node.id, parent: node.parent_id, role: node.role, column, row })
      const children = [...this.children(node.id)].reverse()
      children.forEach((child, index) => stack.push({ node: child, row: row + 1, first: index === children.length - 1 }))
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
