// The official JavaScript client against one server: everything it said, as one JSON object on stdout.
import OpenAI, { BadRequestError } from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const client = new OpenAI({ baseURL: `${process.env.SERVER}/v1`, apiKey: "unused", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Hello, how are you?" }];

async function plain() {
  const answer = await client.chat.completions.create({ model, messages, seed: 7, max_tokens: 40 });
  return { text: answer.choices[0].message.content, finish: answer.choices[0].finish_reason, usage: answer.usage };
}

async function streamed() {
  const stream = await client.chat.completions.create({
    model, messages, seed: 7, max_tokens: 40, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null, finish = null;
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      text += choice.delta.content ?? "";
      finish = choice.finish_reason ?? finish;
    }
    usage = chunk.usage ?? usage;
  }
  return { text, finish, usage };
}

async function helper() {
  const runner = client.chat.completions.stream({ model, messages, n: 3, seed: 1, max_tokens: 60 });
  const deltas = ["", "", ""];
  runner.on("chunk", (chunk) => {
    for (const choice of chunk.choices) deltas[choice.index] += choice.delta.content ?? "";
  });
  const final = await runner.finalChatCompletion();
  return { deltas, texts: final.choices.map((choice) => choice.message.content), finishes: final.choices.map((c) => c.finish_reason) };
}

async function left() {
  const stream = await client.chat.completions.create({ model, messages, n: 4, max_tokens: 900, stream: true, ignore_eos: true });
  for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break;
  return true;
}

async function responses() {
  const numbers = [], kinds = [];
  let text = "";
  const stream = await client.responses.create({ model, input: "Hello!", stream: true, max_output_tokens: 20 });
  let last = null;
  for await (const event of stream) {
    numbers.push(event.sequence_number);
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  const next = await client.responses.create({
    model, input: "And then?", previous_response_id: last.response.id, max_output_tokens: 8,
  });
  const again = [];
  const resumed = await client.responses.retrieve(last.response.id, { stream: true, starting_after: 3 });
  for await (const event of resumed) again.push(event.sequence_number);
  const stored = await client.responses.retrieve(last.response.id);
  const whole = last.response.output[0].content[0].text;
  return { numbers, kinds, text, whole, usage: last.response.usage, next: next.usage, again, stored: stored.output_text };
}

async function responsesHelper() {
  const runner = client.responses.stream({ model, input: "Hello!", max_output_tokens: 20 });
  let text = "";
  runner.on("response.output_text.delta", (event) => { text += event.delta; });
  const final = await runner.finalResponse();
  return { text, whole: final.output_text };
}

async function socket() {
  const connection = new ResponsesWS(client);
  const numbers = [], texts = {};
  const ended = [];
  const done = new Promise((resolve, reject) => {
    connection.on("error", reject);
    connection.on("event", (event) => {
      const lane = event.stream_id ?? "";
      if (event.type === "response.output_text.delta") texts[lane] = (texts[lane] ?? "") + event.delta;
      if (lane === "") numbers.push(event.sequence_number);
      if (event.type === "response.completed" || event.type === "response.incomplete") {
        ended.push({ lane, text: event.response.output[0].content[0].text, usage: event.response.usage });
        if (lane === "" && ended.length === 1)
          for (const stream_id of ["a", "b"])
            connection.send({
              type: "response.create", stream_id, model, input: stream_id,
              previous_response_id: event.response.id, max_output_tokens: 10,
            });
        if (ended.length === 3) resolve();
      }
    });
  });
  connection.send({ type: "response.create", model, input: "Hello!", max_output_tokens: 12 });
  await done;
  connection.close();
  return { numbers, texts, ended };
}

async function refused() {
  try {
    await client.chat.completions.create({ model, messages, n: 0 });
  } catch (error) {
    return { isBadRequest: error instanceof BadRequestError, code: error.code, param: error.param, id: error.requestID };
  }
  return null;
}

async function image() {
  const content = [{ type: "image_url", image_url: { url: "data:image/png;base64,aGk=" } }];
  try {
    await client.chat.completions.create({ model, messages: [{ role: "user", content }] });
  } catch (error) {
    return { isBadRequest: error instanceof BadRequestError, code: error.code, message: error.message };
  }
  return null;
}

async function failing() {
  const stream = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 200, ignore_eos: true, seed: 11 });
  let text = "";
  try {
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  } catch (error) {
    return { text, name: error.constructor.name, message: error.message, code: error.code };
  }
  return { text };
}

async function embeddings() {
  const input = ["Hello there", "How are you?"];
  const packed = await client.embeddings.create({ model, input }); // the client asks for base64
  const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
  const tokens = await client.embeddings.create({ model, input: [[1, 2, 3]], dimensions: 3 });
  return { packed: packed.data, plain: plain.data, tokens: tokens.data, usage: packed.usage };
}

const scenarios = { embeddings, plain, streamed, helper, left, responses, responsesHelper, socket, refused, image, failing };
const said = {};
for (const name of process.argv.slice(2)) said[name] = await scenarios[name]();
console.log(JSON.stringify(said));
