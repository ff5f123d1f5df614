// Which tokens differ between two texts.

const MOST_EDITS = 1500

/** The positions in `a` and in `b` that have no counterpart in the other. */
export function differences(a: string[], b: string[]): [Set<number>, Set<number>] {
  let start = 0
  while (start < a.length && start < b.length && a[start] === b[start]) start++
  let ends = 0
  while (ends < a.length - start && ends < b.length - start && a[a.length - 1 - ends] === b[b.length - 1 - ends]) ends++
  const left = a.slice(start, a.length - ends)
  const right = b.slice(start, b.length - ends)
  const pairs = matches(left, right)
  const used = [new Set(pairs.map(pair => pair[0])), new Set(pairs.map(pair => pair[1]))]
  const rest = (items: string[], found: Set<number>) =>
    new Set(items.map((_, number) => number).filter(number => !found.has(number)).map(number => number + start))
  return [rest(left, used[0]), rest(right, used[1])]
}

/** A longest common subsequence after Myers; none if the texts have too little in common. */
function matches(a: string[], b: string[]): [number, number][] {
  const most = Math.min(a.length + b.length, MOST_EDITS)
  const reach = new Map<number, number>([[1, 0]])
  const history: Map<number, number>[] = []
  for (let edits = 0; edits <= most; edits++) {
    history.push(new Map([...reach].filter(([k]) => Math.abs(k) <= edits + 1)))
    for (let k = -edits; k <= edits; k += 2) {
      const isDown = k === -edits || (k !== edits && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1))
      let x = isDown ? reach.get(k + 1) ?? 0 : (reach.get(k - 1) ?? 0) + 1
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++
      reach.set(k, x)
      if (x >= a.length && x - k >= b.length) return walkBack(history, a.length, b.length, edits)
    }
  }
  return []
}

function walkBack(history: Map<number, number>[], x: number, y: number, edits: number): [number, number][] {
  const pairs: [number, number][] = []
  for (let each = edits; each >= 0; each--) {
    const reach = history[each]
    const k = x - y
    const isDown = k === -each || (k !== each && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1))
    const before = isDown ? k + 1 : k - 1
    const fromX = reach.get(before) ?? 0
    const fromY = fromX - before
    while (x > fromX && y > fromY && x > 0 && y > 0) pairs.push([--x, --y])
    if (each > 0) [x, y] = [fromX, fromY]
  }
  return pairs
}
