// OpenAI's and Anthropic's clients for Node, and the AI SDK, against a server: node node.mjs URL KEY
//
// Run by `check_clients.py --node`, which starts the server. Fails at the first thing that is not as it should be.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { createOpenAI } from "@ai-sdk/openai";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const question = [{ role: "user", content: "What is 17 + 25?" }];
const asked = [{ role: "user", content: "Weather in Oslo?" }];
const answer = "17 + 25 = 42";
const weather = z.strictObject({ city: z.enum(["Paris", "Oslo"]), days: z.number().int().min(1).max(7) });
const parameters = z.toJSONSchema(weather);
const options = { maxRetries: 0, apiKey };

async function collect(stream) {
  const all = [];
  for await (const part of stream) all.push(part);
  return all;
}

const openai = new OpenAI({ ...options, baseURL: `${url}/v1` });
const anthropic = new Anthropic({ ...options, baseURL: url });
const sdk = createOpenAI({ apiKey, baseURL: `${url}/v1` });

const checks = {
  async "openai: chat"() {
    const request = { model: "demo", messages: question, temperature: 0 };
    assert.equal((await openai.chat.completions.create(request)).choices[0].message.content, answer);
    const chunks = await collect(await openai.chat.completions.create({ ...request, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), answer);
    const wrong = openai.chat.completions.create({ ...request, model: "nothing" });
    await assert.rejects(wrong, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },
  async "openai: tools"() {
    const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
    const request = { model: "demo", messages: asked, tools, tool_choice: "required", seed: 1 };
    const made = await openai.chat.completions.stream(request).finalChatCompletion();
    const [call] = made.choices[0].message.tool_calls;
    weather.parse(JSON.parse(call.function.arguments));
    const history = [...asked, made.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
    assert((await openai.chat.completions.create({ model: "demo", messages: history, tools, max_tokens: 20 })).choices[0]);
  },
  async "openai: responses"() {
    const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
    const request = { model: "demo", input: asked, tools, tool_choice: "required" };
    const made = await openai.responses.stream(request).finalResponse();
    weather.parse(JSON.parse(made.output[0].arguments));
    assert.equal((await openai.responses.create({ model: "demo", input: question, temperature: 0 })).output_text, answer);
  },
  async "openai: embeddings"() {
    const { data } = await openai.embeddings.create({ model: "demo", input: ["a", "b"] });
    const length = (values) => values.reduce((sum, value) => sum + value * value, 0);
    assert(data.length === 2 && data.every(({ embedding }) => Math.abs(length(embedding) - 1) < 1e-5));
  },
  async "anthropic: messages"() {
    const request = { model: "demo", max_tokens: 40, messages: question };
    const whole = await anthropic.messages.create(request);
    assert(whole.content[0].type === "text" && whole.stop_reason === "end_turn");
    assert((await anthropic.messages.stream(request).finalText()).length > 0);
    assert((await anthropic.messages.countTokens({ model: "demo", messages: question })).input_tokens > 5);
    await assert.rejects(anthropic.messages.create({ ...request, model: "nothing" }), Anthropic.NotFoundError);
  },
  async "anthropic: tools"() {
    const tools = [{ name: "get_weather", input_schema: parameters }];
    const request = { model: "demo", max_tokens: 200, messages: asked, tools, tool_choice: { type: "any" } };
    const made = await anthropic.messages.stream(request).finalMessage();
    weather.parse(made.content[0].input);
    const result = { type: "tool_result", tool_use_id: made.content[0].id, content: "sunny" };
    const messages = [...asked, { role: "assistant", content: made.content }, { role: "user", content: [result] }];
    assert((await anthropic.messages.create({ ...request, messages, tool_choice: { type: "auto" } })).content);
  },
};

for (const [name, model] of [["chat", sdk.chat("demo")], ["responses", sdk.responses("demo")]]) {
  checks[`ai sdk: ${name}`] = async () => {
    const common = { model, maxRetries: 0 };
    assert.equal((await generateText({ ...common, messages: question, temperature: 0 })).text, answer);
    const streamed = streamText({ ...common, messages: question, temperature: 0 });
    assert.equal((await collect(streamed.textStream)).join(""), answer);
    const ran = [];
    const tools = {
      get_weather: tool({
        description: "Weather",
        inputSchema: weather,
        execute: async (input) => { ran.push(weather.parse(input)); return "sunny"; },
      }),
    };
    // The call, its result, and an answer to that.
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const stopWhen = stepCountIs(2);
    const turn = { ...common, messages: asked, tools, prepareStep, stopWhen, maxOutputTokens: 120 };
    const { steps } = await generateText(turn);
    assert(steps.length === 2 && ran.length > 0, JSON.stringify(steps));
    const seen = ran.length;
    await collect(streamText(turn).fullStream);
    assert(ran.length > seen);
    const { object } = await generateObject({ ...common, messages: asked, schema: weather });
    weather.parse(object);
  };
}
checks["ai sdk: embeddings"] = async () => {
  const { embeddings } = await embedMany({ model: sdk.embedding("demo"), values: ["a", "b"], maxRetries: 0 });
  assert.equal(embeddings.length, 2);
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`${name}: ok`);
}
