// Forks as a tree: what each wrote since it forked, its variables, its log, how it ended.

import type { Run } from "./runs"
import type { Line } from "./story"

const MAX_SHOWN = 160

/** The beginning of what an output wrote itself, and whether there is more of it. With many forks this is asked for often. */
function own(line: Line): { text: string; isCut: boolean } {
  let text = ""
  for (let at = line.numShared; at < line.alive.length && text.length <= MAX_SHOWN; at++) text += line.pieces[line.alive[at]].text
  if (text.length <= MAX_SHOWN) text += line.tail
  return { text: text.slice(0, MAX_SHOWN), isCut: text.length > MAX_SHOWN }
}

/** A flat list of the tree's outputs, parents first, each with its depth. */
function walk(lines: Line[]): { line: Line; depth: number }[] {
  const made: { line: Line; depth: number }[] = []
  const children = new Map<Line | null, Line[]>()
  for (const line of lines) children.set(line.parent, [...(children.get(line.parent) ?? []), line])
  const add = (line: Line, depth: number) => {
    made.push({ line, depth })
    for (const child of children.get(line) ?? []) add(child, depth + 1)
  }
  for (const root of children.get(null) ?? []) add(root, 1)
  return made
}

export function Tree({ run }: { run: Run }) {
  run.version.value
  const rows = walk(run.story.sorted)
  const selected = run.selected.value
  const move = (event: KeyboardEvent) => {
    const at = rows.findIndex(row => row.line.index === selected)
    const to = event.key === "ArrowDown" ? at + 1 : event.key === "ArrowUp" ? at - 1 : event.key === "Home" ? 0
      : event.key === "End" ? rows.length - 1 : -1
    if (to < 0 || to >= rows.length) return
    event.preventDefault()
    run.selected.value = rows[to].line.index
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".tree [aria-selected=true]")?.focus())
  }
  return (
    <div class="tree" role="tree" aria-label="Forks" onKeyDown={move}>
      {rows.map(({ line, depth }) => {
        const { text, isCut } = own(line)
        const isSelected = line.index === selected
        const state = line.end?.error ? "failed" : line.end ? "done" : "running"
        return (
          <div key={line.index} class={`fork ${state} depth${Math.min(depth, 8)}`} role="treeitem" aria-level={depth}
            aria-selected={isSelected} tabIndex={isSelected ? 0 : -1} onClick={() => (run.selected.value = line.index)}>
            <span class="fork-name">{line.index}</span>
            <span class="fork-text">{text || "…"}{isCut ? "…" : ""}</span>
            <span class="fork-more">
              {line.variables.size > 0 && `${line.variables.size} var${line.variables.size === 1 ? "" : "s"} · `}
              {line.alive.length - line.numShared} tok{line.end?.reason ? ` · ${line.end.reason}` : ""}
            </span>
          </div>
        )
      })}
    </div>
  )
}

/** Variables and log of one output. */
export function Said({ line }: { line: Line }) {
  const variables = [...line.variables]
  if (!variables.length && !line.logs && !line.end?.error) return null
  return (
    <div class="said">
      {variables.length > 0 && (
        <section>
          <h2>Variables</h2>
          <dl class="facts wide">
            {variables.map(([name, value]) => [<dt key={name}>{name}</dt>, <dd key={`${name} `}><code>{value}</code></dd>])}
          </dl>
        </section>
      )}
      {line.logs && <section><h2>Log</h2><pre class="log" tabIndex={0}>{line.logs}</pre></section>}
    </div>
  )
}
