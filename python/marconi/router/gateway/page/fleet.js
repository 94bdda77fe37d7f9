// The fleet's page: workers, hit rates and decisions, as `GET /router` answers them.

const INTERVAL_S = 1, NUM_DECISIONS = 50;
const look = new Look(), rows = new Map();
const ONE_COLOR = { hit: (name, ctx, look) => look.color("hit"), bars: (name, ctx, look) => look.color("bars") };
const charts = {
  seen: new StepChart($("seen"), ONE_COLOR.hit, 100),
  expected: new StepChart($("expected"), ONE_COLOR.hit, 100),
  prompts: new StepChart($("prompts"), ONE_COLOR.bars),
};
let fleet = null, isPaused = false;

const soon = (value_s) => (value_s < 1 ? `${Math.round(1000 * value_s)} ms` : seconds(value_s));
const known = (value, text) => (value === null || value === undefined ? "–" : text(value));
const timed = (value_s) => known(value_s, soon);
const counted = (value) => known(value, number);

// Workers

// Why a worker takes no requests, as a sentence.
function absence({ name, condition, why }) {
  const said = { down: "is down", refused: "is refused", unknown: "is not in use yet" }[condition] ?? condition;
  const next = condition === "down" ? " Health checks try whether it is back." : "";
  return `${name} ${said}${why ? `: ${why}` : ""}.${next}`;
}

function cellsOf({ condition, num_running, work_ahead_s, turnover, latest }) {
  const hits = latest?.cached_tokens, first = latest?.ttft_s, ahead_s = condition === "up" ? work_ahead_s : null;
  const rate = (tokens) => known(hits, () => percent(tokens(hits).mean, hits.prompt.mean));
  return [condition, rate(({ expected }) => expected), rate(({ seen }) => seen),
    timed(first?.expected.median), timed(first?.seen.median), number(num_running), timed(ahead_s),
    known(turnover, (share) => `${Math.round(100 * share)} %`)];
}

// Rows stay the elements that they are, so that a link in focus keeps it.
function showWorkers(workers) {
  const names = new Set(workers.map(({ name }) => name));
  for (const [name, { row }] of rows) if (!names.has(name)) { row.remove(); rows.delete(name); }
  const body = $("workers").tBodies[0];
  workers.forEach((worker, index) => {
    const { row, link, cells } = rows.get(worker.name) ?? newRow(worker.name);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    link.href = `ui/${index}/page`;
    cellsOf(worker).forEach((text, at) => { if (cells[at].textContent !== text) cells[at].textContent = text; });
  });
}

function newRow(name) {
  const [row, head, link] = create("tr", "th", "a"), cells = create(...new Array(8).fill("td"));
  head.scope = "row";
  link.textContent = name;
  head.append(link);
  row.append(head, ...cells);
  rows.set(name, { row, link, cells });
  return rows.get(name);
}

function showAbsent(workers) {
  const texts = workers.filter(({ condition }) => condition !== "up").map(absence);
  // What is unchanged is left alone: screen readers read a change aloud.
  if (texts.join() === [...$("absent").children].map(({ textContent }) => textContent).join()) return;
  $("absent").replaceChildren(...texts.map((text) => { const [item] = create("p"); item.textContent = text; return item; }));
}

function summary({ workers, traffic, time_s }) {
  if (!workers.length) return "The router has no worker.";
  const up = workers.filter(({ condition }) => condition === "up").length;
  const running = workers.reduce((sum, { num_running }) => sum + num_running, 0);
  const all = workers.length === 1 ? "1 worker" : `${number(workers.length)} workers`;
  const hits = totalOf(stepsUntil(time_s, traffic));
  return `${number(up)} of ${all} up, ${number(running)} ${running === 1 ? "request" : "requests"} running. `
    + `Hit rate of the last hour: ${percent(hits.num_cached_tokens, hits.num_reported_tokens)} seen, `
    + `${percent(hits.num_expected_tokens, hits.num_prompt_tokens)} expected.`;
}

