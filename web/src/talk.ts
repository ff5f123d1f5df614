// What is said in a conversation: a message is sent, and the model answers it, once more, further, or from one of its tokens.

import { nameOf, partOf } from "./files"
import { type Place, forkAt, goOn as goOnAt } from "./fork"
import { keepAs } from "./keep"
import { ruleFields } from "./rules"
import { type Run, newRun, start } from "./runs"
import { model, samplingFields, seedOrNew, settingsOf } from "./settings"
import { type Message, ROOT, type Talk, add, keepMessage, keepTalk, path, runOf, talk, talkVersion } from "./talks"
import { type ToolCall, callMessages, isOpen, runCall, runsAlone, toolFields } from "./tools"

const MAX_TITLE = 48
/** An answer is kept that often while it is written, in milliseconds. */
const KEEPING_PAUSE = 500

function asked(of: Talk, upTo: Message): Record<string, unknown>[] {
  const made: Record<string, unknown>[] = []
  for (let now: Message | undefined = upTo; now; now = of.messages.get(now.parent)) {
    if (now.calls?.length) {
      made.unshift(...callMessages(now.content, now.calls))
      continue
    }
    const files = now.files.map(partOf)
    const content = files.length ? [...files, { type: "text", text: now.content }] : now.content
    made.unshift({ role: now.role, content })
  }
  const { system } = settingsOf(of)
  if (system.trim()) made.unshift({ role: "system", content: system })
  return made
}

/** Says something after message `parent`, and lets the model answer. */
export function say(content: string, files: string[] = [], parent?: string): Run {
  const of = talk.value
  of.title ||= content.trim().split("\n")[0].slice(0, MAX_TITLE) || nameOf(files[0] ?? "", 0)
  const last = path(of).at(-1)?.id ?? ROOT
  return answer(of, add(of, parent ?? last, { content, files }))
}

/** Lets the model answer message `to`, once more if it did already. */
export function answer(of: Talk, to: Message): Run {
  const body = { model: model.value || undefined, messages: asked(of, to), seed: seedOrNew(), ...samplingFields(settingsOf(of)),
    ...ruleFields(of.rules), ...toolFields() }
  const run = newRun("chat", of.title, { path: "v1/chat/completions", body })
  write(of, add(of, to.id, { role: "assistant", model: model.value, ended: "writing" }), run)
  void start(run, () => finish(of, run))
  return run
}

/** Lets the model go on with an answer that stopped at a limit, was stopped or was cut off. */
export function goOn(of: Talk, message: Message): void {
  const before = runOf.get(message.id)
  if (before && before.story.promptTokens.length) {
    const run: Run = goOnAt(before, 0, () => finish(of, run))
    Object.assign(run, { content: message.content, thoughts: message.thoughts })
    write(of, message, run)
    return
  }
  const body = { model: model.value || undefined, messages: asked(of, message), seed: seedOrNew(), add_generation_prompt: false,
    continue_final_message: true, ...samplingFields(settingsOf(of)) }
  const run = newRun("chat", of.title, { path: "v1/chat/completions", body })
  run.content = message.content
  write(of, message, run)
  void start(run, () => finish(of, run))
}

/** Forks an answer at one of its tokens: the fork is a sibling of it. */
export function forkInChat(run: Run, place: Place, isFree: boolean, changes: Record<string, unknown> = {}): Run | null {
  const of = talk.value
  const before = [...of.messages.values()].find(message => runOf.get(message.id) === run)
  if (!before) return null
  const forked: Run = forkAt(run, place, { isFree, changes, onEnd: () => finish(of, forked) })
  write(of, add(of, before.parent, { role: "assistant", model: before.model, ended: "writing" }), forked)
  return forked
}

// -- keeping what is written -------------------------------------------------------------------------------------

/** The answers that are being written, by their runs. */
const written = new Map<Run, Message>()

function write(of: Talk, message: Message, run: Run): void {
  runOf.set(message.id, run)
  written.set(run, message)
  Object.assign(message, { ended: "writing", error: "" })
  keepTalk(of)
  const keepSoon = () => {
    if (written.get(run) !== message) return
    take(message, run)
    keepMessage(message)
    setTimeout(keepSoon, KEEPING_PAUSE)
  }
  setTimeout(keepSoon, KEEPING_PAUSE)
}

function take(message: Message, run: Run): void {
  message.content = run.content
  message.thoughts = run.thoughts
  message.error = run.error
}

function finish(of: Talk, run: Run): void {
  const message = written.get(run)
  if (!message) return
  written.delete(run)
  take(message, run)
  message.ended = run.state.value === "stopped" ? "stopped" : run.story.line(0).end?.reason === "length" ? "length" : "stop"
  message.run = `m-${message.made}-${message.id}`
  if (run.calls.length) message.calls = run.calls
  void keepAs(message.run, run)
  keepMessage(message)
  keepTalk(of)
  if (run.state.value === "done" && message.calls && runsAlone(roundsUpTo(of, message)))
    for (const call of message.calls) void allow(of, message, call)
}

// -- calls of tools ----------------------------------------------------------------------------------------------

/** How many answers in a row have called tools, this one included. */
function roundsUpTo(of: Talk, message: Message): number {
  let rounds = 0
  for (let now: Message | undefined = message; now?.calls; now = of.messages.get(now.parent)) rounds++
  return rounds
}

/** Runs a call. Once the last call of an answer is over, the model goes on. */
export async function allow(of: Talk, message: Message, call: ToolCall): Promise<void> {
  const running = runCall(call)
  talkVersion.value++
  await running
  settle(of, message)
}

export function refuse(of: Talk, message: Message, call: ToolCall): void {
  call.error = "The user refused this call."
  settle(of, message)
}

function settle(of: Talk, message: Message): void {
  keepMessage(message)
  keepTalk(of)
  if (of.messages.has(message.id) && !message.calls!.some(isOpen)) answer(of, message)
}

// What was written until the page goes is kept, too.
addEventListener("pagehide", () => {
  for (const [run, message] of written) {
    take(message, run)
    keepMessage(message)
  }
})
