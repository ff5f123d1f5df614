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
import { numChanges, submit } from "aici/driver"
import { logLevel } from "aici/level"
import { MidProcessResult, Splice } from "aici/results"
import { ConstrainedToken, Label, NextToken } from "aici/steps"
import { fromBinary, inspect, log, toBinary, toBytes, toText } from "aici/text"
import { backtrackSupported, detokenize, eosToken, setVar, tokenize } from "aici/tokens"

/** What a text can be constrained by, and how. */
const CONSTRAINTS = {
  regex: regexConstraint,
  yacc: cfgConstraint,
  substring: (text, options) => substrConstraint(text, options.substringEnd ?? '"'),
  // the host's constraint, since its engine scores whole texts; of none nothing can come
  options: (options) => (Array.isArray(options) && options.length ? new HostConstraint({ choice: options }) : new ChooseConstraint(options)),
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
const OTHERS = ["substringEnd", "longest", "storeVar", "stopAt", "maxTokens", "bias", "topLogprobs", "draft"]
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

/** What was generated so far, and what ends it. */
class Made {
  tokens = []
  candidates = []
  binary = ""
  #searched = 0

  constructor({ maxTokens = 20, stopAt, draft = [] }) {
    this.maxTokens = maxTokens
    this.draft = Array.isArray(draft) ? draft : tokenize(toBytes(draft))
    this.stops = [stopAt ?? []].flat().map((text) => toBinary(toBytes(text)))
  }

  add(tokens) {
    this.#searched = Math.max(this.binary.length - MAX_STOP, 0)
    this.tokens.push(...tokens)
    this.binary += toBinary(detokenize(tokens))
  }

  /** Policies have changed something: this is there now. */
  replace(tokens) {
    this.tokens = []
    this.binary = ""
    this.add(tokens)
  }

  /** What is left of the draft, as long as it comes true; the host keeps it, so it is told once. */
  proposed() {
    const { draft, tokens } = this
    this.draft = []
    return tokens.every((token, index) => token === draft[index]) ? draft.slice(tokens.length, this.maxTokens) : []
  }

  /** As many of the tokens as there is room for, up to the first that completes a stop text. */
  accepted(tokens) {
    const room = tokens.slice(0, this.maxTokens - this.tokens.length)
    if (!this.stops.length) return room
    let binary = this.binary
    const last = room.findIndex((token) => this.#stops((binary += toBinary(detokenize([token])))))
    return last < 0 ? room : room.slice(0, last + 1)
  }

  /** Why to stop, or null. */
  reasonToStop(isFinished) {
    if (this.#stops(this.binary)) return "stopAt"
    if (this.tokens.at(-1) === eosToken()) return "eos"
    if (isFinished) return "constraint"
    return this.tokens.length >= this.maxTokens ? "maxTokens" : null
  }

  #stops(binary) {
    return this.stops.some((stop) => binary.includes(stop, this.#searched))
  }
}

/** Longer stop texts may be missed where they begin that far back. */
const MAX_STOP = 4096

/** Whether a forbidden token begins with whole characters that are allowed. */
function beginsInside(token, constraint) {
  const text = [...toText(detokenize([token]))]
  const heads = text.slice(1).map((_, index) => tokenize(text.slice(0, index + 1).join("")))
  return heads.some((head) => head.length === 1 && constraint.tokenAllowed(head[0]))
}

/** Draws; with `ends` it looks, where the text may end, at what the model would write without the constraint: a draw that
 * is taken back, and appended in the next step if it fits. */
class Drawn extends ConstrainedToken {
  candidates = []
  #considered = []
  #isLook = false
  #mustMask = false
  #chosen = null

  constructor(made, make, sampling, ends) {
    super(make, sampling)
    this.made = made
    this.ends = ends && backtrackSupported()
  }

  midProcess() {
    if (this.#chosen !== null) return MidProcessResult.splice(0, [this.#chosen])
    this.#isLook = this.ends && !this.#mustMask && this.made.tokens.length > 0 && this.constraint.eosAllowed()
    if (!this.#isLook) return super.midProcess()
    return MidProcessResult.sample({ splices: [new Splice(1)], sampling: this.sampling })
  }

  /** Keep the model's choice, end where it leaves the pattern, or let the constraint choose. */
  #lookAt(token) {
    this.#mustMask = false
    if (token === eosToken() || this.constraint.tokenAllowed(token)) this.#chosen = token
    else this.#mustMask = beginsInside(token, this.constraint)
    this.finished = this.#chosen === null && !this.#mustMask
  }

  accepted(forced) {
    return this.made.accepted(forced)
  }

  proposed() {
    return this.made.proposed()
  }

  postProcess(backtrack, tokens, told) {
    const found = told.candidates ? describeCandidates(told.candidates) : []
    this.candidates = []
    if (this.#isLook) {
      this.#isLook = false
      this.#considered = found
      return this.#lookAt(told.sampled)
    }
    this.candidates = this.#chosen === null ? found : this.#considered
    this.#chosen = null
    this.#mustMask = false
    super.postProcess(backtrack, tokens)
  }
}

/** Generate; gives `{text, bytes, tokens, candidates, reason}`. `candidates` has, for each token that was drawn, the
 * `topLogprobs` best ones; `reason` is "constraint", "eos", "stopAt" or "maxTokens". */
export async function generate(options = {}) {
  checkOptions(options)
  if (logLevel() && Object.keys(options).length) log("GEN-OPT", options)
  const made = new Made(options)
  const ends = options.regex !== undefined && !options.longest
  const step = new Drawn(made, () => constraintOf(options), samplingOf(options), ends)
  step.finished = step.constraint.eosForced()
  const begin = new Label()
  let reason
  let seen = numChanges()
  while (!(reason = made.reasonToStop(step.finished))) {
    const tokens = await step.run()
    if (seen === numChanges()) made.add(tokens)
    else made.replace(begin.tokensSince())
    seen = numChanges()
    if (step.candidates.length) made.candidates.push(step.candidates)
  }
  const bytes = fromBinary(made.binary)
  const text = toText(bytes)
  if (options.storeVar !== undefined) setVar(options.storeVar, bytes)
  if (logLevel()) log(`GEN ${JSON.stringify(text)}`)
  return { text, bytes, tokens: made.tokens, candidates: made.candidates, reason }
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
