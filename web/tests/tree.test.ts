import { describe, expect, it } from 'vitest'
import { Tree } from '../src/state/tree'
import type { Node } from '../src/transport/types'

const node = (id: string, parent_id: string | null): Node => ({ id, parent_id, role: 'user', created_at: '' })
const tree = new Tree([node('a', null), node('b', 'a'), node('c', 'a'), node('d', 'b'), node('e', null), node('f', 'c'), node('g', 'c')])

describe('the tree', () => {
  it('knows a message among its siblings', () => {
    expect(tree.place('b')).toEqual({ index: 0, count: 2, before: null, after: 'c' })
    expect(tree.place('e')).toEqual({ index: 1, count: 2, before: 'a', after: null })
    expect(tree.place('nobody')).toEqual({ index: -1, count: 0, before: null, after: null })
  })

  it('knows the way from the root', () => {
    expect(tree.path('f')).toEqual(['a', 'c', 'f'])
    expect(tree.path(null)).toEqual([])
  })

  it('draws every message once, branches side by side', () => {
    const dots = tree.dots()
    expect(dots).toHaveLength(7)
    expect(new Set(dots.map((dot) => `${dot.column} ${dot.row}`)).size).toBe(7)
    expect(dots.find((dot) => dot.id === 'd')).toMatchObject({ column: 0, row: 2 })
    expect(dots.find((dot) => dot.id === 'g')).toMatchObject({ column: 2, row: 2 })
  })
})
