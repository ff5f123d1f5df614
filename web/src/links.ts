// Links that carry a program or a trace in their last part, which browsers send to no server.

import { openRun, prompts, showProgram } from "./programs"
import { type Run, openTraces, traceText } from "./runs"
import { view } from "./settings"

/** Longer links are cut by some programs through which people send them. */
const MAX_LINK = 60_000
/** As much is read from a link at most. */
const MAX_TEXT = 8_000_000

async function through(data: Uint8Array<ArrayBuffer>, change: CompressionStream | DecompressionStream): Promise<Uint8Array<ArrayBuffer>> {
  const reader = new Blob([data]).stream().pipeThrough(change as ReadableWritablePair<Uint8Array, Uint8Array>).getReader()
  const parts: Uint8Array<ArrayBuffer>[] = []
  let size = 0
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    size += read.value.length
    if (size > MAX_TEXT) throw new Error("The link holds more than this page reads.")
    parts.push(read.value as Uint8Array<ArrayBuffer>)
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer())
}

async function pack(value: unknown): Promise<string> {
  const bytes = await through(new TextEncoder().encode(JSON.stringify(value)), new CompressionStream("deflate-raw"))
  return btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")
}

async function unpack(text: string): Promise<any> {
  const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), letter => letter.charCodeAt(0))
  return JSON.parse(new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw"))))
}

async function link(kind: "program" | "trace", value: unknown): Promise<string> {
  const made = `${location.href.split("#")[0]}#${kind}=${await pack(value)}`
  if (made.length > MAX_LINK) throw new Error(`The link would have ${made.length.toLocaleString("en")} characters; at most ${MAX_LINK.toLocaleString("en")}. Save the trace instead.`)
  return made
}

export const linkToProgram = (language: string, text: string, prompt: string) => link("program", { language, text, prompt })
export const linkToTrace = async (run: Run) => link("trace", { title: run.title, text: await traceText(run) })

/** Opens what the page's address carries. Nothing runs before somebody presses a button. Returns what is wrong with it. */
export async function openLink(): Promise<string> {
  const [, kind, packed] = location.hash.match(/^#(program|trace)=([\w-]+)$/) ?? []
  if (!kind) return ""
  history.replaceState(null, "", location.href.split("#")[0])
  try {
    const value = await unpack(packed)
    if (kind === "trace") openRun(openTraces(String(value.title ?? "A trace from a link"), String(value.text))[0])
    else {
      const id = String(value.language)
      showProgram({ language: id, text: String(value.text) })
      prompts.value = { ...prompts.value, [id]: String(value.prompt ?? "") }
      view.value = "steer"
    }
    return ""
  } catch (error) {
    return `The link cannot be read: ${(error as Error).message}`
  }
}
