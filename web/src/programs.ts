// The programs that are being written, one for each language, and the texts that they begin with.

import { LANGUAGES, type Language } from "./examples"
import { type Run, current } from "./runs"
import { kept, view } from "./settings"

export const language = kept<string>("language", "javascript")
export const programs = kept<Record<string, string>>("programs", {})
export const prompts = kept<Record<string, string>>("prompts", {})
/** The text to continue in the view "Complete". */
export const prompt = kept<string>("prompt", "Once upon a time")

export const chosen = (): Language => LANGUAGES.find(each => each.id === language.value) ?? LANGUAGES[0]
export const textOf = (of: Language) => programs.value[of.id] ?? of.examples[0].text
export const promptOf = (of: Language) => prompts.value[of.id] ?? of.examples[0].prompt ?? of.prompt

export function showProgram(program: { language: string; text: string }): void {
  language.value = program.language
  programs.value = { ...programs.value, [program.language]: program.text }
}

/** Whether a text to begin with is sent as a message, by the model's chat template. */
export const asMessage = kept<boolean>("steer-message", true)
/** Whether a steered run has a twin beside it that is not steered. */
export const hasTwin = kept<boolean>("steer-twin", true)

/** The text that a run began with, without the signs that the tokenizer adds. */
export function promptTextOf(run: Run): string {
  const { prompt: sent } = run.request.body
  if (typeof sent === "string") return sent
  const said = run.request.body.messages?.at(-1)?.content
  if (typeof said === "string") return said
  return run.story.prompt.map(piece => piece.text).filter(text => !/^<\|.*\|>$/.test(text)).join("")
}

/** Shows a run in its view, with what it was made from. */
export function openRun(run: Run): void {
  if (run.kind === "steer") {
    current.steer.value = run
    if (run.program) showProgram(run.program)
    if (run.program && !run.ancestor?.inherited) prompts.value = { ...prompts.value, [run.program.language]: promptTextOf(run) }
    view.value = "steer"
  } else {
    current.complete.value = run
    prompt.value = promptTextOf(run)
    view.value = "complete"
  }
}
