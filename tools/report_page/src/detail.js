// What is known of one group, or of one operator on ATen.
import { bytes, h, lineText, seconds, short, table } from "./dom.js";
import { code, userCode } from "./code.js";

function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

function column(title, ...inside) {
  return h("section", { class: "column", "data-column": title }, h("h3", {}, title), h("div", { class: "scrolls" }, ...inside));
}

function reason(data, told) {
  const [means, cure] = data.reasons[told.code] ?? ["", ""];
  return h("div", { class: "reason" }, h("b", {}, told.code), ` ${told.reason}`, means ? h("p", {}, `Meaning: ${means}.`) : null, cure ? h("p", {}, `What to do: ${cure}.`) : null);
}

function neighbours(entry, numbers, go) {
  return numbers.map((n) => h("button", { class: "link", click: () => go(`${entry.graph.number}/group ${n}`) }, `group ${n}`));
}

function group(data, entry, go) {
  const { group, graph } = entry;
  const kind = data.kinds[group.key];
  const timed = data.profile?.beside.find(([key]) => key === group.key);
  const chips = facts([
    ["fusion key", group.key], ["graph", graph.number < 0 ? graph.stage : `${graph.number}, ${graph.stage}`], ["inputs, results", `${group.inputs >= 0 ? group.inputs : "?"}, ${group.outputs}`],
    ["bytes in and out", group.bytes ? bytes(group.bytes) : ""], ["calls by kernels", kind.hits], ["calls that found none", kind.misses],
    ["a step's time in it", group.time ? seconds(group.time) : ""], ["beside ATen", timed?.[1] ? `${(timed[2] / timed[1]).toFixed(2)} × as fast` : ""],
    ["compiling", `${seconds(kind.seconds)}${Object.entries(kind.stages).map(([s, t]) => `, ${s} ${seconds(t)}`).join("")}`],
  ]);
  const words = [
    ...kind.missed.map((m) => ["guard that failed", m]), ...kind.fallbacks.map(([n, why]) => [`${n} calls on ATen`, why]),
    ...group.apart.map(([n, why]) => [`apart from group ${n}`, why]),
    ...kind.kernels.flatMap((k) => [...k.takes.map((t) => [`${k.name} takes`, t]), ...k.apart.map((a) => [`${k.name}: two loops, because`, a])]),
  ];
  const operators = table(["operator", "line", "module", "on ATen because"], group.operators.map((o) => [short(o.op), lineText(o.at), o.at?.[3] ?? "", o.code ? `${o.code}: ${o.reason}` : ""]), "operators");
  return [
    chips, group.code ? reason(data, group) : null,
    h("div", { class: "columns" },
      column("Operators", operators, words.length ? h("details", {}, h("summary", {}, `${words.length} more facts`), table(["what", "said"], words)) : null),
      column("Your lines", userCode(group.operators, data.files)),
      column("IR", kind.canonical ? [h("h4", {}, "canonical graph"), code(kind.canonical, "ir"), h("h4", {}, "loops")] : null, code(kind.ir, "ir")),
      column("Plan", code(kind.plan, "ir")),
      column("Code", kind.kernels.length ? kind.kernels.map((k) => [h("h4", {}, `${k.name} (${k.library})`), code(k.source, k.language)]) : h("p", { class: "soft" }, "No kernel was made."))),
  ];
}

function alone(data, entry, go) {
  const { op } = entry;
  return [
    facts([["node", op.node], ["line", lineText(op.at)], ["function", op.at?.[2] ?? ""], ["module", op.at?.[3] ?? ""], ["bytes that one kernel would not move", bytes(op.bytes)]]),
    reason(data, op),
    h("p", {}, "reads from ", op.reads.length ? neighbours(entry, op.reads, go) : "no group", "; read by ", op.readBy.length ? neighbours(entry, op.readBy, go) : "no group"),
    h("div", { class: "columns" }, column("Your lines", userCode([op], data.files))),
  ];
}

export function title(entry) {
  return entry.kind === "group" ? `group ${entry.group.number}: ${entry.label}` : `${entry.label}, on ATen`;
}

export function detail(data, entry, go) {
  return (entry.kind === "group" ? group : alone)(data, entry, go);
}
