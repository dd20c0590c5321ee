"use strict";
// Text from a model comes in as data and is inserted as text. Only HTML that our own server has rendered is inserted
// as markup.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};

// Light or dark theme: the system's preference, or the last choice made by the button.
function startTheme() {
  const button = $("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("meshrl-theme"); } catch { return null; } };
  let chosen = remembered();
  const show = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.style.colorScheme = chosen || "";
    button.textContent = dark ? "light" : "dark";
    button.setAttribute("aria-label", `use ${button.textContent} colours`);
  };
  button.hidden = false;
  button.onclick = () => {
    chosen = button.textContent;
    try { localStorage.setItem("meshrl-theme", chosen); } catch { /* pages opened from a file may have no storage */ }
    show();
  };
  system.onchange = show;
  show();
}

// One tooltip for the values under the pointer, or of the step chosen with the arrow keys.
function showTip(text, box) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const room = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.x + 14), innerWidth - room.width - 8);
  const above = box.y - room.height - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.min(box.y + 18, innerHeight - room.height - 8)}px`;
}
const hideTip = () => { $("tip").hidden = true; };

function startPictures(root) {
  for (const svg of root.querySelectorAll("figure > svg")) {
    const hits = [...svg.querySelectorAll(".hit")];
    for (const hit of hits) {
      const title = hit.querySelector("title");
      hit.dataset.text = title.textContent;
      title.remove();
      hit.onpointermove = (event) => showTip(hit.dataset.text, { x: event.clientX, y: event.clientY });
      hit.onpointerleave = hideTip;
    }
    if (!hits.length) continue;
    let at = hits.length;
    const choose = (place) => {
      if (hits[at]) hits[at].classList.remove("at");
      at = place;
      if (!hits[at]) return hideTip();
      hits[at].classList.add("at");
      const line = hits[at].querySelector("line").getBoundingClientRect();
      showTip(hits[at].dataset.text, { x: line.x, y: line.y + 40 });
    };
    svg.tabIndex = 0;
    svg.onblur = () => choose(-1);
    svg.onkeydown = (event) => {
      const last = hits.length - 1;
      const places = { ArrowLeft: at < 0 ? last : Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last, Escape: -1 };
      if (!(event.key in places)) return;
      event.preventDefault();
      choose(places[event.key]);
    };
  }
}

// Colours of single tokens. Each mode is named after the column it reads, and has a label, the meaning of both ends of
// its scale, and the colour of a value.
const tint = (color, share) => `color-mix(in srgb, var(--${color}) ${Math.round(100 * Math.min(1, share))}%, transparent)`;
const MODES = {
  log_prob: {
    label: "log-prob", ends: ["certain", "unlikely (-4 or less)"], colors: ["transparent", tint("c1", 0.75)],
    color: (value) => (value > -0.01 ? "" : tint("c1", 0.75 * Math.sqrt(Math.min(4, -value) / 4))),
  },
  advantage: {
    label: "advantage", ends: ["worse than expected", "better"], colors: [tint("c5", 0.7), tint("c2", 0.7)],
    color: (value) => (value ? tint(value < 0 ? "c5" : "c2", 0.15 + 0.55 * Math.min(1, Math.abs(value) / 2)) : ""),
  },
  version: {
    label: "version", ends: ["one colour for each", ""], colors: [tint("c0", 0.4), tint("c3", 0.4)],
    color: (value) => (value < 0 ? "" : tint(`c${[0, 1, 2, 3, 4, 5, 6, 8][value % 8]}`, 0.4)),
  },
  mismatch: {
    label: "trainer minus rollout", ends: ["equal", "0.1 nats or more"], colors: ["transparent", tint("c3", 0.8)],
    color: (value) => (Math.abs(value) < 1e-4 ? "" : tint("c3", 0.8 * Math.min(1, Math.log10(Math.abs(value) / 1e-4) / 3))),
  },
};
const valueAt = (column, place) => (Array.isArray(column) ? column[place] : column);
const short = (value) => (Math.abs(value) >= 1e-3 || value === 0 ? +value.toFixed(3) : value.toExponential(1));

function tokenSpans(tokens, mode) {
  const parts = document.createDocumentFragment();
  tokens.text.forEach((text, place) => {
    const span = make("span", "", text);
    const told = valueAt(tokens.told, place);
    const value = valueAt(tokens[mode], place);
    if (told) span.className = "told";
    else if (MODES[mode] && value !== undefined && value !== null) span.style.background = MODES[mode].color(value);
    span.dataset.place = place;
    parts.append(span);
  });
  return parts;
}

function tokenTip(tokens, place) {
  const lines = [`token ${place + 1}: ${JSON.stringify(tokens.text[place])}`];
  if (valueAt(tokens.told, place)) return `${lines[0]}\ntold to the model, not sampled`;
  for (const [name, mode] of Object.entries(MODES)) {
    const value = valueAt(tokens[name], place);
    if (value !== undefined && value !== null) lines.push(`${mode.label} ${short(value)}`);
  }
  return lines.join("\n");
}

// The list of samples and its filters.
const PAGE = 20;
const view = { shown: PAGE, samples: data.samples || [], inputs: {} };

function sampleCard(sample, mode) {
  const card = make("article", "card sample");
  card.tabIndex = -1;
  const header = make("header");
  header.append(make("b", "", `step ${sample.step ?? "?"}`));
  if (sample.split) header.append(make("span", "", sample.split));
  if (sample.score !== null) header.append(make("span", "", `score ${short(sample.score)}`));
  if (typeof sample.tokens?.advantage === "number") header.append(make("span", "", `advantage ${short(sample.tokens.advantage)}`));
  if (sample.finish) header.append(make("span", "", `ended by ${sample.finish}`));
  const tokens = sample.tokens;
  if (tokens) header.append(make("span", "", tokens.of ? `first ${tokens.text.length} of ${tokens.of} tokens` : `${tokens.text.length} tokens`));
  card.append(header, make("pre", "prompt", sample.prompt));
  const answer = make("pre", "answer");
  if (tokens && mode !== "text") {
    answer.append(tokenSpans(tokens, mode));
    answer.onpointermove = (event) => {
      const place = event.target.dataset.place;
      if (place === undefined) return hideTip();
      showTip(tokenTip(tokens, +place), { x: event.clientX, y: event.clientY });
    };
    answer.onpointerleave = hideTip;
  } else answer.textContent = sample.response;
  card.append(answer);
  if (sample.more.length) {
    const more = make("div", "more");
    sample.more.forEach(([key, value], i) => more.append(i ? " · " : "", `${key}: `, make("code", "", value)));
    card.append(more);
  }
  return card;
}

function matches(sample) {
  const { from, to, low, high, text, finish, split } = view.inputs;
  const bound = (input) => (input.value === "" ? null : +input.value);
  if (bound(from) !== null && sample.step < bound(from)) return false;
  if (bound(to) !== null && sample.step > bound(to)) return false;
  if (bound(low) !== null && !(sample.score >= bound(low))) return false;
  if (bound(high) !== null && !(sample.score <= bound(high))) return false;
  if (finish.value && sample.finish !== finish.value) return false;
  if (split.value && sample.split !== split.value) return false;
  const wanted = text.value.toLowerCase();
  return !wanted || `${sample.prompt}\n${sample.response}`.toLowerCase().includes(wanted);
}

function drawScale(mode) {
  const scale = make("span", "scale muted");
  if (!MODES[mode]) return scale;
  const bar = make("i");
  bar.style.background = `linear-gradient(90deg, ${MODES[mode].colors.join(", ")})`;
  scale.append(MODES[mode].ends[0], bar, MODES[mode].ends[1]);
  return scale;
}

function drawSamples() {
  hideTip();
  const mode = view.inputs.color.value;
  const found = view.samples.filter(matches);
  const shown = found.slice(0, view.shown);
  const line = make("p", "found muted", `${found.length} of ${view.samples.length} samples, the latest first`);
  line.append(drawScale(mode));
  const parts = [line, ...shown.map((sample) => sampleCard(sample, mode))];
  if (shown.length < found.length) {
    const more = make("button", "", `show ${Math.min(PAGE, found.length - shown.length)} more`);
    more.type = "button";
    more.onclick = () => { view.shown += PAGE; drawSamples(); };
    parts.push(more);
  }
  view.list.replaceChildren(...parts);
}

function refill(select, values) {
  const chosen = select.value;
  const all = make("option", "", "all");
  all.value = "";
  select.replaceChildren(all, ...values.map((value) => make("option", "", value)));
  if (values.includes(chosen)) select.value = chosen;
  select.parentElement.hidden = values.length < 2;
}

function refreshSamples() {
  const distinct = (name) => [...new Set(view.samples.map((sample) => sample[name]).filter(Boolean))].sort();
  refill(view.inputs.finish, distinct("finish"));
  refill(view.inputs.split, distinct("split"));
  $("samples").hidden = !view.samples.length;
  drawSamples();
}

function startSamples() {
  const root = $("samples");
  if (!root) return;
  const filters = make("form", "card filters");
  filters.onsubmit = (event) => event.preventDefault();
  const field = (name, label, element, type) => {
    const box = make("label", "", label);
    if (type) element.type = type;
    if (type === "number") element.step = "any";
    element.name = name;
    element.oninput = () => { view.shown = PAGE; drawSamples(); };
    box.append(element);
    filters.append(box);
    view.inputs[name] = element;
    return element;
  };
  const color = field("color", "colour tokens by", make("select"));
  for (const [value, label] of [...Object.entries(MODES).map(([name, mode]) => [name, mode.label]), ["text", "nothing (plain text)"]]) {
    const option = make("option", "", label);
    option.value = value;
    color.append(option);
  }
  field("from", "step from", make("input"), "number");
  field("to", "step to", make("input"), "number");
  field("low", "score from", make("input"), "number");
  field("high", "score to", make("input"), "number");
  field("finish", "ended by", make("select"));
  field("split", "split", make("select"));
  field("text", "text contains ( / )", make("input"), "search");
  view.list = make("div");
  root.replaceChildren(make("h2", "", "Samples"), filters, view.list);
  root.append(make("p", "muted", "Keys: / search, c next colouring, j and k next and previous sample."));
  refreshSamples();
  document.addEventListener("keydown", sampleKeys);
}

function sampleKeys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("samples").hidden) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const cards = [...view.list.querySelectorAll(".sample")];
  const at = cards.indexOf(document.activeElement);
  const { text, color } = view.inputs;
  if (event.key === "/") text.focus();
  else if (event.key === "c") { color.selectedIndex = (color.selectedIndex + 1) % color.options.length; drawSamples(); }
  else if (event.key === "j") cards[Math.min(cards.length - 1, at + 1)]?.focus();
  else if (event.key === "k") cards[Math.max(0, at - 1)]?.focus();
  else return;
  event.preventDefault();
}

// Live updates: polls the server of this page for the parts of the run that came after the page's mark.
const MOST_SAMPLES = 1000;
const drawn = {};

function replaceSection(name, html) {
  const section = $(name);
  if (!section || drawn[name] === html) return;
  drawn[name] = html;
  const opened = new Set([...section.querySelectorAll("details[open]")].map((details) => details.dataset.keep));
  const focus = section.contains(document.activeElement) && document.activeElement.closest("[data-keep]")?.dataset.keep;
  section.innerHTML = html;
  for (const details of section.querySelectorAll("details")) details.open ||= opened.has(details.dataset.keep);
  startPictures(section);
  if (focus) [...section.querySelectorAll("[data-keep]")].find((kept) => kept.dataset.keep === focus)?.querySelector("svg, summary")?.focus();
}

function takeNews(news) {
  data.mark = news.mark;
  for (const [name, html] of Object.entries(news.sections || {})) replaceSection(name, html);
  if (news.title) document.title = news.title;
  if (news.reset) view.samples = [];
  if (news.reset || news.samples?.length) {
    view.samples = [...(news.samples || []), ...view.samples].slice(0, MOST_SAMPLES);
    refreshSamples();
  }
}

function say(state, age) {
  const status = $("status");
  const ago = age === null || age === undefined ? "" : `, last step ${age < 90 ? `${Math.round(age)} s` : `${Math.round(age / 60)} min`} ago`;
  const words = { running: `live${ago}`, waiting: "waiting for the first step", gone: "the run's folder is gone; this is the last that was seen", lost: "no answer from meshrl watch" };
  status.className = state === "running" || state === "waiting" ? "on" : "off";
  status.textContent = words[state];
}

async function poll() {
  try {
    const answer = await fetch(`/api/run?after=${encodeURIComponent(data.mark)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const news = await answer.json();
    takeNews(news);
    say(news.state, news.age);
  } catch {
    say("lost");
  }
}

function startLive() {
  const next = async () => {
    if (!document.hidden) await poll();
    setTimeout(next, data.every_ms);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  next();
}

startTheme();
startPictures(document);
startSamples();
if (data.live) startLive();
