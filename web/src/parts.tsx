// Small parts that several views share.

import type { ComponentChildren } from "preact"
import { useEffect, useRef, useState } from "preact/hooks"

/** What went wrong, in words. */
export function Notice({ text }: { text: string }) {
  return <p class="notice" role="alert">{text}</p>
}

/** A button that opens a short list of buttons. */
export function Menu({ label, children }: { label: string; children: ComponentChildren }) {
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
      <button class="quiet" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>{label} ▾</button>
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
