// An agent inside the engine: the model calls a tool, and two MCP servers answer while its KV waits.
//
//     bridle serve demo --tools examples/tools.toml
//     bridle run examples/agent.js
//
// The model writes which tool it wants; a schema leaves it no way to invent one. The script looks up the time zone of the
// city with one server and the time there with another, and adds the result to the conversation. Only what is new of it
// is computed then.
import { Label } from "aici"

const QUESTION = "What time is it in Tokyo?"
const closed = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
})
const CALL = closed({ name: { const: "get_time" }, arguments: closed({ city: { type: "string" } }) })

/** The time there, as hours and minutes. */
async function getTime(city) {
  const timezone = await tool("town.zone", { city }).text()
  const now = await tool("time.get_current_time", { timezone }).json()
  return now.datetime.slice(11, 16)
}

const TOOL = { name: "get_time", description: "Get the time in a city.", parameters: closed({ city: { type: "string" } }) }

async function main() {
  const begin = new Label()
  const tools = [{ type: "function", function: TOOL }]
  const messages = [{ role: "user", content: QUESTION }]
  await chat(messages, { tools })
  await $`<tool_call>\n`
  const call = JSON.parse(await gen({ jsonSchema: CALL, maxTokens: 60 }))
  const { city } = call.arguments
  const result = await getTime(city).then((time) => ({ time }), (error) => ({ error: error.message }))
  console.log("called:", city, JSON.stringify(result))
  messages.push({ role: "assistant", content: "", tool_calls: [{ type: "function", function: call }] })
  messages.push({ role: "tool", content: JSON.stringify(result) })
  await chat(messages, { tools, following: begin })
  await gen({ stopAt: ".", maxTokens: 30, storeVar: "answer" })
}

start(main)
