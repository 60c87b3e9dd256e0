// The npm package openai against a server of embeddings: prints one JSON object.
//
// node openai_embeddings.mjs NODE_MODULES URL MODEL TEXT...
import { createRequire } from "node:module";

const [modules, url, model, ...texts] = process.argv.slice(2);
const { OpenAI } = createRequire(`${modules}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const vectors = async (options) =>
  (await client.embeddings.create({ model, input: texts, ...options })).data.map((row) => row.embedding);

const found = { base64: await vectors({}), float: await vectors({ encoding_format: "float" }) };
try {
  await vectors({ dimensions: 8 });
} catch (error) {
  found.error = [error.status, error.param];
}
console.log(JSON.stringify(found));
