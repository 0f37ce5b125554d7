"use strict";
// Enhances a page that is complete without it: filters, sorting, hints, questions side by side, tokens per eviction.
// Data come from the element #data and enter the page as text or attributes, never as markup.

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

// ---- filters: an element with data-task (-method, -budget, -verdict) is hidden while another one is chosen

const FILTERS = ["task", "method", "budget", "verdict"];

function filter() {
  const chosen = FILTERS.map((name) => [name, at(`by-${name}`).value]).filter(([, value]) => value);
  for (const one of document.querySelectorAll(FILTERS.map((name) => `main [data-${name}]`).join())) {
    one.hidden = chosen.some(([name, value]) => {
      const own = one.dataset[name];
      return own !== undefined && own !== value && !(name === "budget" && own === "-");
    });
  }
  const rows = [...document.querySelectorAll("#cells tbody tr")];
  const shown = rows.filter((row) => !row.closest("[hidden]")).length;
  at("count").textContent = chosen.length ? `${shown} of ${rows.length} lines of the tables` : "";
}

at("filters").addEventListener("input", filter);
at("all").addEventListener("click", () => {
  at("filters").reset();
  filter();
});

// ---- sorting: by number where a column has numbers, with the units of bytes

const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

function sortKey(cell) {
  const text = cell.dataset.v ?? cell.textContent.trim();
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

// ---- questions: every cell's answer to one question

const named = (question) => `${question.task}: ${question.id}`;
const budgeted = (answer) => (answer.budget === "-" ? answer.method : `${answer.method} at ${answer.budget}`);

function card(answer) {
  const made = document.createElement("article");
  made.dataset.method = answer.method;
  made.dataset.budget = answer.budget;
  const scores = Object.entries(answer.scores).map(([name, value]) => `${name.replace("_", " ")} ${+value.toFixed(3)}`);
  const ended = answer.stop === "length" ? "truncated" : answer.stop;
  const facts = [...scores, answer.tokens === null ? "" : `${answer.tokens} tokens`, ended];
  if (data.runs > 1) facts.push(`run ${answer.run}`);
  if (answer.status !== "ok") facts.push(answer.status, answer.note);
  made.append(element("h4", budgeted(answer)), element("p", facts.filter(Boolean).join(", "), { className: "facts" }));
  if (answer.extracted) {
    made.append(element("p", "extracted", { className: "label" }), element("pre", answer.extracted));
  }
  if (answer.output) made.append(element("p", "output", { className: "label" }), element("pre", answer.output));
  if (Object.hasOwn(data.kept, answer.key)) {
    const button = element("button", "Tokens kept", { type: "button" });
    button.addEventListener("click", () => look(answer.key));
    made.append(button);
  }
  return made;
}

function ask() {
  const question = data.questions[at("question").value];
  at("asked-title").textContent = named(question);
  at("asked-withheld").hidden = !question.withheld;
  at("asked-withheld").textContent = question.withheld;
  at("asked-prompt").hidden = !question.prompt;
  at("asked-prompt").querySelector("pre").textContent = question.prompt;
  at("answers").replaceChildren(...question.answers.map(card));
  filter();
}

function move(by) {
  const select = at("question");
  select.selectedIndex = (select.selectedIndex + by + select.length) % select.length;
  ask();
}

if (data.questions.length) {
  options(at("question"), data.questions.map((question, place) => [place, named(question)]));
  at("question").addEventListener("input", ask);
  at("before").addEventListener("click", () => move(-1));
  at("after").addEventListener("click", () => move(1));
  ask();
}

// ---- tokens: what one head holds after an eviction

const RECENT = 16;
const recorded = data.questions
  .map((question) => ({ question, answers: question.answers.filter((answer) => Object.hasOwn(data.kept, answer.key)) }))
  .filter(({ answers }) => answers.length);

function look(key) {
  const place = recorded.findIndex(({ answers }) => answers.some((answer) => answer.key === key));
  at("kept-question").value = place;
  chooseQuestion();
  at("kept-answer").value = key;
  chooseAnswer();
  at("tokens").scrollIntoView();
}

function chooseQuestion() {
  options(at("kept-answer"), recorded[at("kept-question").value].answers.map((one) => [one.key, budgeted(one)]));
  chooseAnswer();
}

function chooseAnswer() {
  const heads = Object.keys(data.kept[at("kept-answer").value].heads).map((name) => name.split("."));
  const before = at("kept-layer").value;
  const layers = [...new Set(heads.map(([layer]) => layer))];
  options(at("kept-layer"), layers.map((layer) => [layer, layer]));
  if (layers.includes(before)) at("kept-layer").value = before;
  chooseLayer();
}

function chooseLayer() {
  const { heads, seen } = data.kept[at("kept-answer").value];
  const before = at("kept-head").value;
  const own = Object.keys(heads).map((name) => name.split(".")).filter(([layer]) => layer === at("kept-layer").value);
  options(at("kept-head"), own.map(([, head]) => [head, head]));
  if (own.some(([, head]) => head === before)) at("kept-head").value = before;
  const slider = at("eviction");
  const moved = Number(slider.value);
  slider.min = 1;
  slider.max = seen.length + 1; // the last place is the end of the answer
  slider.value = moved || Math.ceil(seen.length / 2);
  showTokens();
}

function state(position, dropped, number, read) {
  if (position >= read) return "unread";
  if (dropped && dropped === number) return "gone";
  if (dropped && dropped < number) return "dropped";
  return position >= read - RECENT ? "recent" : "kept";
}

function showTokens() {
  const { tokens, prompt, seen, heads } = data.kept[at("kept-answer").value];
  const dropped = heads[`${at("kept-layer").value}.${at("kept-head").value}`];
  const number = Number(at("eviction").value);
  const atEnd = number > seen.length;
  const read = atEnd ? tokens.length : seen[number - 1];
  const counts = { kept: 0, recent: 0, dropped: 0, gone: 0, unread: 0 };
  const spans = [];
  tokens.forEach((token, position) => {
    const kind = state(position, dropped.charCodeAt(position) - 48, number, read);
    counts[kind] += 1;
    const look = position < prompt ? kind : `${kind} answer`;
    if (spans.at(-1)?.className === look) spans.at(-1).textContent += token;
    else spans.push(element("span", token, { className: look }));
  });
  at("token-text").replaceChildren(...spans);
  const when = atEnd ? "at the end" : `eviction ${number} of ${seen.length}`;
  at("eviction").setAttribute("aria-valuetext", when);
  at("looked-title").textContent =
    `${when}, ${read} tokens read: ${counts.kept + counts.recent} held, of them ${counts.recent} recent; ` +
    `${counts.gone} dropped by this eviction, ${counts.dropped} before.`;
}

if (recorded.length) {
  options(at("kept-question"), recorded.map(({ question }, place) => [place, named(question)]));
  at("kept-question").addEventListener("input", chooseQuestion);
  at("kept-answer").addEventListener("input", chooseAnswer);
  at("kept-layer").addEventListener("input", chooseLayer);
  at("kept-head").addEventListener("input", showTokens);
  at("eviction").addEventListener("input", showTokens);
  chooseQuestion();
}

for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
for (const one of document.querySelectorAll(".scripted")) one.hidden = !recorded.length && one.closest("#tokens") !== null;
