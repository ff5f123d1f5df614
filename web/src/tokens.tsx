// A text, token by token, in the colours of where each came from. Chunks are drawn once and again only when something
// in them changes, and the browser skips those out of sight. Which token is looked at is known to `looked` alone.

import { signal } from "@preact/signals"
import { Component } from "preact"
import { useRef } from "preact/hooks"
import { Lit } from "./lit"
import type { Run } from "./runs"
import { SelectionRules } from "./selection"
import { type Colours, colours, folds } from "./settings"
import type { Line, Piece } from "./story"

export interface Looked { run: Run; line: Line | null; number: number; piece: Piece }
/** The token that the pointer or the keyboard is on, and the one that was chosen to stay. */
export const looked = signal<Looked | null>(null)
export const pinned = signal<Looked | null>(null)

const LEVELS = [0.9, 0.6, 0.3, 0.1, 0]

function classOf(piece: Piece, how: Colours): string {
  if (piece.origin === "rewound") return "t rewound"
  if (how === "origin") return `t ${piece.origin}`
  if (how === "none" || !piece.record || piece.record.type !== "token") return "t"
  const draw = piece.record.draw
  if (piece.record.forced || !draw) return "t forced"
  const probability = Math.exp((draw.after ?? draw.before).logprob)
  return `t p${LEVELS.findIndex(level => probability >= level)}`
}

interface ChunkProps {
  pieces: Piece[]; from: number; to: number; version: number; how: Colours; isFolded: boolean; line: Line | null
  marks: Set<number> | null; tail: string; isBlock: boolean
}

class Chunk extends Component<ChunkProps> {
  override shouldComponentUpdate(next: ChunkProps): boolean {
    const now = this.props
    return next.version !== now.version || next.how !== now.how || next.isFolded !== now.isFolded ||
      next.pieces !== now.pieces || next.to !== now.to || next.marks !== now.marks || next.tail !== now.tail ||
      next.isBlock !== now.isBlock
  }

  override render({ pieces, from, to, how, isFolded, line, marks, tail, isBlock }: ChunkProps) {
    const made = []
    for (let number = from; number < to; number++) {
      const piece = pieces[number]
      if (piece.origin === "rewound" && line) {
        const first = number
        while (number + 1 < to && pieces[number + 1].origin === "rewound") number++
        const isShown = isFolded === line.opened.has(first)
        const count = number - first + 1
        made.push(
          <button key={`f${first}`} class="fold" data-fold={first} aria-expanded={isShown}
            aria-label={`${count} tokens rolled back`}>{isShown ? "−" : `+${count}`}</button>,
        )
        if (!isShown) continue
        for (let each = first; each <= number; each++)
          made.push(<s key={each} class="t rewound" data-n={each}>{pieces[each].text}</s>)
        continue
      }
      const mark = marks?.has(number) ? " differs" : ""
      made.push(<span key={number} class={classOf(piece, how) + mark} data-n={number}>{piece.text}</span>)
    }
    return <div class={isBlock ? "chunk block" : "chunk"}>{made}{tail}</div>
  }
}

function chunks(line: Line, marks: Set<number> | null) {
  return line.starts.map((from, chunk) => {
    const isLast = chunk === line.starts.length - 1
    const to = isLast ? line.pieces.length : line.starts[chunk + 1]
    return (
      <Chunk key={chunk} pieces={line.pieces} from={from} to={to}
        isBlock={line.endsLine(from) && (isLast || line.endsLine(to))} version={line.versions[chunk]} how={colours.value} isFolded={folds.value} line={line} marks={marks}
        tail={isLast ? line.tail : ""} />
    )
  })
}

interface Props { run: Run; line: Line; hasPrompt?: boolean; marks?: Set<number> | null; label?: string }

/** The text of one output of a run, after its prompt. Arrow keys walk along its tokens, Enter keeps one. */
export function TokenText({ run, line, hasPrompt = true, marks = null, label = "Text" }: Props) {
  run.version.value
  const root = useRef<HTMLDivElement>(null)
  const at = (target: EventTarget | null): Looked | null => {
    const element = (target as HTMLElement | null)?.closest?.("[data-n]") as HTMLElement | null
    if (!element) return null
    const number = Number(element.dataset.n)
    const isPrompt = element.closest(".prompt-text") !== null
    const piece = isPrompt ? run.story.prompt[number] : line.pieces[number]
    return piece ? { run, line: isPrompt ? null : line, number, piece } : null
  }
  const mark = (name: string, element: Element | null) => {
    root.current?.querySelector(`.${name}`)?.classList.remove(name)
    element?.classList.add(name)
  }
  const look = (target: EventTarget | null) => {
    const found = at(target)
    if (!found) return
    looked.value = found
    mark("at", (target as HTMLElement).closest("[data-n]"))
  }
  const choose = (target: EventTarget | null) => {
    const fold = (target as HTMLElement).closest?.("[data-fold]") as HTMLElement | null
    if (fold) {
      line.toggle(Number(fold.dataset.fold))
      run.version.value++
      return
    }
    const found = at(target)
    if (!found) return
    document.querySelector(".t.pinned")?.classList.remove("pinned")
    mark("pinned", (target as HTMLElement).closest("[data-n]"))
    pinned.value = looked.value = found
  }
  const walk = (event: KeyboardEvent) => {
    if ((event.target as HTMLElement).closest(".fold")) return
    const all = root.current!.querySelectorAll<HTMLElement>("[data-n]")
    const now = root.current!.querySelector(".at")
    const index = now ? Array.prototype.indexOf.call(all, now) : -1
    const moves: Record<string, number> = {
      ArrowRight: index + 1, ArrowLeft: index - 1, ArrowDown: index + 10, ArrowUp: index - 10, Home: 0, End: all.length - 1,
    }
    if (event.key === "Enter" && now) {
      choose(now)
      document.querySelector<HTMLElement>("#inspector")?.focus()
    } else if (event.key in moves && all.length) {
      const element = all[Math.min(Math.max(moves[event.key], 0), all.length - 1)]
      look(element)
      element.scrollIntoView({ block: "nearest" })
    } else return
    event.preventDefault()
  }
  const prompt = run.story.prompt
  return (
    <>
    <div ref={root} class={`tokens ${run.state.value}`} tabIndex={0} role="group" aria-busy={run.state.value === "running"} onPointerOver={event => look(event.target)}
      onClick={event => choose(event.target)} onKeyDown={walk} onPointerLeave={() => (looked.value = pinned.value)}
      aria-label={`${label}: ${line.alive.length} tokens. Arrow keys walk along them, Enter tells more.`}>
      {hasPrompt && prompt.length > 0 && (
        <div class="prompt-text">
          <Chunk pieces={prompt} from={0} to={prompt.length} version={0} how={colours.value} isFolded={false} line={null}
            marks={null} tail="" isBlock={false} />
        </div>
      )}
      {chunks(line, marks)}
    </div>
    {run.program && <Lit run={run} line={line} root={root} />}
    <SelectionRules run={run} line={line} root={root} />
    </>
  )
}
