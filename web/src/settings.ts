// What is set for all views: model, sampling, theme, how tokens are coloured. Kept in the browser; the key is not.

import { effect, signal } from "@preact/signals"
import { models } from "./api"

const MAX_TOKENS = 512
const lengthOf = (name: string) => models.value.find(each => each.id === name)?.max_model_len ?? Infinity

/** How many tokens a text has at most if nothing else is set: half of the context, if that is short. */
export const usualLimit = () => Math.min(MAX_TOKENS, Math.floor(lengthOf(model.value) / 2))

/** As many tokens as are asked for, and as fit after a prompt. */
export const fitting = (asked: number, name: string, numPrompt: number) => Math.max(1, Math.min(asked, lengthOf(name) - numPrompt))

export interface Sampling {
  max_tokens: string; temperature: string; top_p: string; top_k: string; min_p: string; seed: string; n: string
  presence_penalty: string; frequency_penalty: string; repetition_penalty: string; stop: string; system: string
}

export const FIELDS: { name: keyof Sampling; label: string; hint: string; step: string; min: string }[] = [
  { name: "max_tokens", label: "Most tokens", hint: "", step: "1", min: "1" },
  { name: "temperature", label: "Temperature", hint: "the model's", step: "0.1", min: "0" },
  { name: "top_p", label: "Top-p", hint: "the model's", step: "0.05", min: "0" },
  { name: "top_k", label: "Top-k", hint: "the model's", step: "1", min: "-1" },
  { name: "min_p", label: "Min-p", hint: "0", step: "0.01", min: "0" },
  { name: "seed", label: "Seed", hint: "a new one", step: "1", min: "0" },
  { name: "repetition_penalty", label: "Repetition", hint: "1", step: "0.05", min: "0" },
  { name: "presence_penalty", label: "Presence", hint: "0", step: "0.1", min: "-2" },
  { name: "frequency_penalty", label: "Frequency", hint: "0", step: "0.1", min: "-2" },
]

export const EMPTY: Sampling = {
  max_tokens: "", temperature: "", top_p: "", top_k: "", min_p: "", seed: "", n: "", presence_penalty: "",
  frequency_penalty: "", repetition_penalty: "", stop: "", system: "",
}

export function kept<T>(name: string, usual: T) {
  let first = usual
  try {
    const found = JSON.parse(localStorage.getItem(`bridle.${name}`) ?? "null")
    if (found !== null && typeof found === typeof usual)
      first = typeof usual === "object" ? { ...usual, ...found } : found
  } catch {
    // Nothing usable is kept.
  }
  const value = signal(first)
  effect(() => {
    try {
      localStorage.setItem(`bridle.${name}`, JSON.stringify(value.value))
    } catch {
      // Private windows may keep nothing.
    }
  })
  return value
}

export type View = "complete" | "chat" | "steer" | "compare" | "server"
export type Colours = "origin" | "probability" | "none"
export const model = kept<string>("model", "")
export const sampling = kept<Sampling>("sampling", EMPTY)
export const theme = kept<string>("theme", "auto")
export const colours = kept<Colours>("colours", "origin")
export const folds = kept<boolean>("folds", false)
export const view = kept<View>("view", "chat")

effect(() => {
  document.documentElement.dataset.theme = theme.value
})

// A model that is no longer served is not asked for.
effect(() => {
  const names = models.value.map(each => each.id)
  if (names.length && !names.includes(model.value)) {
    const first = models.value.find(each => (each.task ?? "generate") === "generate") ?? models.value[0]
    model.value = first.id
  }
})

/** The settings of a conversation: its own, as soon as one was changed in it. */
export const settingsOf = (of: { sampling?: Sampling }): Sampling => of.sampling ?? sampling.value

/** The fields of a body that were set. */
export function samplingFields(of: Sampling = sampling.value): Record<string, unknown> {
  const given: Record<string, unknown> = { max_tokens: usualLimit() }
  for (const { name } of FIELDS) {
    const value = of[name].trim()
    if (value && Number.isFinite(Number(value))) given[name] = Number(value)
  }
  if (of.stop) given.stop = of.stop.split("\n").filter(Boolean)
  return given
}

export function seedOrNew(): number {
  return Math.floor(Math.random() * 2 ** 31)
}
