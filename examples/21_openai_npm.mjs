// The official npm client: plain, streaming, the streaming helper, and a tool.
//   npm install --prefix examples && node examples/21_openai_npm.mjs [URL]
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any" });
const model = (await client.models.list()).data[0].id;
const ask = (content) => ({ model, messages: [{ role: "user", content }] });

const whole = await client.chat.completions.create({ ...ask("Hello!"), temperature: 0 });
console.log("whole: ", whole.choices[0].message.content);

const chunks = await client.chat.completions.create({ ...ask("What is 2 + 3?"), stream: true });
process.stdout.write("stream: ");
for await (const chunk of chunks) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
process.stdout.write("\n");

process.stdout.write("helper: ");
const helper = client.chat.completions.stream(ask("What is Podway?"));
helper.on("content", (delta) => process.stdout.write(delta));
const final = await helper.finalChatCompletion();
console.log(`  (${final.choices[0].finish_reason})`);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const called = await client.chat.completions.create({
  ...ask("What is the weather in Paris?"),
  temperature: 0,
  tools: [{ type: "function", function: { name: "get_weather", parameters } }],
  tool_choice: "required",
});
const call = called.choices[0].message.tool_calls[0].function;
console.log("tool:  ", call.name, call.arguments);
