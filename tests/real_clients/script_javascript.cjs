// Run by Node with the genuine clients in JavaScript: OpenAI's, Anthropic's and Hugging Face's; the argument is a
// server's address. Fails if anything is off.

const assert = require("node:assert/strict");
const OpenAI = require("openai").default;
const Anthropic = require("@anthropic-ai/sdk").default;
const { InferenceClient } = require("@huggingface/inference");
const { zodResponseFormat, zodTextFormat, zodFunction } = require("openai/helpers/zod");
const { z } = require("zod");

const url = process.argv[2];
const openai = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const hub = new InferenceClient("none", { endpointUrl: url });
const messages = [{ role: "user", content: "Is snow white?" }];
const weather = [{ role: "user", content: "What is the weather in Rome?" }];
const usual = { model: "demo", messages, max_tokens: 120, temperature: 0 };
const city = { type: "object", properties: { city: { type: "string", enum: ["Rome", "Oslo"] } }, required: ["city"] };
const tool = { name: "get_weather", description: "Get the weather in a city." };
const tools = [{ type: "function", function: { ...tool, parameters: city } }];
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
const about = [{ role: "user", content: "Tell me about a person." }];

async function refused(ask, status, words) {
  await assert.rejects(ask, (error) => {
    assert.equal(error.status ?? error.httpResponse?.status, status, String(error));
    assert.match(JSON.stringify(error.error ?? error.httpResponse?.body ?? error.message), words);
    return true;
  });
}

