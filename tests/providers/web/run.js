// Serves the page and the models, opens it in Chromium, and says what the page tells: node run.js CASES [wasm|webgpu].
import { spawn } from "node:child_process";
import { createReadStream, existsSync, mkdtempSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { extname, join, normalize } from "node:path";

const [cases = "cases", ep = "wasm"] = process.argv.slice(2);
const TOLERANCE = 1e-3;
const LIMIT = 240_000;
const TYPES = { ".html": "text/html", ".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm", ".json": "application/json" };
const GPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan", "--ignore-gpu-blocklist"];
let failed = 0;

function tell(line) {
  if (line.done) {
    if (line.failed) console.log(`the page failed: ${line.failed}`);
    finish(failed || line.failed ? 1 : 0);
    return;
  }
  const { name, export: before, fused } = line;
  const runs = (found) => found.failed ?? `${found.error.toExponential(1)} off, ${found.ms.toFixed(1)} ms`;
  const right = fused.failed ? Boolean(before.failed) : fused.error <= Math.max(TOLERANCE, 2 * (before.error ?? 0));
  failed += right ? 0 : 1;
  console.log(`${right ? "ok    " : "FAILED"} ${name} on ${ep}: export ${runs(before)}; fused ${runs(fused)}`);
}

function answer(request, response) {
  const path = normalize(decodeURIComponent(new URL(request.url, "http://page").pathname));
  if (request.method === "POST") {
    let body = "";
    request.on("data", (piece) => (body += piece));
    request.on("end", () => (response.end(), tell(JSON.parse(body))));
    return;
  }
  const file = path.startsWith("/cases/") ? join(cases, path.slice(7)) : join(import.meta.dirname, path);
  if (!existsSync(file) || !statSync(file).isFile()) {
    response.writeHead(404).end();
    return;
  }
  response.writeHead(200, { "Content-Type": TYPES[extname(file)] ?? "application/octet-stream" });
  createReadStream(file).pipe(response);
}

const server = createServer(answer);
let browser;
function finish(status) {
  browser?.kill();
  server.close();
  process.exit(status);
}
server.listen(0, "127.0.0.1", () => {
  const profile = mkdtempSync(join(tmpdir(), "attnfuse-web-"));
  const page = `http://127.0.0.1:${server.address().port}/page.html?ep=${ep}`;
  const chromium = process.env.CHROMIUM ?? "chromium";
  browser = spawn(chromium, ["--headless=new", "--no-sandbox", `--user-data-dir=${profile}`, ...(ep === "webgpu" ? GPU : []), page], { stdio: "ignore" });
  browser.on("error", (error) => (console.log(`${chromium}: ${error.message}`), finish(2)));
  setTimeout(() => (console.log("the page took too long"), finish(1)), LIMIT);
});
