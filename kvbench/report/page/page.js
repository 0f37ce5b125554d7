"use strict";
// Enhances a page that is complete without it: filters, sorting, hints; questions.js and tokens.js add two browsers.
// The page joins the three files into one script. Data come from the element #data and enter the page as text or
// attributes, never as markup.

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);

function element(name, text, properties = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, properties);
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", text, { value })));
}

// ---- filters: an element with data-task (-method, -budget, -verdict) is hidden while another one is chosen; a line of
// several tasks has several verdicts, separated by commas

const FILTERS = ["task", "method", "budget", "verdict"];
const chosen = () => FILTERS.map((name) => [name, at(`by-${name}`).value]).filter(([, value]) => value);

// Whether the choices hide what belongs to `own`, an object with a task, a method ... or only some of them.
function hides(choices, own) {
  return choices.some(([name, value]) => {
    if (own[name] === undefined || (name === "budget" && own[name] === "-")) return false;
    return !(name === "verdict" ? own[name].split(",") : [own[name]]).includes(value);
  });
}

function filter() {
  const choices = chosen();
  for (const one of document.querySelectorAll(FILTERS.map((name) => `main [data-${name}]`).join())) {
    one.hidden = hides(choices, one.dataset);
  }
  const rows = [...document.querySelectorAll("#cells tbody tr")];
  const shown = rows.filter((row) => !row.closest("[hidden]")).length;
  at("count").textContent = choices.length ? `${shown} of ${rows.length} lines of the tables` : "";
}

function filterAll() {
  filter();
  list();
}

at("filters").addEventListener("change", filterAll);
at("all").addEventListener("click", () => {
  at("filters").reset();
  filterAll();
});

// ---- sorting: by number where a column has numbers, with the units of bytes

const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

function sortKey(cell) {
  const text = cell.textContent.trim();
  const [, digits, unit] = text.replaceAll(",", "").match(/^[≥≤]?([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(\w*)/) ?? [];
  return { text, number: digits === undefined ? NaN : Number(digits) * (UNITS[unit] ?? 1) };
}

function compare(a, b) {
  if (Number.isNaN(a.number) || Number.isNaN(b.number)) {
    return Number.isNaN(a.number) - Number.isNaN(b.number) || a.text.localeCompare(b.text);
  }
  return a.number - b.number;
}

function sort(table, head) {
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map((row) => ({ row, key: sortKey(row.cells[head.cellIndex]) }));
  keyed.sort((a, b) => (up ? compare(a.key, b.key) : compare(b.key, a.key)));
  table.tBodies[0].append(...keyed.map(({ row }) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const head of table.tHead.rows[0].cells) {
    const button = element("button", head.textContent, { type: "button" });
    button.addEventListener("click", () => sort(table, head));
    head.replaceChildren(button);
  }
}

// ---- hints: what a mark of a figure or a cell of a matrix stands for

const MARKS = ".picture [role=graphics-symbol][aria-label]:not([aria-roledescription=axis], [aria-roledescription=legend])";
const HINTED = `[data-tip], ${MARKS}`;

// A mark's label has every value that it was drawn from ("budget (entries): 46.4; cell: gkv 48; mean: 0.98125").
// Shown are the fields with the names of columns, since a place on an axis may be moved sideways.
function said(label) {
  const pairs = label.split("; ").map((part) => part.split(/: (.*)/s));
  const own = pairs.filter(([name, value]) => value && !name.includes(" ") && !["score", "method"].includes(name));
  return own.map(([name, value]) => `${name}: ${/^-?\d+\.\d+$/.test(value) ? +(+value).toPrecision(4) : value}`).join("\n");
}

function hint(event) {
  const marked = event.target.closest?.(HINTED) ?? document.activeElement.closest(HINTED);
  const tip = at("tip");
  tip.hidden = !marked;
  if (!marked) return;
  tip.textContent = marked.dataset.tip ?? said(marked.getAttribute("aria-label"));
  const box = marked.getBoundingClientRect();
  const left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const top = box.bottom + 8 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 8 : box.bottom + 8;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, hint);
document.addEventListener("keydown", (event) => event.key === "Escape" && (at("tip").hidden = true));
for (const cell of document.querySelectorAll("[data-tip]")) cell.tabIndex = 0;

for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
