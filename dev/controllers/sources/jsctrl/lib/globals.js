// What a script need not import.
import * as host from "aici/host"
import { chat, template } from "aici/chat"
import { start } from "aici/driver"
import { gen, genTokens } from "aici/gen"
import { fixed, fork, waitVars } from "aici/steps"
import { assert, console, describe, inspect, log } from "aici/text"
import { tool } from "aici/tools"

/** Fixed text: await $`2 and ${2} is`. */
export function $(strings, ...values) {
  const shown = values.map((value) => (typeof value === "string" ? value : inspect(value)))
  return fixed(String.raw({ raw: strings }, ...shown))
}

/** End the sequence with an error, whatever would catch exceptions. */
export function panic(message = "panic") {
  const text = describe(message instanceof Error ? message : new Error(message))
  log(text)
  host.fail(text)
}

Object.assign(globalThis, { $, assert, chat, console, fixed, fork, gen, genTokens, start, template, tool, waitVars })
