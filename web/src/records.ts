// Records of a trace, as bridle/traces/records.py has them: what happened to an output, step by step.

export interface Odds { logprob: number; rank?: number | null; top?: [number, number][]; texts?: string[] }
export interface Draw { before: Odds; after?: Odds | null; num_allowed?: number | null; taken?: number }
export interface Cost { num_rows: number; num_tokens: number; forward: number; wait: number; sample: number }

interface Base { output: number; step: number }
export interface PromptRecord extends Base {
  type: "prompt"; tokens?: number[]; texts?: string[]; num_cached?: number; queued?: number; opening?: number
}
export interface ChunkRecord extends Base {
  type: "chunk"; start?: number; num_tokens?: number; num_again?: number; cost?: Cost | null
}
export interface TokenRecord extends Base {
  type: "token"; at?: number; token?: number; text?: string; spelled?: string; forced?: boolean; by?: string | null
  drafted?: boolean; draw?: Draw | null; biases?: [number, number | null][]; num_biases?: number; answer?: number
  cost?: Cost | null
}
export interface ReplacedRecord extends Base {
  type: "replaced"; token?: number; spelled?: string; by?: string | null; draw?: Draw | null
}
export interface RewindRecord extends Base {
  type: "rewind"; num_tokens?: number; num_chars?: number; num_prompt?: number; by?: string | null
}
export interface ForkRecord extends Base { type: "fork"; parent?: number; num_tokens?: number }
export interface WaitRecord extends Base {
  type: "wait"; late?: boolean; variables?: string[]; num_steps?: number; seconds?: number
}
export interface LogRecord extends Base { type: "log"; text?: string }
export interface VariableRecord extends Base { type: "variable"; name?: string; value?: string; is_append?: boolean }
export interface EndRecord extends Base {
  type: "end"; reason?: string; text?: string; stop?: number | string | null; error?: string | null
  usage?: Record<string, number>; num_cut?: number
}
export type TraceRecord =
  | PromptRecord | ChunkRecord | TokenRecord | ReplacedRecord | RewindRecord | ForkRecord | WaitRecord | LogRecord
  | VariableRecord | EndRecord

export interface Header {
  type: "header"; version: number; request_id: string; model?: string; prompt?: number[]; text?: string | null
  sampling?: Record<string, unknown>; adapter?: string | null; controller?: unknown; [more: string]: unknown
}

export const VERSION = 1

/** The traces in the text of a file. Throws an error that names the line. */
export function parseTraces(text: string): { header: Header; records: TraceRecord[] }[] {
  const traces: { header: Header; records: TraceRecord[] }[] = []
  text.split("\n").forEach((line, number) => {
    if (!line.trim()) return
    let value: { type?: unknown; version?: unknown; runtime?: unknown }
    try {
      value = JSON.parse(line)
    } catch {
      throw new Error(`Line ${number + 1} is not JSON: this file is no trace.`)
    }
    if (typeof value !== "object" || value === null || typeof value.type !== "string")
      throw new Error(`Line ${number + 1} has no type: this file is no trace.`)
    if (value.type === "header") {
      if (value.version !== VERSION)
        throw new Error(`Line ${number + 1}: the trace has version ${value.version}; this page reads ${VERSION}.`)
      if (value.runtime)
        throw new Error(`Line ${number + 1} begins the trace of a control runtime: "bridle explain" and "bridle replay" read it.`)
      traces.push({ header: value as Header, records: [] })
    } else if (!traces.length) throw new Error(`Line ${number + 1}: a record comes before any header.`)
    else traces[traces.length - 1].records.push(value as TraceRecord)
  })
  if (!traces.length) throw new Error("There is no trace in this file.")
  return traces
}
