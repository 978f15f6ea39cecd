// eventsource-parser, byte by byte or in one piece: the stream on stdin as events.
import { createParser } from "eventsource-parser";

const bytes = [];
for await (const chunk of process.stdin) bytes.push(chunk);
const whole = Buffer.concat(bytes);
const step = Number(process.argv[2]) || whole.length;
const events = [], errors = [], comments = [];
const parser = createParser({
  onEvent: (event) => events.push(event),
  onError: (error) => errors.push(String(error)),
  onComment: (comment) => comments.push(comment),
});
const decoder = new TextDecoder();
for (let at = 0; at < whole.length; at += step) parser.feed(decoder.decode(whole.subarray(at, at + step), { stream: true }));
console.log(JSON.stringify({ events, errors, comments }));
