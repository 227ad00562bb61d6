// The page: head, search, tabs, and a drawer with what is selected.
import { bytes, fill, h, lineText, seconds, short, table } from "./dom.js";
import { index, notFused, search, unpack } from "./model.js";
import { draw } from "./graph.js";
import { detail, title } from "./detail.js";
import { roofline, timeline } from "./plots.js";
import { code } from "./code.js";

const MOST = 60; // results of a search that are listed
const TABS = ["Graph", "Groups", "Not fused", "Roofline", "Timeline", "Breaks and passes"];

// A backward graph comes after the forward of about its size.
const sizeOf = (graph) => (graph.groups.length + graph.alone.length) * (graph.stage === "backward" ? 0.5 : 1);

class Page {
  constructor(data) {
    this.data = data;
    this.entries = index(data);
    this.byKey = new Map([...this.entries.values()].filter((e) => e.kind === "group").reverse().map((e) => [e.group.key, e.id]));
    this.graph = [...data.graphs].sort((a, b) => sizeOf(b) - sizeOf(a))[0];
    this.views = new Map();
    this.build();
    this.show("Graph");
    const wanted = decodeURIComponent(location.hash.slice(1));
    if (this.entries.has(wanted)) this.select(wanted);
  }

  build() {
    this.input = h("input", { type: "search", id: "search", placeholder: "search: operator, line, module, kernel, reason ( / )", "aria-label": "search", input: () => this.find() });
    this.results = h("div", { id: "results", hidden: true });
    this.tabs = TABS.map((t) => h("button", { role: "tab", "data-tab": t, click: () => this.show(t) }, t));
    this.main = h("main", {});
    this.drawer = h("aside", { id: "drawer", hidden: true, "aria-label": "selected" });
    const theme = h("button", { id: "theme", title: "light or dark", click: () => this.turn() }, "◐");
    document.body.append(
      h("header", {}, h("h1", {}, this.data.title), h("div", { class: "searches" }, this.input, this.results), theme),
      h("p", { class: "head" }, this.data.head, h("span", { class: "soft" }, ` ${this.data.machine}; ${this.data.made}`)),
      h("nav", { role: "tablist" }, this.tabs), this.main, this.drawer,
    );
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawn?.restyle());
    document.addEventListener("keydown", (e) => {
      if (e.key === "/" && document.activeElement !== this.input) [e.preventDefault(), this.input.focus()];
      if (e.key === "Escape") this.close();
    });
  }

  turn() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.drawn?.restyle();
  }

  show(tab) {
    for (const t of this.tabs) t.setAttribute("aria-selected", String(t.dataset.tab === tab));
    if (!this.views.has(tab)) this.views.set(tab, this.make(tab));
    fill(this.main, this.views.get(tab));
    this.tab = tab;
    if (tab === "Graph") this.showGraph();
  }

  /** Draws the graph that is to be seen, with what is selected in it. */
  showGraph() {
    this.drawGraph();
    if (this.chosen) this.drawn.choose(this.chosen);
  }

  make(tab) {
    const makers = {
      Graph: () => this.graphView(), Groups: () => this.groupsView(), "Not fused": () => this.notFusedView(), Roofline: () => this.roofView(),
      Timeline: () => this.timeView(), "Breaks and passes": () => this.restView(),
    };
    return h("div", { class: `view ${tab.split(" ")[0].toLowerCase()}` }, makers[tab]());
  }

  // -- the graph ------------------------------------------------------------------------------------------------------
  graphView() {
    this.canvas = h("div", { id: "canvas" });
    const names = this.data.graphs.map((g) => h("option", { value: g.number, selected: g === this.graph }, `graph ${g.number < 0 ? "" : g.number}: ${g.stage} ${g.function} ${g.at}, ${g.groups.length} groups`));
    const choose = h("select", { "aria-label": "graph", change: (e) => this.turnTo(this.data.graphs.find((g) => String(g.number) === e.target.value)) }, names);
    this.choice = choose;
    const key = ["fused", "parts", "library", "lost"].map((k) => h("span", { class: `key ${k}` }, { fused: "group", parts: "group in parts", library: "library", lost: "not fused" }[k]));
    const tools = [["fit", () => this.drawn.fit()], ["+", () => this.drawn.zoom(1.4)], ["−", () => this.drawn.zoom(1 / 1.4)]];
    return [h("div", { class: "tools" }, choose, tools.map(([t, act]) => h("button", { click: act }, t)), key), this.canvas];
  }

  drawGraph() {
    if (this.drawn && this.drawn.of === this.graph) return this.drawn.resize();
    this.drawn?.view.destroy();
    if (!this.graph) return fill(this.canvas, h("p", { class: "soft" }, "No graph was compiled."));
    this.drawn = draw(this.canvas, this.graph, this.entries, (id) => this.select(id));
    this.drawn.of = this.graph;
    this.drawn.begin();
    document.documentElement.dataset.drawn = String(this.graph.number);
  }

  turnTo(graph) {
    this.graph = graph;
    this.choice.value = String(graph.number);
    if (this.tab === "Graph") this.showGraph();
  }

  // -- choosing -------------------------------------------------------------------------------------------------------
  select(id) {
    const entry = this.entries.get(id);
    if (!entry) return;
    this.results.hidden = true;
    if (entry.graph !== this.graph) this.turnTo(entry.graph);
    const larger = h("button", { click: () => this.drawer.classList.toggle("large") }, "⤢");
    const close = h("button", { "aria-label": "close", click: () => this.close() }, "×");
    fill(this.drawer, h("div", { class: "bar" }, h("h2", {}, title(entry)), larger, close), detail(this.data, entry, (next) => this.select(next)));
    this.drawer.hidden = false;
    history.replaceState(null, "", `#${encodeURIComponent(id)}`);
    this.chosen = id;
    if (this.tab === "Graph") this.showGraph();
  }

  selectKey(key) {
    if (this.byKey.has(key)) this.select(this.byKey.get(key));
  }

  close() {
    this.results.hidden = true;
    this.drawer.hidden = true;
    history.replaceState(null, "", location.pathname + location.search);
    this.drawn?.resize();
  }

  find() {
    const found = search(this.entries, this.input.value);
    const asked = this.input.value.trim() !== "";
    this.results.hidden = !asked;
    const rows = found.slice(0, MOST).map((e) => h("button", { class: "result", click: () => this.select(e.id) }, h("span", { class: `key ${e.kind === "group" ? "fused" : "lost"}` }, e.kind === "group" ? `group ${e.group.number}` : e.op.code), ` ${e.label}`));
    fill(this.results, h("p", { class: "soft" }, `${found.length} found${found.length > MOST ? `, the first ${MOST}` : ""}`), rows);
    this.drawn?.keep(asked ? new Set(found.map((e) => e.id)) : null);
  }

  // -- tables ---------------------------------------------------------------------------------------------------------
  groupsView() {
    const groups = [...this.entries.values()].filter((e) => e.kind === "group").sort((a, b) => (b.group.time ?? 0) - (a.group.time ?? 0) || b.bytes - a.bytes);
    const rows = groups.map((e) => ({
      cells: [e.graph.number < 0 ? "" : e.graph.number, e.group.number, e.label, bytes(e.bytes), seconds(e.group.time), this.data.kinds[e.group.key].hits, seconds(this.data.kinds[e.group.key].seconds), e.group.code],
      click: () => this.select(e.id),
    }));
    return table(["graph", "group", "operators", "bytes", "a step's time", "calls", "compiling", "reason"], rows, "groups");
  }

  notFusedView() {
    const found = notFused(this.data, this.entries);
    if (!found.length) return h("p", {}, "Every operator is in a kernel.");
    const copy = this.data.roof?.copy; // bytes a second: what is not moved costs no time
    const lost = (op) => (copy ? [seconds(op.bytes / copy)] : []);
    const rows = found.map(({ op, id }) => ({ cells: [...lost(op), bytes(op.bytes), short(op.op), op.code, op.reason, lineText(op.at), op.at?.[3] ?? ""], click: () => this.select(id) }));
    const meanings = Object.entries(this.data.reasons).map(([c, [means, cure]]) => [c, means, cure]);
    return [
      h("p", { class: "soft" }, `By the bytes that one kernel with the neighbours would not move${copy ? ", and the time of a step that they take at this machine's copy rate" : ""}.`),
      table([...(copy ? ["lost time"] : []), "bytes", "operator", "code", "reason", "line", "module"], rows, "not fused"), h("h3", {}, "Reasons"), table(["code", "meaning", "what to do"], meanings),
    ];
  }

  roofView() {
    const { roof, profile } = this.data;
    if (!roof) return h("p", {}, "Nothing was timed: `python -m fuser report` times a script's steps.");
    const rows = [...roof.kernels].sort((a, b) => b.median * b.calls - a.median * a.calls).map((k) => ({
      cells: [k.name, k.calls, seconds(k.median), seconds(k.apart), k.bytes ? bytes(k.bytes) : "", k.bytes ? (k.bytes / k.median / 1e9).toPrecision(3) : "", k.bytes ? `${((100 * k.bytes) / k.median / roof.copy).toFixed(0)} %` : "", k.operations ?? ""],
      click: () => this.selectKey(k.keys[0]),
    }));
    return [
      h("p", { class: "soft" }, profile.replayed ? "Times are of kernels called by themselves, on arguments like those of their first call: data may be in a cache." : "Times are of the steps that the script made."),
      h("p", { class: "soft" }, "The slope is a copy in memory, the level a product of large matrices. A kernel whose data is in a cache may stand above the slope."),
      profile.noise ? h("p", { class: "warns" }, profile.noise) : null,
      roofline(roof, (key) => this.selectKey(key)),
      table(["kernel", "calls", "median", "spread", "bytes", "GB/s", "of the copy rate", "operations"], rows, "kernels"),
    ];
  }

  // -- times ----------------------------------------------------------------------------------------------------------
  timeView() {
    const { profile, compiling } = this.data;
    const compiled = compiling.map(([name, label, begin, s, thread]) => ({ name, label, kind: "compiling", begin, seconds: s, thread }));
    const byName = new Map((this.data.roof?.kernels ?? []).map((k) => [k.name, k.keys[0]]));
    const parts = profile ? [h("h3", {}, profile.replayed ? "Kernels, called by themselves" : "One step"), this.partsView(profile)] : [h("h3", {}, "One step"), h("p", { class: "soft" }, "No step was recorded.")];
    const events = (profile?.events ?? []).map(([name, kind, begin, s, thread]) => ({ name, kind, begin, seconds: s, thread }));
    return [
      h("p", { class: "soft" }, "The wheel zooms, dragging moves, a click on a kernel shows its group."),
      ...parts, events.length ? timeline(events, (name) => this.selectKey(byName.get(name))) : null,
      h("h3", {}, "Compilation"), timeline(compiled, () => undefined),
    ];
  }

  partsView(profile) {
    const all = Object.values(profile.parts).reduce((a, b) => a + b, 0);
    const rows = Object.entries(profile.parts).sort((a, b) => b[1] - a[1]).map(([name, s]) => [name, seconds(s), `${((100 * s) / profile.seconds).toFixed(1)} %`]);
    const steps = profile.steps.length ? `${profile.steps.length} steps, ` : "";
    return [h("p", {}, `${steps}${seconds(profile.seconds)} on the clock; the parts add up to ${seconds(all)}.`), table(["part", "seconds", "of the clock"], rows, "parts")];
  }

  restView() {
    const { breaks, again, graphs, notes } = this.data;
    const passes = graphs.flatMap((g) => g.passes.map(([name, changed, s]) => [g.number, name, changed, seconds(s)]));
    const eager = graphs.flatMap((g) => [...(g.route === "eager" ? [[g.number, 1, g.reason]] : []), ...g.eager.map(([n, why]) => [g.number, n, why])]);
    const sections = [
      ["Graph breaks", breaks.length && table(["times", "at", "reason"], breaks.map(([n, at, why]) => [n, lineText(at), why]), "breaks")],
      ["Recompilations", again.length && table(["function", "at", "guard that failed"], again, "recompilations")],
      ["Runs in eager", eager.length && table(["graph", "calls", "reason"], eager)],
      ["Passes that changed something", passes.length && table(["graph", "pass", "places", "seconds"], passes, "passes")],
    ];
    const programs = graphs.filter((g) => g.program).map((g) => h("details", {}, h("summary", {}, `outer program of graph ${g.number}`), code(g.program, "python")));
    return [notes.map((n) => h("p", { class: "warns" }, n)), sections.map(([t, found]) => [h("h3", {}, t), found || h("p", { class: "soft" }, "None.")]), programs];
  }
}

unpack().then((data) => {
  window.fuserReport = new Page(data);
  document.documentElement.dataset.ready = "yes";
});
