// Links to what the server tells in plain text. A link cannot carry the key, so with one the page reads it and shows it itself.

import { useRef, useState } from "preact/hooks"
import { key, textAt } from "./api"

const PLAIN: [string, string][] = [["Models", "v1/models"], ["Metrics", "metrics"], ["Health", "health/ready"]]

export function Footer() {
  const dialog = useRef<HTMLDialogElement>(null)
  const [shown, setShown] = useState({ name: "", text: "" })
  const open = (name: string, path: string) => async (event: Event) => {
    if (!key.value) return
    event.preventDefault()
    setShown({ name, text: await textAt(path).catch(error => (error as Error).message) })
    dialog.current!.showModal()
  }
  return (
    <p class="foot">
      <a href="docs">API reference</a>
      {PLAIN.map(([name, path]) => <a key={path} href={path} onClick={open(name, path)}>{name}</a>)}
      <dialog ref={dialog} aria-label={shown.name}>
        <form method="dialog"><h2>{shown.name}</h2><button>Close</button></form>
        {shown.text && <pre class="log" tabIndex={0}>{shown.text}</pre>}
      </dialog>
    </p>
  )
}
