// Small parts that several views share.

import type { ComponentChildren } from "preact"
import { useEffect, useRef, useState } from "preact/hooks"

/** The words of an error, and what only those who search for its cause want: where in a program or module it was. */
export function wordsOf(error: string): [string, string] {
  const lines = error.trim().split("\n")
  const first = lines.findIndex((line, number) => number > 0 && /^\s|^memory: |^Traceback|^stack/.test(line))
  if (lines[0].includes("Traceback")) {
    // Python names the error in the end.
    const last = lines.findLastIndex(line => /^\w[\w.]*(?:Error|Exception|Interrupt|Stop\w*)?\b.*$/.test(line) && !line.startsWith("memory: "))
    return [last > 0 ? `${lines[0].replace(/:?\s*Traceback.*$/, "").trim()}${lines[0].startsWith("Traceback") ? "" : ": "}${lines[last]}` : lines[0], error]
  }
  return first < 0 ? [error, ""] : [lines.slice(0, first).join("\n"), lines.slice(first).join("\n")]
}

/** What went wrong, in words. */
export function Notice({ text }: { text: string }) {
  const [words, stack] = wordsOf(text)
  return (
    <div class="notice" role="alert">
      {words}
      {stack && <details><summary>Where</summary><pre>{stack}</pre></details>}
    </div>
  )
}

/** A word that is shown for some seconds, and a function that sets it. */
export function useTold(): [string, (text: string) => void] {
  const [told, setTold] = useState("")
  useEffect(() => {
    if (!told) return
    const timer = setTimeout(() => setTold(""), 2000)
    return () => clearTimeout(timer)
  }, [told])
  return [told, setTold]
}

/** A button that opens a short list of buttons. */
export function Menu({ label, name, children }: { label: string; name?: string; children: ComponentChildren }) {
  const [isOpen, setOpen] = useState(false)
  const root = useRef<HTMLDivElement>(null)
  useEffect(() => {
    if (!isOpen) return
    const close = (event: Event) => {
      if (event instanceof KeyboardEvent ? event.key === "Escape" : !root.current?.contains(event.target as Node)) {
        setOpen(false)
        if (event instanceof KeyboardEvent) root.current?.querySelector("button")?.focus()
      }
    }
    document.addEventListener("pointerdown", close)
    document.addEventListener("keydown", close)
    return () => {
      document.removeEventListener("pointerdown", close)
      document.removeEventListener("keydown", close)
    }
  }, [isOpen])
  return (
    <div class="menu" ref={root}>
      <button class="quiet" aria-expanded={isOpen} aria-label={name} onClick={() => setOpen(!isOpen)}>{name ? label : `${label} ▾`}</button>
      {isOpen && <div class="menu-list" onClick={() => setOpen(false)}>{children}</div>}
    </div>
  )
}

/** A box for text that grows with it. Control and Enter send it; `sendsOnEnter` makes Enter alone do so. */
export function TextBox({ value, label, placeholder, onInput, onSend, sendsOnEnter = false, id, isFocused = false }: {
  value: string; label: string; placeholder?: string; onInput: (value: string) => void; onSend: () => void
  sendsOnEnter?: boolean; id?: string; isFocused?: boolean
}) {
  const box = useRef<HTMLTextAreaElement>(null)
  useEffect(() => {
    const area = box.current!
    area.style.height = "auto"
    area.style.height = `${Math.min(area.scrollHeight + 2, 320)}px`
  }, [value])
  useEffect(() => {
    if (isFocused) box.current!.focus()
  }, [])
  return (
    <textarea ref={box} id={id} rows={1} aria-label={label} placeholder={placeholder} value={value} spellcheck={false}
      onInput={event => onInput(event.currentTarget.value)}
      onKeyDown={event => {
        const isPlain = sendsOnEnter && !event.shiftKey && !event.isComposing
        if (event.key !== "Enter" || !(isPlain || event.ctrlKey || event.metaKey)) return
        event.preventDefault()
        onSend()
      }} />
  )
}
