// The editor: CodeMirror in a shadow root, where its styles are sheets that scripts construct. The page's policy allows
// those, and no style element.

import { closeBrackets, closeBracketsKeymap } from "@codemirror/autocomplete"
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands"
import { javascript } from "@codemirror/lang-javascript"
import { json } from "@codemirror/lang-json"
import { python } from "@codemirror/lang-python"
import { HighlightStyle, bracketMatching, indentOnInput, indentUnit, syntaxHighlighting, syntaxTree } from "@codemirror/language"
import { type Diagnostic, linter, lintKeymap, setDiagnostics } from "@codemirror/lint"
import { type EditorState, type Extension, Prec } from "@codemirror/state"
import { EditorView, drawSelection, highlightActiveLine, highlightActiveLineGutter, keymap, lineNumbers, placeholder } from "@codemirror/view"
import { tags } from "@lezer/highlight"
import { useEffect, useRef } from "preact/hooks"
import { followLit, litCalls } from "./lit"

const colours = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.modifier], color: "var(--code-keyword)" },
  { tag: [tags.string, tags.regexp, tags.special(tags.string)], color: "var(--code-string)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--code-number)" },
  { tag: [tags.comment], color: "var(--faint)", fontStyle: "italic" },
  { tag: [tags.function(tags.variableName), tags.function(tags.propertyName)], color: "var(--code-function)" },
  { tag: [tags.propertyName], color: "var(--code-property)" },
])

const look = EditorView.theme({
  "&": { height: "100%", color: "var(--ink)", backgroundColor: "var(--paper)", fontSize: "13.5px" },
  "&.cm-focused": { outline: "none" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.6" },
  ".cm-content": { padding: "12px 0", caretColor: "var(--ink)" },
  ".cm-gutters": { backgroundColor: "var(--paper)", color: "var(--faint)", border: "none", paddingLeft: "4px" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--soft)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "var(--select)" },
  ".cm-lintRange-error": { backgroundImage: "none", textDecoration: "wavy underline var(--bad)", textUnderlineOffset: "3px" },
  ".cm-lit": { backgroundColor: "var(--accent-soft)", outline: "1px solid var(--accent)", borderRadius: "3px" },
  ".cm-lint-marker-error": { content: "none" },
  ".cm-diagnostic-error": { borderLeftColor: "var(--bad)" },
  ".cm-tooltip": { backgroundColor: "var(--raised)", color: "var(--ink)", border: "1px solid var(--line)", borderRadius: "8px", overflow: "hidden", maxWidth: "32rem", whiteSpace: "pre-wrap" },
})

function languageOf(id: string): Extension {
  if (id === "javascript") return javascript()
  if (id === "python") return [python(), indentUnit.of("    ")]
  if (id === "program" || id === "schema") return json()
  return []
}

/** Where JSON breaks off, if it does. */
function broken(state: EditorState): Diagnostic[] {
  let at = -1
  syntaxTree(state).iterate({ enter: node => { if (node.type.isError && at < 0) at = node.from } })
  if (at < 0 || !state.doc.toString().trim()) return []
  const line = state.doc.lineAt(at)
  const from = Math.max(line.from, Math.min(at, line.to - 1))
  return [{ from, to: Math.min(from + 1, state.doc.length), severity: "error", message: "JSON does not go on like this." }]
}

/** Where in a program an error is, as far as its words say so: a line, or a place in a JSON program. */
export function placeOf(error: string, state: EditorState): { from: number; to: number } | null {
  const path = /\bprogram((?:\.\w+|\[\d+\])+)/.exec(error)
  if (path) {
    const found = nodeAt(state, path[1].match(/\w+/g) ?? [])
    if (found) return found
  }
  if (error.includes("not JSON")) return broken(state)[0] ?? null
  const all = [...error.matchAll(/\bmain:(\d+)|\bline (\d+)|\bat (\d+)\(\d+\)/g)]
  // Python's traceback names the innermost place last, JavaScript's first.
  const match = error.includes("Traceback") ? all.at(-1) : all[0]
  const number = Number(match?.[1] ?? match?.[2] ?? match?.[3] ?? 0)
  if (number < 1 || number > state.doc.lines) return null
  const line = state.doc.line(number)
  return { from: line.from + (line.text.length - line.text.trimStart().length), to: line.to }
}

/** What is marked: the server's error, and where JSON breaks off. Both come from here, so that neither removes the other. */
function marked(state: EditorState, language: string, error: string): Diagnostic[] {
  const place = error ? placeOf(error, state) : null
  if (place) return [{ ...place, severity: "error", message: error }]
  return language === "program" || language === "schema" ? broken(state) : []
}

function nodeAt(state: EditorState, path: string[]): { from: number; to: number } | null {
  let node = syntaxTree(state).topNode.firstChild
  for (const name of path) {
    if (!node) return null
    if (node.name === "Array") {
      node = node.getChildren("Object").concat(node.getChildren("Array"), node.getChildren("String"), node.getChildren("Number"))
        .sort((a, b) => a.from - b.from)[Number(name)] ?? null
    } else {
      const property = node.getChildren("Property").find(each => {
        const key = each.getChild("PropertyName")
        return key && state.sliceDoc(key.from + 1, key.to - 1) === name
      })
      if (!property) return { from: node.from, to: node.to }
      node = property.lastChild
    }
  }
  return node && { from: node.from, to: node.to }
}

interface Props { text: string; language: string; error: string; label: string; onChange: (text: string) => void; onRun: () => void }

export function Editor({ text, language, error, label, onChange, onRun }: Props) {
  const host = useRef<HTMLDivElement>(null)
  const editor = useRef<EditorView | null>(null)
  const latest = useRef({ onChange, onRun, error })
  latest.current = { onChange, onRun, error }
  useEffect(() => {
    const root = host.current!.shadowRoot ?? host.current!.attachShadow({ mode: "open" })
    const made = new EditorView({
      doc: text,
      parent: root,
      root,
      extensions: [
        Prec.highest(keymap.of([{ key: "Mod-Enter", run: () => (latest.current.onRun(), true) }])),
        lineNumbers(), history(), drawSelection(), indentOnInput(), bracketMatching(), closeBrackets(), highlightActiveLine(),
        highlightActiveLineGutter(), EditorView.lineWrapping, syntaxHighlighting(colours), look,
        keymap.of([...closeBracketsKeymap, ...defaultKeymap, ...historyKeymap, ...lintKeymap, indentWithTab]),
        languageOf(language), litCalls, linter(view => marked(view.state, language, latest.current.error)), placeholder("Write a program"), EditorView.contentAttributes.of({ "aria-label": label }),
        EditorView.updateListener.of(update => update.docChanged && latest.current.onChange(update.state.doc.toString())),
      ],
    })
    editor.current = made
    const unfollow = followLit(made)
    return () => {
      unfollow()
      made.destroy()
    }
  }, [language])
  useEffect(() => {
    const made = editor.current!
    if (made.state.doc.toString() !== text) made.dispatch({ changes: { from: 0, to: made.state.doc.length, insert: text } })
  }, [text, language])
  useEffect(() => {
    const made = editor.current!
    const place = error ? placeOf(error, made.state) : null
    made.dispatch(setDiagnostics(made.state, marked(made.state, language, error)))
    if (place) made.dispatch({ effects: EditorView.scrollIntoView(place.from, { y: "nearest" }) })
  }, [error, language])
  return <div class="editor" ref={host} />
}
