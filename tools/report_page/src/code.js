// Highlighted code, and the user's own lines.
import hljs from "highlight.js/lib/core";
import cpp from "highlight.js/lib/languages/cpp";
import python from "highlight.js/lib/languages/python";
import { h, short } from "./dom.js";

hljs.registerLanguage("cpp", cpp);
hljs.registerLanguage("python", python);
// What the IR and plans print: see docs/ir.md.
hljs.registerLanguage("ir", () => ({
  name: "ir",
  keywords: { keyword: "for store return guard known reducing by kernel pass reduction result of as vector reduced at in strides", literal: "true false" },
  contains: [
    { scope: "comment", begin: "#", end: "$" },
    { scope: "variable", begin: /%\d+/ },
    { scope: "title", begin: /\b(?:buf|in)\d+\b/ },
    { scope: "number", begin: /\b\d+(?:\.\d+)?(?:e-?\d+)?\b/ },
    { scope: "type", begin: /\b(?:float|int|uint|bfloat|bool|complex)\d*\b/ },
  ],
}));

const MOST = 200_000; // characters that are highlighted

export function code(text, language) {
  const made = h("code", { class: "hljs" });
  if (text.length > MOST) made.textContent = text;
  else made.innerHTML = hljs.highlight(text, { language, ignoreIllegals: true }).value; // hljs escapes what it reads
  return h("pre", {}, made);
}

/** The lines of a file that operators come from, each with its operators, and the lines around. */
export function userCode(operators, files) {
  const byFile = new Map();
  for (const op of operators) {
    if (!op.at) continue;
    const lines = byFile.get(op.at[0]) ?? new Map();
    byFile.set(op.at[0], lines.set(op.at[1], [...(lines.get(op.at[1]) ?? []), op]));
  }
  if (!byFile.size) return h("p", { class: "soft" }, "No line of the program is known for these operators.");
  return [...byFile].map(([file, marked]) => {
    const known = files[file] ?? {};
    const near = Object.keys(known).map(Number).filter((n) => [...marked.keys()].some((m) => Math.abs(m - n) <= 2)).sort((a, b) => a - b);
    const rows = near.flatMap((n, i) => [
      i && near[i - 1] !== n - 1 ? h("div", { class: "gap" }, "⋯") : null,
      h("div", { class: marked.has(n) ? "line marked" : "line" },
        h("span", { class: "no" }, String(n)), h("span", { class: "text" }, known[n] || " "),
        marked.has(n) ? h("span", { class: "ops" }, [...new Set(marked.get(n).map((o) => short(o.op)))].join(" ")) : null),
    ]);
    return h("div", { class: "file" }, h("h4", {}, file), h("div", { class: "lines" }, rows));
  });
}
