// An agent inside the engine: the model calls a tool, and two MCP servers answer while its KV waits.
//
//     bridle serve demo --tools examples/tools.toml
//     bridle run examples/agent.js
//
// The model writes which tool it wants; a schema leaves it no way to invent one. The script looks up the time zone of the
// city with one server and the time there with another, and writes the result. Only those tokens are computed then: the
// conversation before them stays where it is.
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

async function main() {
  await $`<|system|>Tools:\n- get_time(city: string): Get the time in a city.<|end|>`
  await $`<|user|>${QUESTION}<|end|><|assistant|><tool_call>\n`
  const { city } = JSON.parse(await gen({ jsonSchema: CALL, maxTokens: 60 })).arguments
  const result = await getTime(city).then((time) => ({ time }), (error) => ({ error: error.message }))
  console.log("called:", city, JSON.stringify(result))
  await $`\n</tool_call><|end|><|tool|>${JSON.stringify(result)}<|end|><|assistant|>`
  await gen({ stopAt: ".", maxTokens: 30, storeVar: "answer" })
}

start(main)
