// The Vercel AI SDK: plain, streaming, and with a tool.
//   npm install --prefix examples && node examples/22_ai_sdk.mjs [URL]
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const podway = createOpenAICompatible({
  name: "podway",
  baseURL: `${url}/v1`,
  apiKey: "any",
  includeUsage: true,
});
const listed = await (await fetch(`${url}/v1/models`)).json();
const model = podway(listed.data[0].id);

const whole = await generateText({ model, prompt: "Hello!", temperature: 0 });
console.log("whole: ", whole.text, `(${whole.finishReason}, ${whole.usage.outputTokens} tokens)`);

const stream = streamText({ model, prompt: "What is 2 + 3?", temperature: 0 });
process.stdout.write("stream: ");
for await (const text of stream.textStream) process.stdout.write(text);
console.log(`  (${await stream.finishReason}, ${(await stream.usage).outputTokens} tokens)`);

const weather = tool({
  description: "The weather in a city",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const called = await generateText({
  model,
  prompt: "What is the weather in Paris?",
  temperature: 0,
  tools: { weather },
  toolChoice: "required",
});
for (const { toolName, output } of called.toolResults) console.log("tool:  ", toolName, "->", output);
