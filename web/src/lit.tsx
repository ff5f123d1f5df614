// Lights up a call of `gen` in the editor and the tokens that it wrote, whichever of them the pointer is on.

import { effect } from "@preact/signals"
import { type Extension, StateEffect, StateField } from "@codemirror/state"
import { Decoration, type DecorationSet, EditorView } from "@codemirror/view"
import { useEffect, useMemo } from "preact/hooks"
import { callsIn, callsOf, litCall } from "./gens"
import type { Run } from "./runs"
import type { Line } from "./story"
import { looked } from "./tokens"

const setLit = StateEffect.define<number | null>()
const lit = Decoration.mark({ class: "cm-lit" })

function decorated(text: string, call: number | null): DecorationSet {
  const found = call === null ? undefined : callsIn(text)[call]
  return found ? Decoration.set([lit.range(found.from, found.to)]) : Decoration.none
}

const field = StateField.define<DecorationSet>({
  create: () => Decoration.none,
  update(now, change) {
    for (const each of change.effects) if (each.is(setLit)) return decorated(change.state.doc.toString(), each.value)
    return now.map(change.changes)
  },
  provide: own => EditorView.decorations.from(own),
})

/** The call at a place of the editor's text. */
function callAt(view: EditorView, at: { x: number; y: number }): number | null {
  const place = view.posAtCoords(at)
  if (place === null) return null
  const found = callsIn(view.state.doc.toString()).findLastIndex(({ from, to }) => from <= place && place <= to)
  return found < 0 ? null : found
}

/** Makes the editor's calls light up, and tells which one the pointer is on. */
export const litCalls: Extension = [field, EditorView.domEventHandlers({
  mousemove: (event, view) => { litCall.value = callAt(view, event) },
  mouseleave: () => { litCall.value = null },
})]

/** Follows what is lit until the returned function is called. */
export const followLit = (view: EditorView) => effect(() => view.dispatch({ effects: setLit.of(litCall.value) }))

/** Lights up the tokens of the call, and the call of the token that is looked at. Draws nothing itself. */
export function Lit({ run, line, root }: { run: Run; line: Line; root: { current: HTMLElement | null } }) {
  const version = run.version.value
  const calls = useMemo(() => (run.program ? callsOf(run, line) : null), [version, line])
  const call = litCall.value
  const now = looked.value
  useEffect(() => {
    if (calls && now?.run === run && now.line === line) litCall.value = calls.get(now.number) ?? null
  }, [now, calls])
  useEffect(() => {
    if (!calls) return
    for (const element of root.current?.querySelectorAll<HTMLElement>(":scope > .chunk [data-n]") ?? [])
      element.classList.toggle("lit", call !== null && calls.get(Number(element.dataset.n)) === call)
  }, [call, calls])
  return null
}
