// The forks of one text as a tree: each with the token that was chosen, its probability, and how the text goes on.

import { percent, visible } from "./odds"
import { openRun } from "./programs"
import { type Run, runs } from "./runs"

const MAX_SHOWN = 60
const MAX_MEMBERS = 60

const parentOf = (run: Run) => (run.ancestor ? runs.value.find(each => each.made === run.ancestor!.made) : undefined)

/** The runs that have a common beginning with this one, parents first, each with its depth. */
export function familyOf(run: Run): { run: Run; depth: number }[] {
  let root = run
  for (let above = parentOf(root); above; above = parentOf(root)) root = above
  const made: { run: Run; depth: number }[] = []
  const add = (each: Run, depth: number) => {
    made.push({ run: each, depth })
    for (const child of runs.value.filter(other => other.ancestor?.made === each.made).sort((a, b) => a.made - b.made)) add(child, depth + 1)
  }
  add(root, 1)
  return made.slice(0, MAX_MEMBERS)
}

function Member({ run, isThis, depth }: { run: Run; isThis: boolean; depth: number }) {
  run.version.value
  const { ancestor } = run
  const line = run.story.lines.get(run.selected.value) ?? run.story.line(0)
  const text = line.alive.slice(ancestor ? ancestor.at : 0).map(number => line.pieces[number].text).join("").slice(0, MAX_SHOWN)
  return (
    <li>
      <button class={`fork depth${Math.min(depth, 8)}`} aria-current={isThis ? "true" : undefined} onClick={() => openRun(run)}>
        <span class="fork-name">{run.id}</span>
        {ancestor?.chosen && <code>{visible(ancestor.chosen)}</code>}
        {ancestor?.odds !== undefined && <span class="fork-more">{percent(ancestor.odds)}</span>}
        <span class="fork-text">{text || "…"}</span>
      </button>
    </li>
  )
}

export function Family({ run }: { run: Run }) {
  const members = familyOf(run)
  if (members.length < 2 || run.kind === "chat") return null
  return (
    <nav class="family" aria-label="Forks of this text">
      <ul>{members.map(each => <Member key={each.run.id} run={each.run} depth={each.depth} isThis={each.run === run} />)}</ul>
    </nav>
  )
}
