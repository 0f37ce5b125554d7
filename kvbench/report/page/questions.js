// ---- questions: every cell's answer to one question, compared with one of them, the reference

const MARKED = 12; // most characters of a first difference that are marked
const named = (question) => `${question.task}: ${question.id}`;
const opened = (question) => named(question) + (question.opening && ` – ${question.opening}`);
const budgeted = ({ method, budget, interval }) =>
  method + (budget === "-" ? "" : ` at ${budget}`) + (interval ? `, interval ${interval}` : "");
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

// How a text relates to the reference's; a text that the page cuts is compared as far as it is shown.
function comparison(text, cut, other, length, name) {
  if (length < text.length && length < other.length) return `differs from ${name} at character ${length + 1}`;
  if (text.length === other.length) return `equal to ${name}${cut && " as far as shown"}`;
  return text.length < other.length ? `ends where ${name} goes on` : `goes on where ${name} ends`;
}

// An answer's text with its heading. Beside the reference's text its beginning is dimmed as far as both are equal.
function part(kind, answer, base) {
  const [text, note] = answer[kind];
  if (!text) return [];
  const [other] = base[kind];
  const compared = answer !== base && other;
  const length = compared ? shared(text, other) : 0;
  const [first] = compared ? text.slice(length).match(new RegExp(`^\\s*\\S{0,${MARKED}}`, "u")) : [""];
  const pre = element("pre", "");
  pre.append(
    element("span", text.slice(0, length), { className: "same" }),
    element("span", first, { className: "first" }),
    text.slice(length + first.length),
  );
  const heading = compared ? `${kind}, ${comparison(text, note, other, length, called(base))}` : kind;
  return [element("p", heading, { className: "label" }), pre, ...(note ? [element("p", note, { className: "label" })] : [])];
}

function card(question, answer, base) {
  const made = document.createElement("article");
  if (answer === base) made.className = "base"; // stays beside every other, whatever the filters leave
  else Object.assign(made.dataset, { method: answer.method, budget: answer.budget });
  const scores = Object.entries(answer.scores).map(([name, value]) => `${name.replace("_", " ")} ${+value.toFixed(3)}`);
  const ended = answer.stop === "length" ? "truncated" : answer.stop;
  const facts = [...scores, answer.tokens === null ? "" : `${answer.tokens} tokens`, ended, ...answer.kept];
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
  at("asked-images").hidden = !question.images.length;
  at("asked-images").replaceChildren(...question.images.map((text) => element("li", text)));
  const others = question.answers.filter((answer) => answer !== base);
  at("answers").replaceChildren(...[base, ...others].map((answer) => card(question, answer, base)));
  filter();
  for (const mark of document.querySelectorAll("#answers .first:not(:empty)")) {
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
  at("asked-count").textContent = places.length ? `${places.length} of ${all}` : `None of the ${all} questions on this page fits.`;
  ask();
}

function move(by) {
  const select = at("question");
  select.selectedIndex = (select.selectedIndex + by + select.length) % select.length;
  ask();
}

if (data.questions.length) {
  const every = data.questions.flatMap(({ answers }) => answers);
  const names = new Set(every.sort((a, b) => a.order - b.order).map(called)); // the full cache first
  options(at("against"), [...names].map((name) => [name, name]));
  at("question").addEventListener("change", ask);
  at("against").addEventListener("change", list);
  at("differing").addEventListener("change", list);
  at("before").addEventListener("click", () => move(-1));
  at("after").addEventListener("click", () => move(1));
  list();
}
