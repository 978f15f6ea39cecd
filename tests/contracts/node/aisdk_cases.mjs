// Vercel's AI SDK with tools, objects and refused input, over both of its OpenAI providers: results as one JSON object.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const name = process.env.MODEL;
const baseURL = `${process.env.SERVER}/v1`;
const compatible = createOpenAICompatible({ name: "chatcache", baseURL, apiKey: "unused", includeUsage: true, supportsStructuredOutputs: true });
const models = { chat: compatible(name), responses: createOpenAI({ baseURL, apiKey: "unused" })(name) };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const weather = tool({ description: "How it is", inputSchema: jsonSchema(parameters), execute: async ({ city }) => `sunny-in-${city}` });
const settings = { maxOutputTokens: 300, maxRetries: 0 };

// `forceReasoning`: the SDK asks only models with OpenAI's names for a summary.
const providerOptions = { openai: { forceReasoning: true, reasoningSummary: "auto", store: false } };

async function tools(model) {
  const steps = { model, prompt: "Weather in Bern?", tools: { weather }, stopWhen: stepCountIs(3), providerOptions, ...settings };
  const whole = await generateText(steps);
  const errors = [];
  const stream = streamText({ ...steps, onError: ({ error }) => errors.push(String(error)) });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  const reasoning = [whole.steps[0].reasoningText, (await stream.steps)[0].reasoningText];
  return {
    text: whole.text, streamed: text, errors, reasoning,
    calls: whole.steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input])),
    usages: whole.steps.map((step) => step.usage),
  };
}

async function objects(model) {
  const asked = { model, prompt: "Name a city as JSON", schema: jsonSchema(parameters), ...settings };
  const stream = streamObject(asked);
  let last = null;
  for await (const part of stream.partialObjectStream) last = part;
  return { whole: (await generateObject(asked)).object, last, streamed: await stream.object };
}

async function refused(model) {
  const content = [{ type: "text", text: "What is this?" }, { type: "image", image: new Uint8Array([1, 2]), mediaType: "image/png" }];
  try {
    await generateText({ model, messages: [{ role: "user", content }], ...settings });
  } catch (error) {
    return { isCallError: APICallError.isInstance(error), status: error.statusCode, message: error.message };
  }
  return null;
}

const found = {};
for (const [api, model] of Object.entries(models))
  found[api] = { tools: await tools(model), objects: await objects(model), refused: await refused(model) };
console.log(JSON.stringify(found));
