// Ollama's JavaScript client against one server: everything it received, as one JSON object on stdout.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.SERVER });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Weather in Zürich?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "How it is", parameters } }];

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const scenarios = {
  whole: () => client.chat({ model, messages, tools }),
  streamed: async () => all(await client.chat({ model, messages, tools, stream: true })),
  answered: async () => {
    const message = JSON.parse(process.argv[3]);
    const history = [...messages, message, { role: "tool", tool_name: "weather", content: "sunny" }];
    return client.chat({ model, messages: history, tools });
  },
  generated: async () => all(await client.generate({ model, prompt: "Count", stream: true, options: { num_predict: 3 } })),
  constrained: () => client.chat({ model, messages, format: parameters }),
  server: async () => ({ list: await client.list(), ps: await client.ps(), show: await client.show({ model }) }),
  embedded: async () => ({
    both: await client.embed({ model, input: ["Hello there", "How are you?"] }),
    one: await client.embeddings({ model, prompt: "How are you?" }),
  }),
  left: async () => {
    const stream = await client.chat({ model, messages, stream: true });
    for await (const part of stream) {
      if (part.message.content) { stream.abort(); return true; }
    }
    return false;
  },
  refused: async () => {
    const asked = [
      () => client.chat({ model, messages: [{ ...messages[0], images: ["aGk="] }] }),
      () => client.pull({ model: "llama3" }),
    ];
    const errors = [];
    for (const ask of asked) {
      try { await ask(); } catch (error) { errors.push({ status: error.status_code, message: error.message }); }
    }
    return errors;
  },
};

console.log(JSON.stringify(await scenarios[process.argv[2]]()));
