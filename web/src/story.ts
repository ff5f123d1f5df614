// What records add up to: for each output its tokens in the order in which they came, those that were rolled back too,
// with logs, variables and the place in the tree of forks. It grows record by record; nothing here knows the page.

import type { EndRecord, PromptRecord, ReplacedRecord, TokenRecord, TraceRecord, WaitRecord } from "./records"

export type Origin = "prompt" | "cached" | "sampled" | "drafted" | "forced" | "fought" | "rewound"

/** A draw from which the mask took more than this was fought over. */
const FOUGHT = 0.5
/** A chunk of a line is drawn by itself. It ends with a line of the text, after so many pieces, or else after so many
 *  more. */
const CHUNK = 48
const MAX_CHUNK = 256

export interface Piece {
  text: string
  origin: Origin
  record?: TokenRecord | ReplacedRecord
  token?: number
}

const decoder = new TextDecoder()

/** Bytes in base64, as text. */
function plain(value: string): string {
  try {
    return decoder.decode(Uint8Array.from(atob(value), letter => letter.charCodeAt(0)))
  } catch {
    return value
  }
}

function originOf(record: TokenRecord): Origin {
  if (record.forced) return "forced"
  if (record.draw && (record.draw.taken ?? 0) > FOUGHT) return "fought"
  return record.drafted ? "drafted" : "sampled"
}

/** One output. `alive` are the numbers of the pieces that are tokens of its text; `starts[i]` is the first piece of
 *  chunk i, and `versions[i]` changes whenever something in that chunk does. */
export class Line {
  pieces: Piece[] = []
  alive: number[] = []
  tail = ""
  logs = ""
  readonly variables = new Map<string, string>()
  readonly waits: WaitRecord[] = []
  readonly starts = [0]
  readonly versions = [0]
  readonly opened = new Set<number>()
  end: EndRecord | null = null

  constructor(readonly index: number, readonly parent: Line | null = null, readonly numShared = 0) {}

  get text(): string {
    return this.alive.map(number => this.pieces[number].text).join("") + this.tail
  }

  chunkOf(number: number): number {
    let low = 0
    let high = this.starts.length - 1
    while (low < high) {
      const middle = (low + high + 1) >> 1
      if (this.starts[middle] <= number) low = middle
      else high = middle - 1
    }
    return low
  }

  /** Whether a line of the text ends before piece `number`. */
  endsLine(number: number): boolean {
    return number > 0 && this.pieces[number - 1].text.endsWith("\n")
  }

  push(piece: Piece, isAlive: boolean): void {
    const last = this.starts.length - 1
    const number = this.pieces.length
    const size = number - this.starts[last]
    if (size >= MAX_CHUNK || (size >= CHUNK && this.endsLine(number))) {
      this.starts.push(number)
      this.versions.push(0)
    }
    this.pieces.push(piece)
    if (isAlive) this.alive.push(number)
    this.versions[this.starts.length - 1]++
  }

  /** Takes over everything of a line from which nothing was rolled back. */
  private copy(from: Line): void {
    this.pieces = from.pieces.slice()
    this.alive = from.alive.slice()
    this.starts.splice(0, 1, ...from.starts)
    this.versions.splice(0, 1, ...from.versions)
  }

  takeBack(count: number): void {
    for (const number of this.alive.splice(Math.max(this.alive.length - count, 0))) {
      const piece = this.pieces[number]
      this.pieces[number] = { ...piece, origin: "rewound", text: piece.text || (piece.record?.spelled ?? "") }
      this.versions[this.chunkOf(number)]++
    }
  }

  /** Shows or folds what was rolled back from piece `number` on. */
  toggle(number: number): void {
    if (!this.opened.delete(number)) this.opened.add(number)
    this.versions[this.chunkOf(number)]++
  }

  fork(index: number): Line {
    const line = new Line(index, this, this.alive.length)
    if (this.alive.length < this.pieces.length) for (const number of this.alive) line.push(this.pieces[number], true)
    else line.copy(this) // of long texts there may be many forks
    return line
  }
}

/** What a run begins with that goes on from another one's text: its prompt, and tokens of the text. */
export interface Inherited { prompt: Piece[]; promptTokens: number[]; promptRecord: PromptRecord | null; pieces: Piece[] }

export class Story {
  readonly prompt: Piece[] = []
  promptTokens: number[] = []
  promptRecord: PromptRecord | null = null
  readonly lines = new Map<number, Line>([[0, new Line(0)]])
  version = 0

  /** Begins with what another run had told. */
  inherit({ prompt, promptTokens, promptRecord, pieces }: Inherited): void {
    this.prompt.push(...prompt)
    this.promptTokens = promptTokens
    this.promptRecord = promptRecord
    for (const piece of pieces) this.line(0).push(piece, true)
  }

  line(index: number): Line {
    let line = this.lines.get(index)
    if (!line) this.lines.set(index, (line = new Line(index)))
    return line
  }

  get sorted(): Line[] {
    return [...this.lines.values()].sort((a, b) => a.index - b.index)
  }

  add(record: TraceRecord): void {
    this.version++
    const line = record.type === "fork" ? null : this.line(record.output)
    switch (record.type) {
      case "prompt":
        return this.addPrompt(record)
      case "token":
        return line!.push({ text: record.text ?? "", origin: originOf(record), record, token: record.token ?? 0 }, true)
      case "replaced":
        return line!.push({ text: record.spelled ?? "", origin: "rewound", record, token: record.token ?? 0 }, false)
      case "rewind":
        return line!.takeBack(record.num_tokens ?? 0)
      case "fork":
        this.lines.set(record.output, this.line(record.parent ?? 0).fork(record.output))
        return
      case "log":
        line!.logs += record.text ?? ""
        return
      case "variable": {
        const before = record.is_append ? line!.variables.get(record.name ?? "") ?? "" : ""
        line!.variables.set(record.name ?? "", before + plain(record.value ?? ""))
        return
      }
      case "wait":
        line!.waits.push(record)
        return
      case "end":
        line!.end = record
        line!.tail = record.text ?? ""
        line!.versions[line!.versions.length - 1]++
    }
  }

  private addPrompt(record: PromptRecord): void {
    if (this.promptRecord) return
    this.promptRecord = record
    this.promptTokens = record.tokens ?? []
    const texts = record.texts ?? []
    this.promptTokens.forEach((token, number) => {
      const origin = number < (record.num_cached ?? 0) ? "cached" : "prompt"
      this.prompt.push({ text: texts[number] ?? "", origin, token })
    })
  }
}

/** How many pieces of each origin a line has. */
export function counts(story: Story, line: Line): Record<Origin, number> {
  const found = { prompt: 0, cached: 0, sampled: 0, drafted: 0, forced: 0, fought: 0, rewound: 0 }
  for (const piece of story.prompt) found[piece.origin]++
  for (const piece of line.pieces) found[piece.origin]++
  return found
}
