// Bundles src/ and writes one HTML file without data: node build.mjs [FILE]. The same sources give the same bytes.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "../src/tensorprobe/report/page/template.html");

const sha256 = (text, encoding) => createHash("sha256").update(text).digest(encoding);

// What the template is made of; tests/web/test_build.py computes the same without node.
function sourcesDigest() {
  const names = ["build.mjs", "package-lock.json", "page.html", ...readdirSync(join(here, "src")).map((name) => `src/${name}`)];
  return sha256(names.sort().map((name) => `${name}\0${sha256(readFileSync(join(here, name)), "hex")}\n`).join(""), "hex");
}

async function bundle(entry, loader) {
  const result = await build({
    entryPoints: [join(here, "src", entry)],
    absWorkingDir: here,
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    charset: "ascii",
    legalComments: "none",
    jsx: "automatic",
    jsxImportSource: "preact",
    loader,
  });
  return result.outputFiles[0].text.trim();
}

const script = (await bundle("main.tsx", {})).replaceAll("</script", "<\\/script");
const style = await bundle("style.css", { ".css": "css" });
const hash = (text) => `'sha256-${sha256(text, "base64")}'`;
const policy = [
  "default-src 'none'",
  `script-src ${hash(script)}`,
  `style-src ${hash(style)}`,
  "img-src data:",
  "connect-src 'none'",
  "base-uri 'none'",
  "form-action 'none'",
].join("; ");
const parts = { POLICY: policy, SOURCES: sourcesDigest(), STYLE: style, SCRIPT: script };
const page = readFileSync(join(here, "page.html"), "utf8").replace(/@(POLICY|SOURCES|STYLE|SCRIPT)@/g, (_, name) => parts[name]);
writeFileSync(target, page);
console.log(`${target}: ${page.length.toLocaleString("en")} bytes`);
