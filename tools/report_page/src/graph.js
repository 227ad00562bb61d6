// One graph of the model: groups as boxes, operators on ATen between them. Cytoscape draws, dagre places.
import cytoscape from "cytoscape";
import dagre from "@dagrejs/dagre";
import { bytes } from "./dom.js";

const LINE = 15;
const SHOWN = 5; // operators that a box names
const MANY = 150; // nodes from which on the quick ranking is taken

function boxLabel(entry) {
  if (entry.kind === "alone") return entry.label;
  const ops = entry.group.label;
  const names = ops.slice(0, SHOWN).map(([op, n]) => (n > 1 ? `${n} × ${op}` : op));
  const more = ops.length > SHOWN ? [`… ${ops.length - SHOWN} more`] : [];
  return [`group ${entry.group.number}`, ...names, ...more].join("\n");
}

function kindOf(entry) {
  if (entry.kind === "group") return entry.group.code ? "lost" : entry.group.operators.some((o) => o.code) ? "parts" : "fused";
  return entry.op.code === "library" ? "library" : "lost";
}

function elements(graph, entries) {
  const own = [...entries.values()].filter((e) => e.graph === graph);
  const nodes = own.map((entry) => {
    const label = boxLabel(entry);
    const lines = label.split("\n");
    const width = 16 + 7 * Math.max(...lines.map((l) => Math.min(l.length, 46)));
    return { data: { id: entry.id, label, kind: kindOf(entry), width, height: 12 + LINE * lines.length } };
  });
  const known = new Set(own.map((e) => e.id));
  const most = Math.max(1, ...graph.flows.map((f) => f[2]));
  const edges = graph.flows
    .map(([a, b, n]) => ({ a: `${graph.number}/${a}`, b: `${graph.number}/${b}`, n }))
    .filter(({ a, b }) => known.has(a) && known.has(b))
    .map(({ a, b, n }) => ({ data: { id: `${a}>${b}`, source: a, target: b, label: bytes(n), width: 1 + 4 * Math.sqrt(n / most) } }));
  return { nodes, edges };
}

function place({ nodes, edges }) {
  const layout = new dagre.graphlib.Graph();
  layout.setGraph({ ranksep: 34, nodesep: 22, ranker: nodes.length > MANY ? "longest-path" : "network-simplex" });
  layout.setDefaultEdgeLabel(() => ({}));
  for (const n of nodes) layout.setNode(n.data.id, { width: n.data.width, height: n.data.height });
  for (const e of edges) layout.setEdge(e.data.source, e.data.target);
  dagre.layout(layout);
  for (const n of nodes) {
    const { x, y } = layout.node(n.data.id);
    n.position = { x, y };
  }
}

function styleOf(element) {
  const probe = document.body.appendChild(document.createElement("i")); // whose colour the browser resolves for light or dark
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const kinds = ["fused", "parts", "lost", "library"].map((kind) => ({
    selector: `node[kind="${kind}"]`,
    style: { "background-color": colour(`--${kind}`), "border-color": colour(`--${kind}-line`) },
  }));
  const styles = [
    {
      selector: "node",
      style: {
        shape: "round-rectangle", width: "data(width)", height: "data(height)", label: "data(label)", "text-wrap": "wrap",
        "text-valign": "center", "font-size": 12, "font-family": "ui-monospace, monospace", color: colour("--ink"),
        "border-width": 1.5, "text-max-width": 330, "min-zoomed-font-size": 5,
      },
    },
    ...kinds,
    { selector: 'node[kind="library"]', style: { shape: "rectangle" } },
    {
      selector: "edge",
      style: {
        width: "data(width)", "line-color": colour("--faint"), "target-arrow-color": colour("--faint"),
        "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "bezier",
      },
    },
    { selector: ".dim", style: { opacity: 0.18 } },
    { selector: "node.chosen", style: { "border-width": 4, "border-color": colour("--accent") } },
    { selector: "edge.chosen", style: { "line-color": colour("--accent"), "target-arrow-color": colour("--accent"), label: "data(label)", "font-size": 10, color: colour("--ink") } },
  ];
  probe.remove();
  return styles;
}

/** Draws into `element`; the result chooses, dims and restyles. `select(id)` is called on a click. */
export function draw(element, graph, entries, select) {
  const found = elements(graph, entries);
  place(found);
  const view = cytoscape({
    container: element, elements: [...found.nodes, ...found.edges], layout: { name: "preset" }, style: styleOf(element),
    minZoom: 0.02, maxZoom: 4, boxSelectionEnabled: false, autoungrabify: true,
    hideEdgesOnViewport: found.edges.length > 800, textureOnViewport: found.nodes.length > 800,
  });
  view.on("tap", "node", (event) => select(event.target.id()));
  return {
    view,
    choose(id) {
      view.elements(".chosen").removeClass("chosen");
      const node = view.getElementById(id);
      if (!node.length) return;
      node.union(node.connectedEdges()).addClass("chosen");
      const box = node.renderedBoundingBox();
      if (view.zoom() < 0.4 || box.x1 < 0 || box.y1 < 0 || box.x2 > view.width() || box.y2 > view.height()) {
        view.zoom(Math.max(view.zoom(), 0.8));
        view.center(node);
      }
    },
    keep(ids) {
      view.batch(() => {
        view.elements().removeClass("dim");
        if (ids) view.elements().filter((e) => !ids.has(e.id())).addClass("dim");
      });
    },
    /** The whole where it can be read, else its top. */
    begin() {
      view.fit(undefined, 24);
      if (view.zoom() > 0.45) return;
      const box = view.elements().boundingBox();
      const level = Math.min(0.8, Math.max(0.35, view.width() / box.w));
      const top = view.nodes().reduce((best, n) => (n.position("y") < best.position("y") ? n : best), view.nodes()[0]);
      const middle = box.w * level <= view.width() ? (box.x1 + box.x2) / 2 : top.position("x");
      view.viewport({ zoom: level, pan: { x: view.width() / 2 - middle * level, y: 24 - box.y1 * level } });
    },
    fit: () => view.fit(undefined, 24),
    zoom: (factor) => view.zoom({ level: view.zoom() * factor, renderedPosition: { x: view.width() / 2, y: view.height() / 2 } }),
    restyle: () => view.style(styleOf(element)),
    resize: () => view.resize(),
  };
}
