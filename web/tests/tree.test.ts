import { describe, expect, it } from 'vitest'
import { Tree } from '../src/state/tree'
import type { Node } from '../src/transport/types'

const node = (id: string, parent_id: string | null): Node => ({ id, parent_id, role: 'user', created_at: '' })
const tree = new Tree([node('a', null), node('b', 'a'), node('c', 'a'), node('d', 'b'), node('e', null), node('f', 'c'), node('g', 'c')])

describe('the tree', () => {
  it('finds the place of a message among its siblings', () => {
    expect(tree.place('b')).toEqual({ index: 0, count: 2, before: null, after: 'c' })
    expect(tree.place('e')).toEqual({ index: 1, count: 2, before: 'a', after: null })
    expect(tree.place('missing')).toEqual({ index: -1, count: 0, before: null, after: null })
  })

  it('returns the path from the root', () => {
    expect(tree.path('f')).toEqual(['a', 'c', 'f'])
    expect(tree.path(null)).toEqual([])
  })

  it('lays out every message once, parents above children, the newest branch straight', () => {
    expect(tree.dots().map((dot) => `${dot.id}${dot.column}`)).toEqual(['a1', 'b2', 'd2', 'c1', 'f2', 'g1', 'e0'])
    expect(tree.dots().map((dot) => dot.row)).toEqual([0, 1, 2, 3, 4, 5, 6])
  })

  it('lays out the shown branch straight', () => {
    const dots = tree.dots(new Set(['a', 'b', 'd']))
    expect(dots.map((dot) => `${dot.id}${dot.column}`)).toEqual(['e1', 'a0', 'c1', 'f2', 'g1', 'b0', 'd0'])
  })
})
