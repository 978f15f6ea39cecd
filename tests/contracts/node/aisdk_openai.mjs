// The default OpenAI provider of Vercel's AI SDK, which refers to stored items by their ids: a tool call and its result.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } }, additionalProperties: false };
const add = tool({ description: "Adds", inputSchema: jsonSchema(parameters), execute: async ({ a, b }) => `sum-${a + b}` });
const bodies = [];
const provider = createOpenAI({
  baseURL: `${process.env.SERVER}/v1`,
  apiKey: "unused",
  fetch: (url, options) => { bodies.push(JSON.parse(options.body)); return fetch(url, options); },
});
const done = await generateText({
  model: provider(process.env.MODEL),
  prompt: process.argv[2] ?? "What is the sum?",
  tools: { add },
  stopWhen: stepCountIs(3),
  maxRetries: 0,
  temperature: 0,
  providerOptions: { openai: { textVerbosity: "low" } },
});
console.log(JSON.stringify({
  text: done.text,
  usages: done.steps.map((step) => step.usage),
  items: bodies.map((body) => body.input.map((item) => item.type ?? item.role)),
  fields: Object.keys(bodies[0]),
}));
