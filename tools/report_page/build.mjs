// Bundles the report's script: `make report-page`. The first line of the result holds a hash of all that decided it.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../../fuser/debug/page_files");
const sources = readdirSync(join(here, "src")).sort().map((n) => join("src", n));
const hash = createHash("sha256");
for (const name of ["build.mjs", "package-lock.json", ...sources]) hash.update(readFileSync(join(here, name)));
const stamp = `made by make report-page from ${hash.digest("hex")}`;

const common = { bundle: true, minify: true, legalComments: "none", charset: "utf8", logLevel: "warning", absWorkingDir: here };
await build({ ...common, entryPoints: ["src/main.js"], outfile: join(out, "report.js"), format: "iife", target: "es2022", banner: { js: `// ${stamp}` } });
await build({ ...common, entryPoints: ["src/report.css"], outfile: join(out, "report.css"), banner: { css: `/* ${stamp} */` } });

const lock = JSON.parse(readFileSync(join(here, "package-lock.json"), "utf8"));
const bundled = Object.entries(lock.packages).filter(([path, p]) => path && !p.dev && !p.optional).sort(([a], [b]) => a.localeCompare(b));
const texts = bundled.map(([path, p]) => {
  const name = path.replace(/^node_modules\//, "");
  const file = readdirSync(join(here, path)).find((f) => /^licen[cs]e/i.test(f));
  return `${name} ${p.version} (${p.license})\n\n${readFileSync(join(here, path, file), "utf8").trim()}\n`;
});
writeFileSync(join(out, "LICENSES.txt"), `report.js holds these packages.\n\n${texts.join(`\n${"-".repeat(80)}\n\n`)}`);
