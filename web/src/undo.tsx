// What was deleted last, as long as it can be brought back.

import { signal } from "@preact/signals"

const LASTS = 12_000
const offered = signal<{ text: string; act: () => void } | null>(null)

/** Offers for some seconds to take back what was just done. */
export function offerUndo(text: string, act: () => void): void {
  const made = { text, act }
  offered.value = made
  setTimeout(() => {
    if (offered.value === made) offered.value = null
  }, LASTS)
}

export function Undo() {
  const now = offered.value
  const undo = () => {
    offered.value = null
    now!.act()
  }
  return (
    <div class="undo" role="status">
      {now && <p>{now.text} <button class="link" onClick={undo}>Undo</button></p>}
    </div>
  )
}
