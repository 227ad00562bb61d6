// The roofline of all kernels, and timelines. d3 gives scales, axes and zoom.
import { axisBottom, axisLeft } from "d3-axis";
import { scaleLinear, scaleLog } from "d3-scale";
import { select } from "d3-selection";
import { zoom } from "d3-zoom";
import { h, seconds } from "./dom.js";

const rate = (n) => (n >= 1e12 ? `${n / 1e12} T` : n >= 1e9 ? `${n / 1e9} G` : n >= 1e6 ? `${n / 1e6} M` : `${n / 1e3} k`);
const powers = (scale) => scale.ticks().filter((t) => Number.isInteger(Math.log10(t) + 1e-9) || Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-6);

/** Operations a second over operations a byte; `go(key)` on a click. Copies without arithmetic have no place in it. */
export function roofline(roof, go) {
  const rows = roof.kernels.filter((k) => k.bytes && k.operations && k.median);
  if (!rows.length) return h("p", { class: "soft" }, "No kernel with known bytes and operations was timed.");
  const [width, height, left, bottom] = [860, 420, 70, 46];
  const points = rows.map((k) => ({ ...k, x: k.operations / k.bytes, y: k.operations / k.median }));
  const xs = [Math.min(0.05, ...points.map((p) => p.x)) / 1.5, Math.max(10, roof.product / roof.copy, ...points.map((p) => p.x)) * 1.5];
  const x = scaleLog().domain(xs).range([left, width - 20]);
  const y = scaleLog().domain([Math.min(xs[0] * roof.copy, ...points.map((p) => p.y)) / 1.5, Math.max(roof.product, ...points.map((p) => p.y)) * 2]).range([height - bottom, 14]);
  const svg = select(document.createElementNS("http://www.w3.org/2000/svg", "svg")).attr("viewBox", `0 0 ${width} ${height}`).attr("class", "plot roofline");
  const knee = roof.product / roof.copy;
  const top = (v) => Math.min(v * roof.copy, roof.product);
  const corners = [xs[0], Math.min(Math.max(knee, xs[0]), xs[1]), xs[1]];
  svg.append("path").attr("class", "roof").attr("d", `M${corners.map((v) => `${x(v)},${y(top(v))}`).join("L")}`);
  svg.append("text").attr("class", "label").attr("x", x(corners[0]) + 60).attr("y", y(top(corners[0])) - 46).text(`copy rate ${(roof.copy / 1e9).toFixed(1)} GB/s`);
  svg.append("text").attr("class", "label").attr("text-anchor", "end").attr("x", width - 24).attr("y", y(roof.product) - 6).text(`matrix product ${(roof.product / 1e9).toFixed(0)} G operations/s`);
  svg.append("g").attr("transform", `translate(0,${height - bottom})`).call(axisBottom(x).tickValues(powers(x)).tickFormat(String));
  svg.append("g").attr("transform", `translate(${left},0)`).call(axisLeft(y).tickValues(powers(y)).tickFormat(rate));
  svg.append("text").attr("class", "label").attr("x", width / 2).attr("y", height - 8).text("operations a byte");
  svg.append("text").attr("class", "label").attr("transform", `translate(14,${height / 2 + 50}) rotate(-90)`).text("operations a second");
  const most = Math.max(...points.map((p) => p.median * p.calls));
  const dots = svg.selectAll("circle").data(points).join("circle").attr("class", "dot").attr("tabindex", 0)
    .attr("cx", (p) => x(p.x)).attr("cy", (p) => y(p.y)).attr("r", (p) => 4 + 10 * Math.sqrt((p.median * p.calls) / most))
    .on("click", (_, p) => go(p.keys[0])).on("keydown", (e, p) => e.key === "Enter" && go(p.keys[0]));
  dots.append("title").text((p) => `${p.name}\n${p.calls} calls, ${seconds(p.median)} each\n${p.x.toPrecision(3)} operations a byte, ${(p.bytes / p.median / 1e9).toPrecision(3)} GB/s`);
  return svg.node();
}

/** Rows {name, label, kind, begin, seconds, thread}, nested by time; wheel zooms, drag moves, `go(name)` on a click. */
export function timeline(rows, go) {
  if (!rows.length) return h("p", { class: "soft" }, "Nothing was recorded.");
  const threads = [...new Set(rows.map((r) => r.thread))];
  const lanes = [];
  const placed = [];
  for (const thread of threads) {
    const own = rows.filter((r) => r.thread === thread).sort((a, b) => a.begin - b.begin || b.seconds - a.seconds);
    const first = lanes.length;
    const open = [];
    for (const row of own) {
      while (open.length && open[open.length - 1] <= row.begin + 1e-9) open.pop();
      placed.push({ ...row, lane: first + open.length });
      lanes[first + open.length] ??= open.length ? "" : thread;
      open.push(row.begin + row.seconds);
    }
  }
  const [width, left, high] = [1100, 110, 17];
  const height = lanes.length * high + 30;
  const end = Math.max(...rows.map((r) => r.begin + r.seconds));
  const x = scaleLinear().domain([0, end]).range([left, width - 10]);
  const svg = select(document.createElementNS("http://www.w3.org/2000/svg", "svg")).attr("viewBox", `0 0 ${width} ${height}`).attr("class", "plot timeline");
  const name = `clip${Math.random().toString(36).slice(2)}`;
  svg.append("clipPath").attr("id", name).append("rect").attr("x", left).attr("width", width - left).attr("height", height);
  const inside = svg.append("g").attr("clip-path", `url(#${name})`);
  const bars = inside.selectAll("g").data(placed).join("g").attr("class", "bar").on("click", (_, r) => go(r.name));
  bars.append("rect").attr("y", (r) => r.lane * high + 1).attr("height", high - 2).attr("data-kind", (r) => r.kind);
  bars.append("text").attr("y", (r) => r.lane * high + 12).text((r) => r.name);
  bars.append("title").text((r) => `${r.name}${r.label ? ` (${r.label})` : ""}\n${seconds(r.seconds)} from ${seconds(r.begin)} on, ${r.kind}`);
  svg.append("g").selectAll("text").data(lanes).join("text").attr("class", "label").attr("x", 4).attr("y", (_, n) => n * high + 12).text((t) => t.slice(0, 17));
  const axis = svg.append("g").attr("transform", `translate(0,${height - 22})`);
  const show = (scale) => {
    axis.call(axisBottom(scale).ticks(8).tickFormat((t) => (t ? seconds(t) : "0")));
    bars.select("rect").attr("x", (r) => scale(r.begin)).attr("width", (r) => Math.max(0.6, scale(r.begin + r.seconds) - scale(r.begin)));
    bars.select("text").attr("x", (r) => Math.max(left, scale(r.begin)) + 2)
      .attr("display", (r) => (scale(r.begin + r.seconds) - Math.max(left, scale(r.begin)) > 7 * r.name.length ? null : "none"));
  };
  const whole = [[left, 0], [width - 10, height]];
  svg.call(zoom().scaleExtent([1, 5000]).extent(whole).translateExtent(whole).on("zoom", (e) => show(e.transform.rescaleX(x))));
  show(x);
  return svg.node();
}
