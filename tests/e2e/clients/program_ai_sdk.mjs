// What users of `ai` with `@ai-sdk/openai-compatible` do. Run by test_other_clients.py with the server's URL.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const model = createOpenAICompatible({
  name: "ds4",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
})("m");
const same = { model, prompt: "hello", seed: 5, temperature: 0, maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { far: { type: "boolean" } },
  required: ["far"],
  additionalProperties: false,
});

// A text and its stream say the same.
const whole = await generateText({ ...same, maxOutputTokens: 20 });
const stream = streamText({ ...same, maxOutputTokens: 20 });
let text = "";
for await (const delta of stream.textStream) text += delta;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

// An agent's loop: forced calls are run, and their results handed back.
const seen = [];
const agent = streamText({
  ...same,
  maxOutputTokens: 200,
  tools: {
    look: tool({
      inputSchema: schema,
      execute: async ({ far }) => {
        seen.push(far);
        return "a wall";
      },
    }),
  },
  toolChoice: { type: "tool", toolName: "look" },
  stopWhen: stepCountIs(2),
});
const kinds = new Set();
for await (const part of agent.fullStream) {
  assert.notEqual(part.type, "error", JSON.stringify(part));
  kinds.add(part.type);
}
assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-result"), [...kinds].join());
assert.equal(typeof seen[0], "boolean");
assert.equal((await agent.steps).length, 2);

// A form.
const formed = await generateText({ ...same, maxOutputTokens: 200, output: Output.object({ schema }) });
assert.equal(typeof formed.output.far, "boolean");

await assert.rejects(
  generateText({ ...same, temperature: -1 }),
  (error) => APICallError.isInstance(error) && error.statusCode === 400 && error.message.includes("temperature"),
);
