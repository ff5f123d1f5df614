// Conversations in the form that the model knows, by its chat template.
import * as host from "aici/host"
import { getPromptLen, getTokens } from "aici/driver"
import { logLevel } from "aici/level"
import { MidProcessResult } from "aici/results"
import { NextToken } from "aici/steps"
import { log } from "aici/text"
import { backtrackSupported, tokensRepr } from "aici/tokens"

function rendered(messages, { tools = null, addGenerationPrompt = true, variables = {} } = {}) {
  const said = typeof messages === "string" ? [{ role: "user", content: messages }] : messages
  const wanted = { messages: said, tools, add_generation_prompt: addGenerationPrompt, variables }
  const found = JSON.parse(host.renderChat(JSON.stringify(wanted)))
  if (found.error !== undefined) throw new Error(found.error)
  return found
}

/** The text of a conversation (a text alone is the user's), up to where the answer begins. Options: `tools`,
 * `addGenerationPrompt`, `variables` of the template. */
export const template = (messages, options) => rendered(messages, options).text

/** Appends tokens, or lets them take the place of others. */
class Chat extends NextToken {
  constructor(tokens, following) {
    super()
    Object.assign(this, { tokens, following })
  }

  isFixed() {
    return true
  }

  midProcess() {
    const before = getTokens().slice(this.#start())
    let common = 0
    while (common < before.length && before[common] === this.tokens[common]) common++
    const backtrack = before.length - common
    const tokens = this.tokens.slice(common)
    if (backtrack && !backtrackSupported()) throw new Error("this engine cannot take text back")
    if (logLevel()) log(`CHAT ${tokensRepr(tokens)}`)
    return backtrack || tokens.length ? MidProcessResult.splice(backtrack, tokens) : MidProcessResult.skip()
  }

  /** Where the conversation begins. A prompt that is only the start token is part of it. */
  #start() {
    const tokens = getTokens()
    const start = this.following ? this.following.ptr : tokens.length
    return start === 1 && getPromptLen() === 1 && tokens[0] === this.tokens[0] ? 0 : start
  }
}

/** Append a conversation as `template` writes it; special tokens that its messages spell stay text. With the option
 * `following` it takes the place of all that comes after that label: what they have in common stays. */
export const chat = (messages, options = {}) => new Chat(rendered(messages, options).tokens, options.following).run()
