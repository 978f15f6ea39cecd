// Anthropic's TypeScript client against one server: everything it received, as one JSON object on stdout.
import Anthropic, { BadRequestError, NotFoundError } from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.SERVER, apiKey: "unused", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Hello, how are you?" }];
const tools = [{
  name: "weather", description: "How it is", cache_control: { type: "ephemeral" },
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
}];
const asked = { model, messages, tools, max_tokens: 300 };

async function whole() {
  const { data, request_id } = await client.messages.create(asked).withResponse();
  return { message: data, id: request_id };
}

async function streamed() {
  const kinds = [];
  let text = "", thinking = "", json = "";
  const stream = client.messages.stream(asked);
  stream.on("text", (piece) => { text += piece; });
  stream.on("thinking", (piece) => { thinking += piece; });
  stream.on("inputJson", (piece) => { json += piece; });
  for await (const event of stream) kinds.push(event.type);
  return { kinds, text, thinking, json, message: await stream.finalMessage() };
}

async function answered() {
  const { content } = JSON.parse(process.argv[3]);
  const call = content.find((block) => block.type === "tool_use");
  const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const history = [...messages, { role: "assistant", content }, { role: "user", content: [result] }];
  return { message: await client.messages.create({ ...asked, messages: history }) };
}

async function counted() {
  return await client.messages.countTokens({ model, messages, tools });
}

async function refused() {
  const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "AA==" } };
  const errors = [];
  for (const fields of [{ messages: [{ role: "user", content: [image] }] }, { model: "claude-opus-5-5" }]) {
    try {
      await client.messages.create({ ...asked, ...fields });
    } catch (error) {
      const kind = error instanceof BadRequestError ? "bad" : error instanceof NotFoundError ? "missing" : "other";
      errors.push({ kind, id: error.requestID, message: error.message });
    }
  }
  return errors;
}

async function left() {
  const stream = await client.messages.create({ ...asked, stream: true });
  for await (const event of stream) if (event.type === "content_block_delta") break;
  return true;
}

async function failing() {
  let text = "";
  try {
    for await (const event of await client.messages.create({ ...asked, stream: true }))
      text += event.delta?.text ?? "";
  } catch (error) {
    return { text, isError: error instanceof Anthropic.APIError, message: error.message };
  }
  return { text };
}

const scenarios = { whole, streamed, answered, counted, refused, left, failing };
console.log(JSON.stringify(await scenarios[process.argv[2]]()));
