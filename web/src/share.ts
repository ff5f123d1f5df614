// The same request as a program: for a shell, for Python, for JavaScript. And texts and files for people to keep.

import { key } from "./api"
import type { Request } from "./runs"

export type Shape = "curl" | "python" | "javascript"

/** A text as an argument of a shell. */
const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`

/** A value as Python writes it. */
export function python(value: unknown, indent = 0): string {
  const pad = " ".repeat(indent + 4)
  if (value === null || value === undefined) return "None"
  if (value === true) return "True"
  if (value === false) return "False"
  if (Array.isArray(value)) {
    if (value.every(each => typeof each === "number")) return JSON.stringify(value).replaceAll(",", ", ")
    return `[\n${value.map(each => `${pad}${python(each, indent + 4)},\n`).join("")}${" ".repeat(indent)}]`
  }
  if (typeof value === "object") {
    const rows = Object.entries(value).filter(([, each]) => each !== undefined)
    if (!rows.length) return "{}"
    const lines = rows.map(([name, each]) => `${pad}${JSON.stringify(name)}: ${python(each, indent + 4)},\n`)
    return `{\n${lines.join("")}${" ".repeat(indent)}}`
  }
  // What JSON escapes Python escapes alike, but for one kind of pairs, which it would keep apart.
  return JSON.stringify(value)
}

/** The request as a program; a key is named and never shown. */
export function asProgram(request: Request, shape: Shape): string {
  const url = new URL(request.path, location.href).href
  const body = JSON.stringify(request.body, null, 2)
  if (shape === "curl") {
    const auth = key.value ? ` \\\n  -H "Authorization: Bearer $BRIDLE_API_KEY"` : ""
    return `curl -N ${quoted(url)}${auth} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(body)}\n`
  }
  if (shape === "python") {
    const auth = key.value ? `, headers={"Authorization": "Bearer " + os.environ["BRIDLE_API_KEY"]}` : ""
    const read = request.path.endsWith("chat/completions") ? `["message"]["content"]` : `["text"]`
    return `${key.value ? "import os\n\n" : ""}import httpx\n\nbody = ${python(request.body)}\n` +
      `answer = httpx.post(${JSON.stringify(url)}, json=body${auth}, timeout=None)\nanswer.raise_for_status()\n` +
      `print(answer.json()["choices"][0]${read})\n`
  }
  const auth = key.value ? ", Authorization: `Bearer ${process.env.BRIDLE_API_KEY}`" : ""
  const read = request.path.endsWith("chat/completions") ? "message.content" : "text"
  return `const answer = await fetch(${JSON.stringify(url)}, {\n  method: "POST",\n` +
    `  headers: { "Content-Type": "application/json"${auth} },\n` +
    `  body: JSON.stringify(${body.replaceAll("\n", "\n  ")}),\n})\n` +
    `const { choices, error } = await answer.json()\nif (error) throw new Error(error.message)\n` +
    `console.log(choices[0].${read})\n`
}

export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text)
    return true
  } catch {
    // Only secure pages may write there; an older way works everywhere.
    const area = document.createElement("textarea")
    area.value = text
    area.className = "offscreen"
    document.body.append(area)
    area.select()
    const isDone = document.execCommand("copy")
    area.remove()
    return isDone
  }
}

export function download(name: string, text: string, type = "application/x-ndjson"): void {
  const link = document.createElement("a")
  const url = URL.createObjectURL(new Blob([text], { type }))
  link.href = url
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}
