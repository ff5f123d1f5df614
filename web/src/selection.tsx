// A rule from a piece of a text: it is selected with the pointer or the keyboard, and the text goes on from there under the
// rule that it names.

import { useEffect, useState } from "preact/hooks"
import { forkAt } from "./fork"
import { openRun } from "./programs"
import type { Run } from "./runs"
import type { Line } from "./story"
import { forkInChat } from "./talk"

interface Selected { text: string; at: number }

/** The characters that mean something in a pattern, as themselves. */
const literal = (text: string) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")

/** The place among a line's tokens where the selection inside of `root` begins; null if there is none. */
function selectedIn(root: HTMLElement | null, line: Line): Selected | null {
  const selection = document.getSelection()
  const text = selection?.toString() ?? ""
  if (!root || !selection?.rangeCount || !text.trim()) return null
  const range = selection.getRangeAt(0)
  const first = [...root.querySelectorAll<HTMLElement>(":scope > .chunk [data-n]")].find(each => range.intersectsNode(each))
  const at = first && root.contains(range.commonAncestorContainer) ? line.alive.indexOf(Number(first.dataset.n)) : -1
  return at < 0 ? null : { text, at }
}

/** What may come instead, as fields of the request. */
function ruled(kind: string, text: string, choices: string): Record<string, unknown> {
  if (kind === "never") return { banned_phrases: [text.trim()] }
  const space = /^\s/.test(text) ? " " : ""
  if (kind === "number") return { constraint: { regex: `${space}[0-9]+([^0-9][\\s\\S]*)?` } }
  const texts = choices.split(",").map(each => literal(each.trim())).filter(Boolean)
  return { constraint: { regex: `${space}(${texts.join("|")})[\\s\\S]*` } }
}

/** Offers rules for what is selected in a text, which has to be that of `root`. */
export function SelectionRules({ run, line, root }: { run: Run; line: Line; root: { current: HTMLElement | null } }) {
  const [selected, setSelected] = useState<Selected | null>(null)
  const [choices, setChoices] = useState<string | null>(null)
  useEffect(() => {
    const look = () => {
      if ((document.activeElement as HTMLElement | null)?.closest(".selection")) return
      setSelected(selectedIn(root.current, line))
      setChoices(null)
    }
    document.addEventListener("selectionchange", look)
    return () => document.removeEventListener("selectionchange", look)
  }, [line])
  if (!selected || run.state.value === "running" || !run.story.promptTokens.length) return null
  const goOn = (kind: string) => {
    const changes = ruled(kind, selected.text, choices ?? "")
    const place = { output: line.index, at: selected.at }
    setSelected(null)
    document.getSelection()?.removeAllRanges()
    if (run.kind === "chat") forkInChat(run, place, true, changes)
    else openRun(forkAt(run, place, { isFree: true, changes }))
  }
  return (
    <div class="selection" role="group" aria-label="A rule for what is selected">
      <span>Instead of <code>{selected.text.trim().slice(0, 24)}</code></span>
      {choices === null ? (
        <>
          <button onClick={() => goOn("never")}>Never this</button>
          <button onClick={() => goOn("number")}>A number here</button>
          <button onClick={() => setChoices("")}>One of …</button>
        </>
      ) : (
        <>
          <input aria-label="One of these, with commas between" value={choices} placeholder="red, green" ref={box => box?.focus()}
            onInput={event => setChoices(event.currentTarget.value)} onKeyDown={event => event.key === "Enter" && choices.trim() && goOn("choices")} />
          <button disabled={!choices.trim()} onClick={() => goOn("choices")}>Continue</button>
        </>
      )}
    </div>
  )
}
