// Generating under a constraint, with sampling parameters of one's own.
import {
  ChooseConstraint,
  cfgConstraint,
  Constraint,
  HostConstraint,
  jsonConstraint,
  larkConstraint,
  regexConstraint,
  substrConstraint,
} from "aici/constraints"
import { submit } from "aici/driver"
import { logLevel } from "aici/level"
import { MidProcessResult, Splice } from "aici/results"
import { ConstrainedToken, NextToken } from "aici/steps"
import { fromBinary, inspect, log, toBinary, toBytes, toText } from "aici/text"
import { backtrackSupported, detokenize, eosToken, setVar } from "aici/tokens"

/** What a text can be constrained by, and how. */
const CONSTRAINTS = {
  regex: regexConstraint,
  yacc: cfgConstraint,
  substring: (text, options) => substrConstraint(text, options.substringEnd ?? '"'),
  options: (options) => new ChooseConstraint(options),
  choice: (choice) => new HostConstraint({ choice }),
  lark: larkConstraint,
  jsonSchema: jsonConstraint,
  jsonObject: (yes) => new HostConstraint({ json_object: yes }),
  constraint: (given) => (given instanceof Constraint ? given : new HostConstraint(given)),
}

/** Parameters of sampling, and what the host calls them. */
const SAMPLING = {
  temperature: "temperature",
  topP: "top_p",
  topK: "top_k",
  minP: "min_p",
  typicalP: "typical_p",
  repetitionPenalty: "repetition_penalty",
  presencePenalty: "presence_penalty",
  frequencyPenalty: "frequency_penalty",
}
const OTHERS = ["substringEnd", "storeVar", "stopAt", "maxTokens", "bias", "topLogprobs"]
const KNOWN = [...Object.keys(CONSTRAINTS), ...Object.keys(SAMPLING), ...OTHERS]

function checkOptions(options) {
  const unknown = Object.keys(options).filter((name) => !KNOWN.includes(name))
  if (unknown.length) throw new TypeError(`unknown option ${unknown.join(", ")}; there are ${KNOWN.join(", ")}`)
  if (!(options.maxTokens === undefined || options.maxTokens >= 0)) {
    throw new RangeError(`maxTokens is ${inspect(options.maxTokens)}; must be a number from 0`)
  }
}

/** The constraint that options name, or one that allows everything. */
export function constraintOf(options) {
  const given = Object.keys(CONSTRAINTS).filter((name) => options[name] !== undefined)
  if (given.length > 1) throw new TypeError(`${given.join(" and ")}: at most one constraint at a time`)
  return given.length ? CONSTRAINTS[given[0]](options[given[0]], options) : new Constraint()
}

/** Sampling parameters of options as a branch has them. `bias` is a Map, pairs, or an object from token to value. */
export function samplingOf(options) {
  const sampling = {}
  for (const [name, theirs] of Object.entries(SAMPLING)) {
    if (options[name] !== undefined) sampling[theirs] = options[name]
  }
  const { bias, topLogprobs } = options
  return {
    ...(Object.keys(sampling).length ? { sampling } : {}),
    ...(bias === undefined ? {} : { bias: pairs(bias) }),
    ...(topLogprobs ? { top_logprobs: topLogprobs } : {}),
  }
}

function pairs(bias) {
  const entries = typeof bias[Symbol.iterator] === "function" ? [...bias] : Object.entries(bias)
  return entries.map(([token, value]) => [Number(token), value])
}

const describeCandidates = (pairs) =>
  pairs.map(([token, logprob]) => ({ token, text: toText(detokenize([token])), logprob }))

class Drawn extends ConstrainedToken {
  candidates = []

  postProcess(backtrack, tokens, told) {
    super.postProcess(backtrack, tokens)
    this.candidates = told.candidates ? describeCandidates(told.candidates) : []
  }
}

/** Generate; gives `{text, bytes, tokens, candidates, reason}`. `candidates` has, for each token that was drawn, the
 * `topLogprobs` best ones; `reason` is "constraint", "eos", "stopAt" or "maxTokens". */
export async function generate(options = {}) {
  checkOptions(options)
  if (logLevel() && Object.keys(options).length) log("GEN-OPT", options)
  const { maxTokens = 20, stopAt, storeVar } = options
  const stops = [stopAt ?? []].flat().map((text) => toBinary(toBytes(text)))
  const constraint = constraintOf(options)
  const step = new Drawn(() => constraint, samplingOf(options))
  const made = { tokens: [], candidates: [], binary: "", reason: "maxTokens" }
  step.finished = constraint.eosForced()
  while (!(made.reason = reasonToStop(made, step, stops, maxTokens))) {
    step.room = maxTokens - made.tokens.length
    const tokens = await step.run()
    const isDrawn = step.candidates.length > 0
    if (isDrawn) made.candidates.push(step.candidates)
    made.checked = Math.max(made.binary.length - MAX_STOP, 0)
    made.tokens.push(...tokens)
    made.binary += toBinary(detokenize(tokens))
  }
  const bytes = fromBinary(made.binary)
  const text = toText(bytes)
  if (storeVar !== undefined) setVar(storeVar, bytes)
  if (logLevel()) log(`GEN ${JSON.stringify(text)}`)
  return { text, bytes, tokens: made.tokens, candidates: made.candidates, reason: made.reason }
}

/** Longer stop texts may be missed where they begin that far back. */
const MAX_STOP = 4096

function reasonToStop(made, step, stops, maxTokens) {
  if (stops.some((stop) => made.binary.includes(stop, made.checked))) return "stopAt"
  if (made.tokens.at(-1) === eosToken()) return "eos"
  if (step.finished) return "constraint"
  return made.tokens.length >= maxTokens ? "maxTokens" : null
}

/** The generated text. */
export const gen = async (options) => (await generate(options)).text

/** The generated tokens, the end-of-sequence token among them. */
export const genTokens = async (options) => (await generate(options)).tokens

class Candidates extends NextToken {
  constructor(branch) {
    super()
    this.branch = branch
  }

  midProcess() {
    return MidProcessResult.sample(this.branch)
  }

  postProcess(backtrack, tokens, told) {
    this.found = describeCandidates(told.candidates ?? [])
  }
}

/** The `count` most likely next tokens, as `{token, text, logprob}`, best first. Appends nothing: what was drawn to
 * learn them is taken back. */
export async function candidates(count, options = {}) {
  checkOptions(options)
  if (!backtrackSupported()) throw new Error("this engine cannot take text back")
  const constraint = constraintOf(options)
  const mask = constraint.constructor === Constraint ? "any" : constraint
  const step = new Candidates({ mask, splices: [new Splice(1)], sampling: samplingOf({ ...options, topLogprobs: count }) })
  await submit(step)
  return step.found
}
