// The Vercel AI SDK against the built-in model; prints a row of the table of clients, as client_calls.py does.
//
//     node ai_sdk_calls.mjs FOLDER URL
//
// FOLDER has node_modules with ai, zod and @ai-sdk/{openai,openai-compatible,anthropic}.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, stepCountIs, tool, Output } = await load("ai");
const { z } = await load("zod");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const base = { baseURL: `${url}/v1`, apiKey: "any" };
const openai = createOpenAI(base);
const compatible = createOpenAICompatible({ ...base, name: "podway", supportsStructuredOutputs: true });
const models = {
  "openai.chat": openai.chat("builtin"),
  "openai.responses": openai.responses("builtin"),
  "openai-compatible": compatible.chatModel("builtin"),
  anthropic: createAnthropic(base)("builtin"),
};
const tools = {
  get_weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "sunny",
  }),
};
const edits = [{ type: "clear_tool_uses_20250919" }];
const providerOptions = {
  openai: { reasoningEffort: "low", textVerbosity: "low" },
  podway: { reasoningEffort: "low" },
  anthropic: { thinking: { type: "enabled", budgetTokens: 1024 }, contextManagement: { edits } },
};
const person = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });
const operations = {
  "long max_tokens": async (ask) => (await generateText({ ...ask, maxOutputTokens: 100000 })).text,
  stream: async (ask) => (await Array.fromAsync(streamText(ask).textStream)).length > 2,
  tool: async (ask) => {
    const prompt = "What is the weather in Paris?";
    const stopWhen = stepCountIs(2);
    return (await generateText({ ...ask, prompt, tools, toolChoice: "required", stopWhen, maxOutputTokens: 500 }))
      .steps[0].toolResults[0].output;
  },
  "JSON schema": async (ask) => {
    const prompt = "Answer in JSON: the name is Ann, the age is 3.";
    return (await generateText({ ...ask, prompt, output: person, maxOutputTokens: 2000 })).output.name;
  },
  "options of reasoning": async (ask) =>
    (await generateText({ ...ask, providerOptions, maxOutputTokens: 4000 })).text,
};

const row = { client: "ai", version: require("ai/package.json").version, operations: [] };
for (const [name, model] of Object.entries(models)) {
  for (const [operation, call] of Object.entries(operations)) {
    let why = "";
    try {
      if (!(await call({ model, prompt: "Hello!", maxRetries: 0 }))) why = "nothing came back";
    } catch (error) {
      why = String(error).split("\n")[0].slice(0, 200);
    }
    row.operations.push({ name: `${name}: ${operation}`, passed: !why, why });
  }
}
console.log(JSON.stringify(row, null, 1));
