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
const chosen = () => FILTERS.map((name) => [name, at(`by-${name}`).value]).filter(([, value]) => value);

// Whether the choices hide what belongs to `own`, an object with a task, a method ... or only some of them.
function hides(choices, own) {
  return choices.some(([name, value]) => {
    const belongs = own[name] === undefined || own[name] === value || (name === "budget" && own[name] === "-");
    return !belongs;
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

at("filters").addEventListener("input", filterAll);
at("all").addEventListener("click", () => {
  at("filters").reset();
  filterAll();
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

// ---- questions: every cell's answer to one question, compared with one of them, the reference

const AFTER = 12; // most characters of a mark
const named = (question) => `${question.task}: ${question.id}`;
const opened = (question) => named(question) + (question.opening && ` – ${question.opening}`);
const budgeted = (answer) => (answer.budget === "-" ? answer.method : `${answer.method} at ${answer.budget}`);
const called = (answer) => budgeted(answer) + (data.runs > 1 ? `, run ${answer.run}` : "");

function reference({ answers }) {
  return answers.find((answer) => called(answer) === at("against").value) ?? answers[0];
}

// Whether an answer's score differs from the reference's; an answer without a score differs from none.
function differs({ headline }, answer, base) {
  const [own, other] = [answer, base].map(({ scores }) => scores[headline]);
  return own !== undefined && other !== undefined && own !== other;
}

// Whether the score of an answer that the filters leave differs from the reference's.
function differing(question, choices) {
  const base = reference(question);
  return question.answers.some((answer) => !hides(choices, answer) && differs(question, answer, base));
}

// The length of the beginning that two texts share, in whole characters.
function shared(a, b) {
  let length = 0;
  while (length < a.length && a[length] === b[length]) length += 1;
  return /[\uD800-\uDBFF]$/.test(a.slice(0, length)) ? length - 1 : length;
}

function comparison(text, other, length, name) {
  if (length < text.length && length < other.length) return `differs from ${name} at character ${length + 1}`;
  if (text.length === other.length) return `equal to ${name}`;
  return text.length < other.length ? `ends where ${name} goes on` : `goes on where ${name} ends`;
}

// An answer's text with its heading. Beside the reference's text its beginning is dimmed as far as both are equal.
function part(kind, answer, base) {
  const [text, note] = answer[kind];
  if (!text) return [];
  const [other] = base[kind];
  const compared = answer !== base && other;
  const length = compared ? shared(text, other) : 0;
  const [first] = compared ? text.slice(length).match(new RegExp(`^\\s*\\S{0,${AFTER}}`, "u")) : [""];
  const pre = element("pre", "");
  pre.append(
    element("span", text.slice(0, length), { className: "same" }),
    element("span", first, { className: "first" }),
    text.slice(length + first.length),
  );
  const heading = compared ? `${kind}, ${comparison(text, other, length, called(base))}` : kind;
  return [element("p", heading, { className: "label" }), pre, ...(note ? [element("p", note, { className: "label" })] : [])];
}

function card(question, answer, base) {
  const made = document.createElement("article");
  if (answer === base) made.className = "base"; // stays beside every other, whatever the filters leave
  else Object.assign(made.dataset, { method: answer.method, budget: answer.budget });
  const scores = Object.entries(answer.scores).map(([name, value]) => `${name.replace("_", " ")} ${+value.toFixed(3)}`);
  const ended = answer.stop === "length" ? "truncated" : answer.stop;
  const facts = [...scores, answer.tokens === null ? "" : `${answer.tokens} tokens`, ended];
  if (data.runs > 1) facts.push(`run ${answer.run}`);
  if (answer.status !== "ok") facts.push(answer.status, answer.note);
  made.append(element("h4", budgeted(answer)), element("p", facts.filter(Boolean).join(", "), { className: "facts" }));
  if (differs(question, answer, base)) {
    made.className = "apart";
    made.append(element("p", `≠ another score than ${called(base)}`, { className: "label apart" }));
  }
  made.append(...part("extracted", answer, base), ...part("output", answer, base));
  if (Object.hasOwn(data.kept, answer.key)) {
    const button = element("button", "Tokens kept", { type: "button" });
    button.addEventListener("click", () => look(answer.key));
    made.append(button);
  }
  return made;
}

function ask() {
  const question = data.questions[at("question").value];
  at("asked").hidden = !question;
  if (!question) return;
  const base = reference(question);
  at("asked-title").textContent = named(question);
  at("asked-withheld").hidden = !question.withheld;
  at("asked-withheld").textContent = question.withheld;
  at("asked-prompt").hidden = !question.prompt[0];
  at("asked-prompt").querySelector("pre").textContent = question.prompt.filter(Boolean).join("\n");
  const others = question.answers.filter((answer) => answer !== base);
  at("answers").replaceChildren(...[base, ...others].map((answer) => card(question, answer, base)));
  filter();
  for (const mark of document.querySelectorAll("#answers .first")) {
    mark.parentElement.scrollTop = mark.offsetTop - mark.parentElement.clientHeight / 2;
  }
}

// Lists the questions that the filters leave, and shows the one that was shown, or the first.
function list() {
  if (!data.questions.length) return;
  const choices = chosen();
  const places = [...data.questions.keys()].filter((place) => {
    const question = data.questions[place];
    if (choices.some(([name, value]) => name === "task" && !question.titles.includes(value))) return false;
    return !at("differing").checked || differing(question, choices);
  });
  const before = at("question").value;
  options(at("question"), places.map((place) => {
    const question = data.questions[place];
    return [place, `${differing(question, choices) ? "≠ " : ""}${opened(question)}`];
  }));
  if (places.map(String).includes(before)) at("question").value = before;
  const all = data.questions.length;
  at("asked-count").textContent = places.length ? `${places.length} of ${all}` : `None of the ${all} questions is left.`;
  ask();
}

function move(by) {
  const select = at("question");
  select.selectedIndex = (select.selectedIndex + by + select.length) % select.length;
  ask();
}

if (data.questions.length) {
  const names = new Set(data.questions.flatMap(({ answers }) => answers.map(called)));
  options(at("against"), [...names].map((name) => [name, name]));
  at("question").addEventListener("input", ask);
  at("against").addEventListener("input", list);
  at("differing").addEventListener("input", list);
  at("before").addEventListener("click", () => move(-1));
  at("after").addEventListener("click", () => move(1));
  list();
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
  options(at("kept-question"), recorded.map(({ question }, place) => [place, opened(question)]));
  at("kept-question").addEventListener("input", chooseQuestion);
  at("kept-answer").addEventListener("input", chooseAnswer);
  at("kept-layer").addEventListener("input", chooseLayer);
  at("kept-head").addEventListener("input", showTokens);
  at("eviction").addEventListener("input", showTokens);
  chooseQuestion();
}

for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
for (const one of document.querySelectorAll(".scripted")) one.hidden = !recorded.length && one.closest("#tokens") !== null;
