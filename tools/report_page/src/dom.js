// Small helpers for elements, and numbers for people.

/** An element with attributes, listeners (functions) and children; text is never read as HTML. */
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return made;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function bytes(n) {
  if (n === null || n === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) [n, at] = [n / 1024, at + 1];
  return `${at ? n.toFixed(1) : n} ${units[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "";
  if (s >= 1) return `${s.toPrecision(3)} s`;
  if (s >= 1e-3) return `${(s * 1e3).toPrecision(3)} ms`;
  return `${(s * 1e6).toPrecision(3)} µs`;
}

export function short(op) {
  return op.replace(/^aten\./, "");
}

export function lineText(at) {
  return at ? `${at[0]}:${at[1]}` : "";
}

/** A table with a head; cells are strings, numbers or elements. Rows with `row.click` can be clicked. */
export function table(head, rows, name = "") {
  const cell = (c) => h("td", typeof c === "number" ? { class: "n" } : {}, c instanceof Node ? c : String(c ?? ""));
  const line = (row) =>
    h("tr", row.click ? { class: "clicks", tabindex: "0", click: row.click, keydown: (e) => e.key === "Enter" && row.click() } : {},
      (row.cells ?? row).map(cell));
  return h("table", { "data-name": name }, h("thead", {}, h("tr", {}, head.map((t) => h("th", {}, t)))), h("tbody", {}, rows.map(line)));
}