const checks = {
  async openai_chat() {
    const answer = await openai.chat.completions.create(usual);
    assert.match(answer.choices[0].message.content, /^Yes/);
    const stream = await openai.chat.completions.create({ ...usual, stream: true, stream_options: { include_usage: true } });
    let text = "", usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, answer.choices[0].message.content);
    assert.equal(usage.completion_tokens, answer.usage.completion_tokens);
    const gathered = await openai.chat.completions.stream(usual).finalMessage();
    assert.equal(gathered.content, text);
  },
  async openai_completions_and_models() {
    const body = { model: "demo", prompt: "The capital of France is", max_tokens: 8, temperature: 0 };
    assert.equal((await openai.completions.create(body)).choices[0].text, " Paris.");
    const names = [];
    for await (const model of openai.models.list()) names.push(model.id);
    assert.ok(names.includes("demo"));
  },
  async openai_structure() {
    const format = zodResponseFormat(Person, "person");
    const parsed = await openai.chat.completions.parse({ ...usual, messages: about, response_format: format });
    Person.parse(parsed.choices[0].message.parsed);
    const response = await openai.responses.parse({
      model: "demo", input: about, max_output_tokens: 120, text: { format: zodTextFormat(Person, "person") },
    });
    Person.parse(response.output_parsed);
    const steered = await openai.chat.completions.create({ ...usual, regex: "[0-9]{3}" });
    assert.match(steered.choices[0].message.content, /^[0-9]{3}$/);
  },
  async openai_tools() {
    for (const choice of ["required", "auto", { type: "function", function: { name: "get_weather" } }]) {
      const answer = await openai.chat.completions.create({ ...usual, messages: weather, tools, tool_choice: choice });
      assert.deepEqual(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments), { city: "Rome" });
    }
    const asked = [];
    const runner = openai.chat.completions.runTools({
      ...usual, messages: weather, stream: true,
      tools: [{
        type: "function",
        function: { ...tool, parameters: city, parse: JSON.parse, function: (given) => (asked.push(given.city), "sunny") },
      }],
    });
    assert.match(await runner.finalContent(), /sunny/);
    assert.deepEqual(asked, ["Rome"]);
    const typed = zodFunction({ ...tool, parameters: z.object({ city: z.enum(["Rome", "Oslo"]) }) });
    const strict = await openai.chat.completions.parse({ ...usual, messages: weather, tools: [typed], tool_choice: "required" });
    assert.deepEqual(strict.choices[0].message.tool_calls[0].function.parsed_arguments, { city: "Rome" });
  },
  async openai_responses() {
    const events = [];
    for await (const event of openai.responses.stream({ model: "demo", input: "Is snow white?" })) events.push(event.type);
    assert.equal(events[0], "response.created");
    assert.equal(events.at(-1), "response.completed");
    const answer = await openai.responses.create({ model: "demo", input: "Is snow white?" });
    assert.match(answer.output_text, /^Yes/);
  },
  async openai_errors() {
    await refused(() => openai.chat.completions.create({ ...usual, temperature: -1 }), 400, /temperature/);
    await refused(() => openai.chat.completions.create({ ...usual, model: "nobody" }), 404, /nobody/);
    await refused(() => openai.chat.completions.create({ ...usual, custom_logit_processor: "x" }), 400, /controller/);
  },
  async openai_stops_early() {
    const stream = await openai.chat.completions.create({ ...usual, messages: about, max_tokens: 1500, stream: true, ignore_eos: true });
    for await (const chunk of stream) if (chunk.choices.length) break;
    assert.match((await openai.chat.completions.create(usual)).choices[0].message.content, /^Yes/);
  },
  async anthropic_messages() {
    const answer = await anthropic.messages.create(usual);
    assert.match(answer.content[0].text, /^Yes/);
    const stream = anthropic.messages.stream(usual);
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const whole = await stream.finalMessage();
    assert.equal(whole.content[0].text, text);
    assert.equal(text, answer.content[0].text);
    assert.equal(whole.usage.output_tokens, answer.usage.output_tokens);
    const count = await anthropic.messages.countTokens({ model: "demo", messages });
    assert.ok(count.input_tokens > 0);
  },
  async anthropic_tools() {
    const offered = [{ ...tool, input_schema: city }];
    for (const type of ["any", "auto"]) {
      const answer = await anthropic.messages.create({ ...usual, messages: weather, tools: offered, tool_choice: { type } });
      assert.deepEqual(answer.content.at(-1).input, { city: "Rome" });
      assert.equal(answer.stop_reason, "tool_use");
      const stream = anthropic.messages.stream({ ...usual, messages: weather, tools: offered, tool_choice: { type } });
      assert.deepEqual((await stream.finalMessage()).content.at(-1).input, { city: "Rome" });
    }
  },
  async anthropic_errors() {
    await refused(() => anthropic.messages.create({ ...usual, temperature: -1 }), 400, /temperature/);
    await refused(() => anthropic.messages.create({ ...usual, model: "nobody" }), 404, /nobody/);
  },
  async hub_chat() {
    const body = { model: "demo", messages, max_tokens: 20, temperature: 0 };
    assert.match((await hub.chatCompletion(body)).choices[0].message.content, /^Yes/);
    let text = "";
    for await (const chunk of hub.chatCompletionStream(body)) text += chunk.choices[0]?.delta?.content ?? "";
    assert.match(text, /^Yes/);
  },
  async hub_text() {
    const body = { inputs: "The capital of France is", parameters: { max_new_tokens: 8, return_full_text: false } };
    assert.equal((await hub.textGeneration(body)).generated_text, " Paris.");
    let text = "";
    for await (const chunk of hub.textGenerationStream(body)) text += chunk.choices[0].text; // as the server sends them
    assert.equal(text, " Paris.");
    const number = { ...body, parameters: { ...body.parameters, grammar: { type: "regex", value: "[0-9]{3}" } } };
    assert.match((await hub.textGeneration(number)).generated_text, /^[0-9]{3}$/);
  },
  async hub_errors() {
    await assert.rejects(() => hub.textGeneration({ inputs: "x", parameters: { temperature: -1 } }), (error) => {
      assert.match(JSON.stringify([String(error), error.httpResponse]), /temperature|422/);
      return true;
    });
  },
};

(async () => {
  for (const [name, check] of Object.entries(checks)) {
    try { await check(); console.log("check_" + name, "ok"); }
    catch (error) { console.log("check_" + name, "FAIL", error); process.exitCode = 1; }
  }
})();
