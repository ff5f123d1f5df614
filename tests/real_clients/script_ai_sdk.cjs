// Run by Node with the genuine AI SDK of Vercel; the argument is a server's address. Fails if anything is off.

const assert = require("node:assert/strict");
const { generateText, streamText, generateObject, streamObject, Output, tool, stepCountIs } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { z } = require("zod");

const url = process.argv[2];
const compatible = createOpenAICompatible({
  name: "bridle", baseURL: url + "/v1", apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: url + "/v1", apiKey: "none" });
const anthropic = createAnthropic({ baseURL: url + "/v1", apiKey: "none" });
const models = {
  compatible: compatible("demo"), chat: openai.chat("demo"), responses: openai("demo"), anthropic: anthropic("demo"),
};
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
const usual = { maxOutputTokens: 120, temperature: 0, maxRetries: 0 };

const checks = {
  async text() {
    for (const [name, model] of Object.entries(models)) {
      const answer = await generateText({ model, system: "Answer in one word.", prompt: "What is the capital of France?", ...usual });
      assert.match(answer.text, /^Paris/, name);
      assert.equal(answer.finishReason, "stop", name);
      assert.ok(answer.usage.outputTokens > 0 && answer.usage.inputTokens > 0, name);
    }
    const completion = await generateText({ model: compatible.completionModel("demo"), prompt: "Is snow white?", ...usual });
    assert.ok(completion.text.length > 0);
  },
  async streams() {
    for (const [name, model] of Object.entries(models)) {
      const stream = streamText({ model, prompt: "Is snow white?", ...usual });
      let text = "";
      for await (const piece of stream.textStream) text += piece;
      assert.match(text, /^Yes/, name);
      assert.equal(await stream.finishReason, "stop", name);
      assert.ok((await stream.usage).outputTokens > 0, name);
    }
  },
  async tools() {
    for (const [name, model] of Object.entries(models)) {
      const asked = [];
      const get_weather = tool({
        description: "Get the weather in a city.",
        inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
        execute: async ({ city }) => (asked.push(city), "sunny"),
      });
      const question = { model, tools: { get_weather }, prompt: "What is the weather in Rome?", ...usual };
      const answer = await generateText({ ...question, stopWhen: stepCountIs(3) });
      assert.deepEqual(asked, ["Rome"], name);
      assert.match(answer.text, /sunny/, name);
      const stream = streamText({ ...question, toolChoice: "required" });
      assert.deepEqual((await stream.toolCalls).map((call) => call.input), [{ city: "Rome" }], name);
      assert.equal(await stream.finishReason, "tool-calls", name);
    }
  },
  async structure() {
    for (const [name, model] of Object.entries(models)) {
      const question = { model, schema: Person, prompt: "Tell me about a person.", ...usual };
      Person.parse((await generateObject(question)).object);
      const stream = streamObject(question);
      let parts = 0;
      for await (const _ of stream.partialObjectStream) parts += 1;
      Person.parse(await stream.object);
      assert.ok(parts > 0, name);
      const colors = await generateObject({ model, output: "enum", enum: ["red", "blue"], prompt: "Which color?", ...usual });
      assert.ok(["red", "blue"].includes(colors.object), name);
      const output = Output.object({ schema: Person });
      Person.parse((await generateText({ model, output, prompt: "Tell me about a person.", ...usual })).output);
    }
  },
  async thoughts() {
    const answer = await generateText({
      model: models.compatible, prompt: "What is 3 + 4?", ...usual,
      providerOptions: { bridle: { thinking_budget: 60 } },
    });
    assert.ok(answer.reasoningText.length > 0);
    assert.doesNotMatch(answer.text, /think>/);
  },
  async fields_of_ours() {
    const options = { bridle: { regex: "[0-9]{3}" } };
    const answer = await generateText({ model: models.compatible, prompt: "A number?", ...usual, providerOptions: options });
    assert.match(answer.text, /^[0-9]{3}$/);
  },
  async errors() {
    for (const [name, model] of Object.entries(models)) {
      if (name === "anthropic") continue; // it sends no temperature that Anthropic's own server would refuse
      const ask = () => generateText({ model, prompt: "x", ...usual, temperature: -1 });
      await assert.rejects(ask, (error) => {
        assert.equal(error.statusCode, 400, name + String(error));
        assert.match(error.message, /temperature/, name);
        return true;
      });
    }
  },
};

(async () => {
  for (const [name, check] of Object.entries(checks)) {
    try { await check(); console.log("check_" + name, "ok"); }
    catch (error) { console.log("check_" + name, "FAIL", error); process.exitCode = 1; }
  }
})();
