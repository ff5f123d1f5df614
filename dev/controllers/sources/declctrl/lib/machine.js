// Runs the steps of a program. A step that may end is not ended by force: the model may go on in it, or begin the next
// one, whichever token it draws. Both are allowed by the same mask.
import { getPromptLen, numChanges, numTokens } from "aici/driver"
import { logLevel } from "aici/level"
import { MidProcessResult, Splice } from "aici/results"
import { fork, Label, NextToken, stop, waitVars } from "aici/steps"
import { log } from "aici/text"
import { eosToken, tokenize, TokenSet } from "aici/tokens"
import { partOf } from "decl/parts"
import { ProgramError } from "decl/program"
import { evaluate, Scope } from "decl/values"

/** Where the text of labelled steps ends. */
const labels = new Map()

/** Run a program to its end. */
export async function run(steps) {
  labels.set("prompt", new Label(getPromptLen()))
  let first = null // the token that began the step before it was its turn
  for (let queue = steps; queue.length; ) {
    const [step, ...rest] = queue
    if (step.kind === "Stop") return stop()
    if (step.kind === "Wait") await waitVars(...step.vars)
    if (step.kind === "Fork") {
      queue = [...step.branches[await fork(step.branches.length)], ...rest]
      continue
    }
    const part = partOf(step, new Scope())
    if (step.kind === "Fixed") await write(step, part, first)
    if (step.kind === "Choose" || step.kind === "Gen") first = await generate(step, part, rest, first)
    else first = null
    queue = rest
  }
}

// -- fixed text -----------------------------------------------------------------------------------------------

/** Text that is as it is. If the model has begun it, by `first`, only the rest is written. */
async function write(step, part, first) {
  const text = evaluate(step.text, new Scope())
  const begin = new Label(step.following === null ? numTokens() - (first === null ? 0 : 1) : placeOf(step))
  if (first !== null) await new Given(part.constraint.left[0].slice(1)).run()
  else await begin.fixedAfter(text)
  finish(step, text, numTokens())
}

function placeOf({ following, path }) {
  const place = labels.get(following)?.ptr
  if (place === undefined) throw new ProgramError(`${path}.Fixed.following: no step with the label ${following} has run`)
  for (const [label, end] of labels) if (end.ptr > place) labels.delete(label)
  return place
}

/** Tokens without a choice. */
class Given extends NextToken {
  constructor(tokens) {
    super()
    this.tokens = tokens
  }

  isFixed() {
    return true
  }

  midProcess() {
    return this.tokens.length ? MidProcessResult.splice(0, this.tokens) : MidProcessResult.skip()
  }
}

/** Put other bytes in the place of the last token. */
class Instead extends Given {
  midProcess() {
    return MidProcessResult.splice(1, this.tokens)
  }
}

/** A step is over, and its text ends at `end`. */
function finish(step, text, end) {
  new Scope().run(step.stmts, text).commit()
  if (step.label !== null) labels.set(step.label, new Label(end))
}

// -- what the model writes ------------------------------------------------------------------------------------

/** Gives the token that belongs to the next step already, or null. */
async function generate(step, part, rest, first) {
  const begin = new Label(numTokens() - (first === null ? 0 : 1))
  if (first !== null) await take(part, first)
  let next = null
  let seen = numChanges()
  let follower = followerOf(part, step, rest[0])
  while (!part.mustEnd() && next === null) {
    if (seen !== numChanges()) {
      // policies have changed the text: what is there now counts
      seen = numChanges()
      part = partOf(step, new Scope())
      for (const token of begin.tokensSince()) part.append(token)
      follower = followerOf(part, step, rest[0])
      continue
    }
    const forced = part.forcedTokens()
    if (forced.length) {
      await new Given(forced).run()
      for (const token of forced) await take(part, token)
      continue
    }
    const draw = new Draw(part, follower())
    await draw.run()
    if (seen !== numChanges()) continue
    if (draw.isEnd) break
    if (draw.isOurs) await take(part, draw.token)
    else next = draw.token
  }
  if (logLevel()) log(`${step.kind === "Gen" ? "GEN" : "CHOOSE"} ${JSON.stringify(part.text)}`)
  finish(step, part.text, numTokens() - (next === null ? 0 : 1))
  return next
}

async function take(part, token) {
  const kept = part.append(token)
  if (kept !== null) await new Instead(kept.length ? tokenize(kept) : []).run()
}

/** Gives the next part as it would be if this step ended now; null if it may not, or what follows writes nothing. */
function followerOf(part, step, next) {
  const isFixed = next?.kind === "Gen" || !step.stmts.length // whatever this step writes
  let kept = null
  return () => {
    if (!next || !part.mayEnd()) return null
    if (kept === null || !isFixed) kept = partOf(next, new Scope().run(step.stmts, part.text))
    return kept
  }
}

/** A token of this part, or of the one that may follow, or the end. The end itself is never appended. */
class Draw extends NextToken {
  isEnd = false
  isOurs = false
  token = null

  constructor(part, following) {
    super()
    Object.assign(this, { part, following })
  }

  midProcess() {
    this.ours = this.part.allowed()
    const mask = new TokenSet().addAll(this.ours)
    if (this.following) mask.addAll(this.following.allowed())
    if (this.part.mayEnd()) mask.add(eosToken())
    return MidProcessResult.sample({ mask, splices: [new Splice(1, [], [eosToken()])] })
  }

  postProcess(backtrack, tokens, told) {
    this.isEnd = tokens.length === 0
    this.token = tokens[0]
    this.isOurs = !this.isEnd && this.ours.has(this.token)
  }
}
