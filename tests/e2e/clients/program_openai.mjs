// What users of the npm package `openai` do. Run by test_other_clients.py with the server's URL.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const same = { model: "m", seed: 5, temperature: 0, max_tokens: 20, messages };
const parameters = {
  type: "object",
  properties: { far: { type: "boolean" } },
  required: ["far"],
  additionalProperties: false,
};

// A chat and its stream say the same.
const whole = await client.chat.completions.create(same);
let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...same,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.total_tokens, whole.usage.total_tokens);

// The client's own agent loop: it runs the calls and goes on with their results.
const seen = [];
const runner = client.chat.completions.runTools(
  {
    ...same,
    max_tokens: 200,
    stream: true,
    tool_choice: { type: "function", function: { name: "look" } },
    tools: [
      {
        type: "function",
        function: {
          name: "look",
          parameters,
          parse: JSON.parse,
          function: (given) => {
            seen.push(given.far);
            return "a wall";
          },
        },
      },
    ],
  },
  { maxChatCompletions: 2 },
);
await runner.done();
assert.equal(typeof seen[0], "boolean");

// A form.
const formed = await client.chat.completions.parse({
  ...same,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "fact", strict: true, schema: parameters } },
});
assert.equal(typeof JSON.parse(formed.choices[0].message.content).far, "boolean");

// Responses: events in order, a stored turn, its removal.
const events = [];
const first = client.responses
  .stream({ model: "m", input: "hello", max_output_tokens: 12 })
  .on("event", (event) => events.push(event.sequence_number));
const response = await first.finalResponse();
assert.deepEqual(events, [...events.keys()]);
const second = await client.responses.create({
  model: "m",
  input: "and?",
  max_output_tokens: 8,
  previous_response_id: response.id,
});
assert.ok(second.usage.input_tokens > response.usage.input_tokens);
assert.equal((await client.responses.retrieve(response.id)).output_text, response.output_text);
await client.responses.delete(response.id);
await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);

await assert.rejects(client.chat.completions.create({ ...same, temperature: -1 }), OpenAI.BadRequestError);

// Who leaves in the middle of a stream is let go.
const left = await client.chat.completions.create({ ...same, max_tokens: 4000, stream: true });
for await (const _ of left) break;
left.controller.abort();
