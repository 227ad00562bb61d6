// The data of the page: unpacked, with an entry for each thing that can be selected and searched.
import { lineText, short } from "./dom.js";

export async function unpack() {
  const packed = document.getElementById("data").textContent.trim();
  const raw = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Entries by id: "0/group 3" for a group of graph 0, "0/addmm_1" for an operator on ATen. */
export function index(data) {
  const entries = new Map();
  for (const graph of data.graphs) {
    for (const group of graph.groups) {
      const kind = data.kinds[group.key];
      const label = group.label.map(([op, n]) => (n > 1 ? `${n}×${op}` : op)).join(" ");
      const words = [
        `group ${group.number}`, `fusion ${group.key}`, label, group.code, group.reason, ...(kind?.kernels ?? []).map((k) => k.name),
        ...group.operators.flatMap((o) => [o.op, lineText(o.at), o.at?.[2], o.at?.[3], o.code]),
      ];
      const id = `${graph.number}/group ${group.number}`;
      entries.set(id, { id, kind: "group", graph, group, label, bytes: group.bytes, text: words.join(" ").toLowerCase() });
    }
    for (const op of graph.alone) {
      const id = `${graph.number}/${op.node}`;
      const words = [op.op, op.node, lineText(op.at), op.at?.[2], op.at?.[3], op.code, op.reason];
      entries.set(id, { id, kind: "alone", graph, op, label: short(op.op), bytes: op.bytes, text: words.join(" ").toLowerCase() });
    }
  }
  return entries;
}

/** Every operator on ATen, those inside of split groups too, the most bytes first. */
export function notFused(data, entries) {
  const found = [];
  for (const entry of entries.values()) {
    if (entry.kind === "alone") found.push({ op: entry.op, id: entry.id });
    else for (const op of entry.group.operators) if (op.code) found.push({ op, id: entry.id });
  }
  return found.sort((a, b) => b.op.bytes - a.op.bytes);
}

export function search(entries, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return words.length ? [...entries.values()].filter((e) => words.every((w) => e.text.includes(w))) : [];
}
