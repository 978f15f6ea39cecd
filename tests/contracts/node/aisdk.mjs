// Vercel's AI SDK, which validates every chunk, against one server.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({ name: "chatcache", baseURL: `${process.env.SERVER}/v1`, apiKey: "unused", includeUsage: true });
const model = provider(process.env.MODEL);
const asked = { model, prompt: "Hello, how are you?", seed: 7, maxOutputTokens: 40, maxRetries: 0 };

const whole = await generateText(asked);
const errors = [];
const stream = streamText({ ...asked, onError: ({ error }) => errors.push(String(error)) });
let text = "";
for await (const piece of stream.textStream) text += piece;
console.log(JSON.stringify({
  whole: { text: whole.text, finish: whole.finishReason, usage: whole.usage },
  stream: { text, finish: await stream.finishReason, usage: await stream.usage },
  errors,
}));