// Hit rates

function totalOf(steps) {
  const total = { num_requests: 0, num_prompt_tokens: 0, num_expected_tokens: 0, num_reported_tokens: 0, num_cached_tokens: 0 };
  for (const step of steps) for (const name of Object.keys(total)) total[name] += step[name];
  return total;
}

// The latest steps without a gap: those in which no request came are empty.
function stepsUntil(now_s, { step_s, num_steps, steps }) {
  const found = new Map(steps.map((step) => [step.at_s, step])), last_s = Math.floor(now_s / step_s) * step_s;
  return Array.from({ length: num_steps }, (_, at) => {
    const at_s = last_s - (num_steps - 1 - at) * step_s;
    return found.get(at_s) ?? { at_s, ...totalOf([]) };
  });
}

const share = (part, all) => (all ? 100 * part / all : 0);

function showTraffic({ time_s, traffic }) {
  const steps = stepsUntil(time_s, traffic), all = totalOf(steps), last = steps.length - 1;
  charts.seen.draw({ seen: steps.map((step) => share(step.num_cached_tokens, step.num_reported_tokens)) }, last, look);
  charts.expected.draw({ expected: steps.map((step) => share(step.num_expected_tokens, step.num_prompt_tokens)) }, last, look);
  charts.prompts.draw({ prompts: steps.map((step) => step.num_prompt_tokens) }, last, look);
  $("seen-text").textContent = all.num_reported_tokens
    ? `${percent(all.num_cached_tokens, all.num_reported_tokens)} of the last hour's ${number(all.num_reported_tokens)} tokens of prompts whose answers report it.`
    : "No answer of the last hour reports cached tokens.";
  $("expected-text").textContent = all.num_prompt_tokens
    ? `${percent(all.num_expected_tokens, all.num_prompt_tokens)} of the last hour's prompt tokens.` : "No prompt in the last hour.";
  $("prompts-text").textContent = `${number(all.num_prompt_tokens)} in ${number(all.num_requests)} requests of the last hour.`;
  fill($("numbers"), steps.filter(({ num_requests }) => num_requests).reverse().map((step) => [
    new Date(1000 * step.at_s).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }),
    number(step.num_requests), number(step.num_prompt_tokens), percent(step.num_expected_tokens, step.num_prompt_tokens),
    percent(step.num_cached_tokens, step.num_reported_tokens)]));
}

// Decisions

function outcome({ status, failures }) {
  const end = status ?? "under way, or its client has left";
  return failures ? `${end}, after ${failures.join("; ")}` : `${end}`;
}

function showDecisions({ time_s, recent }) {
  fill($("decisions"), recent.slice(0, NUM_DECISIONS).map((each) => [
    seconds(Math.max(time_s - each.at_s, 0)), each.worker ?? "–", each.reason ?? "–", counted(each.num_prompt_tokens),
    counted(each.num_hit_tokens), counted(each.num_cached_tokens), timed(each.expected_ttft_s), timed(each.ttft_s), outcome(each)]));
  $("decisions-none").hidden = recent.length > 0;
}

// Updates

function show() {
  if (fleet === null) return;
  $("title").textContent = `routing ${fleet.routing.rule}, version ${fleet.version}`;
  $("summary").textContent = summary(fleet);
  showAbsent(fleet.workers);
  showWorkers(fleet.workers);
  showTraffic(fleet);
  showDecisions(fleet);
}

async function ask() {
  if (!isPaused && !document.hidden) {
    try {
      const answer = await fetch("../router", { cache: "no-store" });
      if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `HTTP ${answer.status}`);
      fleet = await answer.json();
      show();
    } catch (error) { $("summary").textContent = `No update: ${error.message}`; }
  }
  setTimeout(ask, 1000 * INTERVAL_S);
}

$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  $("pause").textContent = isPaused ? "Resume updates" : "Pause updates";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { look.read(); show(); });
new ResizeObserver(show).observe($("seen"));
ask();
