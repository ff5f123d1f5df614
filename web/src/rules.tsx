// Rules for the answers of a conversation: what may be said, in which form, how much, and what never.

import { useState } from "preact/hooks"
import { asMessage, prompts, showProgram } from "./programs"
import { view } from "./settings"
import { keepTalk, talk, talkVersion } from "./talks"

export type Rules = Record<string, string>
const lines = (text = "") => text.split("\n").map(each => each.trim()).filter(Boolean)

const TYPES: Record<string, object> = {
  string: { type: "string" }, text: { type: "string" }, number: { type: "number" }, integer: { type: "integer" },
  boolean: { type: "boolean" }, list: { type: "array", items: { type: "string" } },
}

/** The schema of a form, which has a field in each line: "age: integer", "color: red | green", "name". */
export function schemaOf(form: string): Record<string, unknown> {
  const rows = lines(form).map(line => {
    const [name, type = "string"] = line.split(/:(.*)/).map(each => each.trim())
    const choices = type.split("|").map(each => each.trim())
    return [name, choices.length > 1 ? { enum: choices } : TYPES[type.toLowerCase()] ?? TYPES.string]
  })
  return { type: "object", properties: Object.fromEntries(rows), required: rows.map(row => row[0]), additionalProperties: false }
}

/** What the answer has to be, as an option of `gen`: the first of choices, pattern and form that is set. */
function shape(rules: Rules): Record<string, unknown> {
  if (lines(rules.choices).length) return { options: lines(rules.choices) }
  if (rules.pattern) return { regex: rules.pattern }
  if (lines(rules.form).length) return { jsonSchema: schemaOf(rules.form) }
  return {}
}

/** The fields of a request. */
export function ruleFields(rules: Rules = {}): Record<string, unknown> {
  const { options, regex, jsonSchema } = shape(rules)
  const made: Record<string, unknown> = {}
  if (options) made.choice = options
  if (regex) made.regex = regex
  if (jsonSchema) made.response_format = { type: "json_schema", json_schema: { name: "form", schema: jsonSchema } }
  if (Number(rules.length) > 0) made.max_tokens = Math.floor(Number(rules.length))
  if (lines(rules.phrases).length) made.banned_phrases = lines(rules.phrases)
  return made
}

/** The same rules as a script, which can be changed further. */
export function asScript(rules: Rules): string {
  const given = { ...shape(rules), maxTokens: Math.floor(Number(rules.length)) || 200 }
  const never = lines(rules.phrases)
  const note = never.length ? `// Banned phrases are a field of the request: ${never.map(each => JSON.stringify(each)).join(", ")}\n` : ""
  return `${note}await gen(${JSON.stringify(given, null, 2)})\n`
}

const numOf = (rules: Rules) => Object.values(rules).filter(value => value.trim()).length

/** The button that opens the rules, and says how many there are. */
export function RulesChip({ lastMessage }: { lastMessage: string }) {
  const [isOpen, setOpen] = useState(false)
  talkVersion.value
  const rules = talk.value.rules ?? {}
  const change = (to: Rules) => {
    talk.value.rules = to
    if (talk.value.messages.size) keepTalk(talk.value)
    else talkVersion.value++
  }
  const set = (name: string, value: string) => change({ ...rules, [name]: value })
  const show = () => {
    showProgram({ language: "javascript", text: asScript(rules) })
    prompts.value = { ...prompts.value, javascript: lastMessage }
    asMessage.value = true
    view.value = "steer"
  }
  const count = numOf(rules)
  const area = (name: string, label: string, hint: string) => (
    <label>{label}<textarea rows={2} value={rules[name] ?? ""} placeholder={hint} onInput={event => set(name, event.currentTarget.value)} /></label>)
  return (
    <div class="rules-chip">
      <button class={count ? "chip on" : "chip"} aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>{count ? `Rules · ${count}` : "Rules"}</button>
      {isOpen && (
        <div class="rules-form settings" role="group" aria-label="Rules for the answers">
          {area("choices", "One of, one text a line", "Yes\nNo")}
          <label>Pattern<input value={rules.pattern ?? ""} placeholder="[0-9]{4}" spellcheck={false} onInput={event => set("pattern", event.currentTarget.value)} /></label>
          {area("form", "JSON with these fields, one a line", "name: string\ncolor: red | green")}
          <label>At most so many tokens<input type="number" min="1" value={rules.length ?? ""} onInput={event => set("length", event.currentTarget.value)} /></label>
          {area("phrases", "Never these phrases, one a line", "as an AI")}
          {Object.keys(shape(rules)).length > 0 && numOf({ a: rules.choices ?? "", b: rules.pattern ?? "", c: rules.form ?? "" }) > 1 &&
            <p class="foot">Of texts, pattern and fields the first one is used.</p>}
          <div class="row">
            <button onClick={show} disabled={!count}>Show as program</button>
            <button class="quiet" disabled={!count} onClick={() => change({})}>Remove all</button>
          </div>
        </div>
      )}
    </div>
  )
}
