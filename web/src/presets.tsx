// Sets of settings under a name: some that the page brings, and those that were saved.

import { useState } from "preact/hooks"
import { EMPTY, type Sampling, kept } from "./settings"

const BROUGHT: Record<string, Partial<Sampling>> = {
  "The model's own": {}, Exact: { temperature: "0" }, Balanced: { temperature: "0.7", top_p: "0.95" },
  Varied: { temperature: "1.1", min_p: "0.05" },
}
const MAX_PRESETS = 40
const saved = kept<Record<string, Sampling>>("presets", {})

/** Settings without the seed, which is no part of a preset. */
const essence = (of: Sampling) => JSON.stringify({ ...EMPTY, ...of, seed: "" })

export function Presets({ given, onChoose }: { given: Sampling; onChoose: (sampling: Sampling) => void }) {
  const [name, setName] = useState<string | null>(null)
  const all: Record<string, Partial<Sampling>> = { ...BROUGHT, ...saved.value }
  const chosen = Object.keys(all).find(each => essence({ ...EMPTY, ...all[each] }) === essence(given)) ?? ""
  const save = () => {
    if (name?.trim()) saved.value = Object.fromEntries([...Object.entries(saved.value), [name.trim(), { ...given, seed: "" }]].slice(-MAX_PRESETS))
    setName(null)
  }
  const remove = () => {
    const { [chosen]: _, ...others } = saved.value
    saved.value = others
  }
  return (
    <div class="presets">
      <label>Preset
        <select value={chosen} onChange={event => onChoose({ ...EMPTY, ...all[event.currentTarget.value], seed: given.seed })}>
          {!chosen && <option value="">your own</option>}
          {Object.keys(all).map(each => <option key={each} value={each}>{each}</option>)}
        </select></label>
      {name !== null ? (
        <span class="row">
          <input aria-label="Name of the preset" value={name} ref={box => box?.focus()} onInput={event => setName(event.currentTarget.value)}
            onKeyDown={event => event.key === "Enter" && save()} />
          <button type="button" onClick={save}>Save</button>
        </span>
      ) : !chosen ? <button type="button" class="quiet" onClick={() => setName("")}>Save as a preset</button>
        : chosen in saved.value ? <button type="button" class="quiet" onClick={remove}>Delete the preset</button> : null}
    </div>
  )
}
