// One run: its text in colours, what the colours mean, its forks, its time line, and what one can do with it.

import { Family } from "./family"
import { goOn } from "./fork"
import { Menu, Notice, useTold } from "./parts"
import { linkToProgram, linkToTrace } from "./links"
import { openRun, promptTextOf } from "./programs"
import { type Run, beside, runs, stop, summary, traceText } from "./runs"
import { type Colours, colours, folds, view } from "./settings"
import { type Shape, asProgram, copy, download } from "./share"
import { Attempts, Steps } from "./steps"
import { Spoken } from "./spoken"
import { type Line, type Origin, counts } from "./story"
import { Timeline } from "./timeline"
import { TokenText } from "./tokens"
import { Said, Tree } from "./tree"

const ORIGINS: [Origin, string][] = [
  ["prompt", "prompt"], ["cached", "cached"], ["sampled", "sampled"], ["drafted", "drafted"], ["forced", "forced"],
  ["fought", "mask removed most"], ["rewound", "rolled back"],
]

export function Legend({ run, line }: { run: Run; line: Line }) {
  run.version.value
  const found = counts(run.story, line)
  const choose = (event: Event) => (colours.value = (event.target as HTMLSelectElement).value as Colours)
  return (
    <div class="legend">
      {colours.value === "origin"
        ? ORIGINS.filter(([origin]) => found[origin]).map(([origin, name]) => (
          <span key={origin} class="key"><i class={`swatch ${origin}`} />{name} <b>{found[origin].toLocaleString("en")}</b></span>))
        : colours.value === "probability" &&
          ["over 90 %", "60 %", "30 %", "10 %", "less"].map((name, number) => (
            <span key={name} class="key"><i class={`swatch p${number}`} />{name}</span>))}
      <span class="spring" />
      {found.rewound > 0 && (
        <label class="check"><input type="checkbox" checked={folds.value}
          onChange={event => (folds.value = event.currentTarget.checked)} /> fold what was rolled back</label>
      )}
      <select aria-label="Colours" value={colours.value} onChange={choose}>
        <option value="origin">by origin</option><option value="probability">by probability</option>
        <option value="none">no colours</option>
      </select>
    </div>
  )
}

export function RunActions({ run }: { run: Run }) {
  const [told, tell] = useTold()
  const program = (shape: Shape) => async () =>
    tell((await copy(asProgram(run.request, shape))) ? "Copied" : "This browser does not let pages copy")
  const share = (make: () => Promise<string>) => async () => {
    try {
      tell((await copy(await make())) ? "Copied" : "This browser does not let pages copy")
    } catch (error) {
      tell((error as Error).message)
    }
  }
  const { program: written } = run
  const save = async () => download(`trace-${run.requestId || run.id}.jsonl`, await traceText(run))
  const compare = () => {
    beside.left.value = run
    view.value = "compare"
  }
  return (
    <>
      <span class="told" role="status">{told}</span>
      <Menu label="Copy">
        <button onClick={async () => tell((await copy(run.story.line(run.selected.value).text)) ? "Copied" : "Not copied")}>The text</button>
        <button onClick={program("curl")}>As curl</button>
        <button onClick={program("python")}>As Python</button>
        <button onClick={program("javascript")}>As JavaScript</button>
        {written && <button onClick={share(() => linkToProgram(written.language, written.text, promptTextOf(run)))}>Link to the program</button>}
        <button onClick={share(() => linkToTrace(run))}>Link to the trace</button>
      </Menu>
      <button class="quiet" onClick={save}>Save trace</button>
      <button class="quiet" onClick={compare}>Compare</button>
    </>
  )
}

export function Ancestry({ run }: { run: Run }) {
  if (!run.ancestor) return null
  const { made, at, chosen, isFree, hasRule } = run.ancestor
  const from = runs.value.find(each => each.made === made)
  const state = from?.state.value === "running" ? ", which is still writing" : ""
  return (
    <p class="ancestry">
      {chosen ? "Forked from " : "Continues "}
      {from && from.kind !== "chat" ? <button class="link" onClick={() => openRun(from)}>run {from.id}</button> : "an earlier run"}{state}
      {chosen && <> at token {at + 1}, with <code>{chosen}</code></>}{isFree && ", without its rule"}
      {hasRule && ` at token ${at + 1}, under a new rule`}
    </p>
  )
}

/** Says that a text is not complete, and continues it. */
function Limit({ run, line }: { run: Run; line: Line }) {
  run.version.value
  if (line.end?.reason !== "length" || run.state.value === "running") return null
  const most = run.request.body.max_tokens
  return (
    <p class="unfinished">{most ? `The text stopped at the limit of ${Number(most).toLocaleString("en")} tokens.` : "The text stopped at the limit of tokens."}{" "}
      <button onClick={() => openRun(goOn(run, line.index))}>Continue</button></p>
  )
}

interface Props { run: Run; marks?: (line: Line) => Set<number> | null; isSmall?: boolean }

export function RunView({ run, marks, isSmall = false }: Props) {
  run.version.value
  const state = run.state.value
  const line = run.story.lines.get(run.selected.value) ?? run.story.line(0)
  const hasForks = run.story.lines.size > 1
  return (
    <article class="run" aria-label={`Run ${run.id}`}>
      <header class="run-head">
        <span class={`state ${state}`}><i />{state === "running" ? "writing" : state}</span>
        <span class="summary">{summary(run)}</span>
        <span class="spring" />
        {state === "running" ? <button class="stop" onClick={() => stop(run)}>Stop</button> : !isSmall && <RunActions run={run} />}
      </header>
      <Ancestry run={run} />
      <Family run={run} />
      {run.error && <Notice text={run.error} />}
      <Legend run={run} line={line} />
      {hasForks && <Tree run={run} />}
      <TokenText key={line.index} run={run} line={line} marks={marks?.(line)} label={hasForks ? `Fork ${line.index}` : "Text"} />
      <Limit run={run} line={line} />
      <Spoken key={`${run.id} ${line.index}`} run={run} line={line} />
      <Timeline run={run} line={line} />
      <Steps key={run.id} run={run} />
      <Attempts run={run} line={line} />
      <Said line={line} />
    </article>
  )
}
