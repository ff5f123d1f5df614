// Run by Node with the genuine client of Ollama in JavaScript; the argument is a server's address. Fails if anything is
// off.

const assert = require("node:assert/strict");
const { Ollama } = require("ollama");

const client = new Ollama({ host: process.argv[2] });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { temperature: 0, num_predict: 60 };
const city = { type: "object", properties: { city: { type: "string", enum: ["Rome", "Oslo"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Get the weather in a city.", parameters: city } }];

const checks = {
  async chat() {
    const whole = await client.chat({ model: "demo", messages, options });
    assert.match(whole.message.content, /Paris/);
    let text = "";
    let last;
    for await (last of await client.chat({ model: "demo", messages, options, stream: true })) text += last.message.content;
    assert.equal(text, whole.message.content);
    assert.equal(last.done && last.eval_count, whole.eval_count);
  },
  async generate() {
    const whole = await client.generate({ model: "demo", prompt: "What is the capital of France?", options });
    assert.match(whole.response, /Paris/);
    let text = "";
    for await (const part of await client.generate({ model: "demo", prompt: "Is snow white?", options, stream: true })) text += part.response;
    assert.ok(text);
  },
  async formats() {
    const answer = await client.chat({ model: "demo", messages, format: city, options });
    assert.ok(["Rome", "Oslo"].includes(JSON.parse(answer.message.content).city));
  },
  async tools() {
    const asked = [{ role: "user", content: "What is the weather in Rome?" }];
    const answer = await client.chat({ model: "demo", messages: asked, tools, options });
    assert.equal(answer.message.tool_calls[0].function.name, "get_weather");
    const result = { role: "tool", tool_name: "get_weather", content: "sunny" };
    assert.ok((await client.chat({ model: "demo", messages: [...asked, answer.message, result], tools, options })).message.content);
  },
  async embeddings() {
    assert.equal((await client.embed({ model: "demo", input: ["a", "b"] })).embeddings.length, 2);
  },
  async models() {
    assert.deepEqual((await client.list()).models.map((model) => model.name), ["demo"]);
    assert.equal((await client.ps()).models[0].name, "demo");
    assert.ok((await client.show({ model: "demo" })).capabilities.includes("completion"));
    assert.ok((await client.version()).version);
  },
  async refusals() {
    await assert.rejects(client.chat({ model: "nobody", messages }), /not served/);
    await assert.rejects(client.pull({ model: "smollm2" }), /allow-pull/);
  },
};

(async () => {
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log(name, "ok");
  }
})();
