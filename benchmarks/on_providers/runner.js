// Runs an export and what was written of it in onnxruntime-web, in node: node runner.js FOLDER, where FOLDER has node_modules.
// Each line on stdin is a task as JSON, each on stdout its answer, as in runner.py.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const from = createRequire(join(resolve(process.argv[2] ?? "."), "package.json"));
const main = from.resolve("onnxruntime-web");
const ort = await import(pathToFileURL(join(main, "..", "ort.node.min.mjs")).href);
const { version } = JSON.parse(readFileSync(join(main, "..", "..", "package.json"), "utf8"));
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";

const arrays = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, int64: BigInt64Array, int32: Int32Array,
  uint8: Uint8Array, int8: Int8Array, bool: Uint8Array,
};

function read({ type, dims, file }) {
  const bytes = readFileSync(file);
  if (!(type in arrays)) throw new Error(`onnxruntime-web has no tensors of ${type}`);
  return new ort.Tensor(type, new arrays[type](bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength)), dims);
}

function write(name, tensor, file) {
  writeFileSync(file, new Uint8Array(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength));
  return { name, type: tensor.type, dims: tensor.dims, file };
}

const line = (error) => String(error?.message ?? error).replace(/\s+/g, " ").slice(0, 200);
const only = (feeds, session) => Object.fromEntries(Object.entries(feeds).filter(([name]) => session.inputNames.includes(name)));

async function outputs(session, cases, prefix) {
  const found = [];
  for (const [place, feeds] of cases.entries()) {
    try {
      const results = await session.run(only(feeds, session));
      found.push({ outputs: session.outputNames.map((name, at) => write(name, results[name], `${prefix} ${place}.${at}.bin`)) });
    } catch (error) {
      found.push({ error: line(error) });
    }
  }
  return found;
}

async function timed(sessions, feeds, { seconds, least, most }) {
  const found = Object.fromEntries(Object.keys(sessions).map((name) => [name, []]));
  const own = Object.fromEntries(Object.entries(sessions).map(([name, session]) => [name, only(feeds, session)]));
  const end = performance.now() + 1000 * seconds;
  for (let pair = 0; pair < most && (pair < least || performance.now() < end); pair++) {
    const names = Object.keys(sessions).sort();
    for (const name of pair % 2 ? names.reverse() : names) {
      const start = performance.now();
      await sessions[name].run(own[name]);
      found[name].push(performance.now() - start);
    }
  }
  return found;
}

async function ran(task) {
  const answer = {}, sessions = {};
  let cases;
  try {
    cases = task.cases.map((given) => Object.fromEntries(given.feeds.map((item) => [item.name, read(item)])));
  } catch (error) {
    return Object.fromEntries(Object.keys(task.models).map((name) => [name, { error: line(error) }]));
  }
  for (const [name, path] of Object.entries(task.models)) {
    const start = performance.now();
    try {
      const session = await ort.InferenceSession.create(readFileSync(path), { executionProviders: ["wasm"], freeDimensionOverrides: task.sizes });
      sessions[name] = session;
      answer[name] = { load: (performance.now() - start) / 1000, cases: await outputs(session, cases, join(task.out, name)), "on cpu": null };
    } catch (error) {
      answer[name] = { error: line(error) };
    }
  }
  if (Object.keys(sessions).length === 2 && Object.values(answer).every((found) => found.cases?.[0].outputs)) {
    answer.ms = await timed(sessions, cases[0], task);
  }
  for (const session of Object.values(sessions)) await session.release();
  return answer;
}

// Two models with inputs of their own, once and then in turn, as conformance.py asks for them.
async function tried(task) {
  const answer = {}, sessions = {}, feeds = {};
  for (const [name, { model, feeds: given }] of Object.entries(task.apart)) {
    try {
      feeds[name] = Object.fromEntries(given.map((item) => [item.name, read(item)]));
      sessions[name] = await ort.InferenceSession.create(readFileSync(model), { executionProviders: ["wasm"] });
      const results = await sessions[name].run(feeds[name]);
      answer[name] = { outputs: sessions[name].outputNames.map((key, at) => write(key, results[key], join(task.out, `${name}.${at}.bin`))), ms: [] };
    } catch (error) {
      answer[name] = { error: line(error) };
    }
  }
  const names = Object.keys(answer);
  const end = performance.now() + 1000 * task.seconds;
  for (let turn = 0; turn < task.runs && names.every((name) => answer[name].ms) && (!turn || performance.now() < end); turn++) {
    for (const name of names) {
      const start = performance.now();
      await sessions[name].run(feeds[name]);
      answer[name].ms.push(performance.now() - start);
    }
  }
  for (const session of Object.values(sessions)) await session.release();
  return answer;
}

for await (const text of createInterface({ input: process.stdin })) {
  const task = JSON.parse(text);
  const answer = task.models ? await ran(task) : task.apart ? await tried(task) : { versions: { "onnxruntime-web": version, node: process.version } };
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
