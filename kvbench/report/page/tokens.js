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
  at("kept-question").addEventListener("change", chooseQuestion);
  at("kept-answer").addEventListener("change", chooseAnswer);
  at("kept-layer").addEventListener("change", chooseLayer);
  at("kept-head").addEventListener("change", showTokens);
  at("eviction").addEventListener("input", showTokens);
  chooseQuestion();
}

for (const one of document.querySelectorAll(".scripted")) one.hidden = !recorded.length && one.closest("#tokens") !== null;
