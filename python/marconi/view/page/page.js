// The page: which frame and which request are shown, what the controls do, and, where the body names their sources,
// requests and frames as they come.

const MAX_FRAMES = 600, MAX_TREES = 60, HISTORY_INTERVAL_S = 10;
const body = document.body, slider = $("time");
const frames = JSON.parse($("frames").textContent).frames;
const latest = new RequestList($("requests"), $("causes-filter"), $("rid"), $("requests-summary"));
const look = new Look(), picture = new TreePicture($("tree"));
const tokensChart = new StepChart($("series"), (name, ctx, look) => hatched(ctx, name, look));
const evictionsChart = new StepChart($("evictions"), (name, ctx, look) => look.color("bars"));
const hour = new HourView();
let current = frames.length - 1, layout = null, view = null, focus = null, isFollowing = true, playing = 0;

function show(step) {
  const start = performance.now();
  current = Math.min(Math.max(step, 0), frames.length - 1);
  slider.max = Math.max(frames.length - 1, 0);
  slider.value = current;
  if (current < 0) { $("summary").textContent = "No frame yet."; return; }
  const frame = frames[current];
  place(frame);
  look.now_s = frame.time_s;
  look.span_s = Math.max(frame.time_s - frames[0].time_s, 1e-3);
  if (look.wanted !== undefined) look.matches = layout.findAll(look.wanted);
  if (look.isAwaited && look.matches.length) { look.isAwaited = false; focusOn(look.matches[0]); }
  words(frame);
  draw();
  performance.measure("marconi-refresh", { start, end: performance.now() });
}

// Lay out a frame; what was looked at before is looked at still, if it is there.
function place(frame) {
  const before = layout, chosen = before && look.selected >= 0 ? knownHash(before, look.selected) : null;
  const isWhole = !view || (before && view.y0 <= 0 && view.y1 >= before.height && view.x0 <= 0);
  layout = new Layout(frame, look.unit);
  look.selected = chosen === null ? -1 : layout.find(chosen);
  trace();
  const focused = focus?.();
  if (focused) view = focused;
  else if (isWhole || focus !== null) view = layout.whole();
  else {
    const grow = layout.height / before.height;
    view = { ...view, y0: view.y0 * grow, y1: view.y1 * grow };
  }
  if (look.selected >= 0) return;
  if (focus === aroundRequest) look.selected = look.end;
  describe(look.selected);
}

// The request that the address names: its sentence, and the end of its path in the tree that is shown.
function trace() {
  const { rid, chosen, latest: { length } } = latest, prefix = chosen?.prefix ?? null;
  look.parts = chosen?.parts ?? [];
  look.end = prefix === null || !layout ? -1 : layout.find(parseInt(prefix, 16));
  let text = "";
  if (chosen) {
    text = `Request ${rid}: ${chosen.line}.`;
    if (prefix === null) text += " The tree has no state that it resumed from or left.";
    else if (layout && look.end < 0) {
      const isAwaited = layout.nodes.hash.includes(UNKNOWN);
      text += ` Its prefix ${prefix} is not ${isAwaited ? "known yet" : "in the tree"} at this step.`;
    }
  } else if (rid !== null) {
    text = length ? `None of the latest ${number(length)} requests has the id ${rid}.` : `Request ${rid}: no list yet.`;
  }
  // A text that is read aloud when it changes.
  if ($("request").textContent !== text) $("request").textContent = text;
  $("close").hidden = rid === null;
}

const aroundRequest = () => (look.end < 0 ? null : layout.around(look.end));

function openRequest() {
  latest.choose(body.dataset.requests ? new URLSearchParams(location.hash.slice(1)).get("rid") : null);
  if (latest.rid === null) {
    if (focus === aroundRequest) focus = null;
    trace();
    redraw();
    return;
  }
  focus = aroundRequest;
  look.selected = -1;
  if (layout) follow(frames.length - 1); else trace();
  document.querySelector(".tree").scrollIntoView({ block: "nearest" });
}

function draw() {
  if (!layout) return;
  picture.draw(layout, view, look);
  tokensChart.draw(seriesOf(frames), current, look);
  evictionsChart.draw({ evictions: frames.map((frame) => frame.num_evicted) }, current, look);
}

function redraw() { if (layout) picture.draw(layout, view, look); }

function counted(frame) {
  const { kind, role } = frame.nodes, counts = { live: 0, ghost: 0, host: 0, locked: 0, states: 0, roles: ROLES.map(() => 0) };
  for (let i = 0; i < kind.length; i++) {
    if (frame.nodes.parent[i] < 0) continue;
    counts[picture.kindOf(kind[i])]++;
    if (kind[i] & KIND.state) { counts.states++; counts.roles[role[i]]++; }
    if (kind[i] & KIND.locked) counts.locked++;
  }
  return counts;
}

function words(frame) {
  const counts = counted(frame), missed = Object.values(frame.missed_tokens).reduce((sum, each) => sum + each, 0);
  const all = frame.hit_tokens + missed;
  $("when").textContent = `${seconds(frame.time_s)}, step ${current + 1} of ${frames.length}`;
  slider.setAttribute("aria-valuetext", `step ${current + 1} of ${frames.length}, ${seconds(frame.time_s)}`);
  $("summary").textContent = `${number(frame.num_requests)} requests so far. In this step ${percent(frame.hit_tokens, all)} of `
    + `${number(all)} prompt tokens were cached and ${number(frame.num_evicted)} states were evicted. `
    + `The cache holds ${number(counts.states)} states in ${number(counts.live)} spans and remembers ${number(counts.ghost)} ghosts.`;
  drawPools($("pools"), frame.pools);
  const names = Object.keys(seriesOf(frames));
  legend($("series-legend"), names.map((name) => ["", name]));
  legend($("evictions-legend"), [["bars", "states evicted"]]);
  const rows = [["Prompt tokens cached", frame.hit_tokens, "tokens"],
    ...Object.entries(frame.missed_tokens).map(([name, value]) => [`Prompt tokens computed: ${name}`, value, "tokens"]),
    ["Evictions", frame.num_evicted, "states"], ["Live spans", counts.live, "nodes"], ["Spans on the host alone", counts.host, "nodes"],
    ["Ghosts", counts.ghost, "nodes"], ["States", counts.states, "states"],
    ...ROLES.slice(1).map((name, at) => [`States: ${ROLE_NAMES[name]}`, counts.roles[at + 1], "states"]),
    ["Locked states", counts.locked, "states"],
    ...frame.pools.flatMap((pool) => [[`Pool ${pool.name}: size`, pool.size, pool.unit], [`Pool ${pool.name}: free`, pool.free, pool.unit],
      ...Object.entries(pool.cached).map(([name, value]) => [`Pool ${pool.name}: cached ${name}`, value, pool.unit]),
      [`Pool ${pool.name}: in use`, inUse(pool), pool.unit]])];
  fill($("numbers"), rows.map(([name, value, unit]) => [name, number(value), unit]));
  fill($("evicted"), frame.evicted.map((each) => [finder(each.hash), number(each.depth), number(each.tokens), NEEDS[each.need] ?? each.need, seconds(each.idle_s), each.kept]));
  const more = frame.num_evicted - frame.evicted.length;
  $("evicted-more").textContent = frame.num_evicted === 0 ? "Nothing was evicted." : more > 0 ? `And ${number(more)} before.` : "";
}

const NEEDS = { bytes: "memory", kv: "KV", state: "state slots" };

function finder(hash) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = hex(hash);
  button.setAttribute("aria-label", `Find prefix ${hex(hash)} in the tree`);
  button.addEventListener("click", () => { $("query").value = hex(hash); find(); });
  return button;
}

function describe(i) {
  if (i < 0) { $("node").textContent = "No node is selected."; return; }
  $("node").textContent = textOf(i);
}

function textOf(i) {
  const { depth, tokens, kind, role, uses, last_s, worth, hash, parent } = layout.nodes;
  if (parent[i] < 0) return "Root of a name space.";
  const held = [kind[i] & KIND.live ? "live" : kind[i] & KIND.hostKv ? "on the host" : "ghost"];
  if (kind[i] & KIND.state) held.push("state");
  if (kind[i] & KIND.hostState) held.push("state on the host");
  if (kind[i] & KIND.locked) held.push("locked");
  const what = role[i] ? `, ${ROLE_NAMES[ROLES[role[i]]]}` : "";
  const name = hash[i] === UNKNOWN ? "Prefix, not hashed yet" : `Prefix ${hex(hash[i])}`;
  return `${name}: ${number(tokens[i])} tokens up to depth ${number(depth[i])}; ${held.join(", ")}${what}; `
    + `${number(uses[i])} uses, last ${seconds(Math.max(look.now_s - last_s[i], 0))} ago${worthOf(worth[i])}.`;
}

function worthOf(worth) {
  if (worth === UNRANKED) return "";
  if (worth === 0) return "; next to be evicted";
  if (worth <= 10 || worth > 90) return `; in the ${worth > 90 ? "last" : "first"} tenth to be evicted`;
  return `; to be evicted after about ${worth} % of the states`;
}

function select(i) { look.selected = i; describe(i); redraw(); }

function focusOn(i) {
  if (i < 0) return;
  const hash = knownHash(layout, i);
  const around = () => { const at = layout.find(hash); return at < 0 ? null : layout.boundsOf(at); };
  focus = hash === null ? null : around;
  view = layout.boundsOf(i);
  select(i);
}

function wholeTree() { focus = null; view = layout.whole(); redraw(); }

function zoom(factor, x = (view.x0 + view.x1) / 2, y = (view.y0 + view.y1) / 2) {
  focus = null;
  const whole = layout.whole();
  const within = (low, high, least, most, size) => {
    const length = Math.min(Math.max(high - low, size), most - least), start = Math.min(Math.max(low, least), most - length);
    return [start, start + length];
  };
  const [x0, x1] = within(x + (view.x0 - x) * factor, x + (view.x1 - x) * factor, 0, whole.x1, 4);
  const [y0, y1] = within(y + (view.y0 - y) * factor, y + (view.y1 - y) * factor, 0, whole.y1, 0.5);
  view = { x0, x1, y0, y1 };
  redraw();
}

function find() {
  const text = $("query").value.trim();
  if (/^[0-9a-f]{1,8}$/i.test(text)) findHash(text.toLowerCase());
  else $("node").textContent = "A prefix hash has up to 8 hexadecimal digits.";
}

function knownHash(layout, i) { return layout.nodes.hash[i] === UNKNOWN ? null : layout.nodes.hash[i]; }

function findHash(text) {
  look.wanted = parseInt(text, 16);
  look.matches = layout.findAll(look.wanted);
  look.isAwaited = !look.matches.length && layout.nodes.hash.includes(UNKNOWN);
  if (look.matches.length) { focusOn(look.matches[0]); return; }
  redraw();
  if (look.isAwaited) {
    const num = layout.nodes.hash.filter((each) => each === UNKNOWN).length;
    $("node").textContent = `No node's prefix is ${text} yet: ${number(num)} are not hashed at this step.`;
    return;
  }
  const other = stepWith(look.wanted);
  $("node").textContent = other < 0 ? `No node's prefix is ${text}, at any step.`
    : `No node's prefix is ${text} at this step, the nearest with one is step ${other + 1}.`;
}

// The nearest step with a node of this hash; -1 if there is none.
function stepWith(hash) {
  for (let far = 1; far < frames.length; far++) {
    for (const step of [current - far, current + far]) if (frames[step]?.nodes.hash.includes(hash)) return step;
  }
  return -1;
}

// Controls

function follow(step) { isFollowing = step >= frames.length - 1; show(step); }

function setPlaying(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => { if (current >= frames.length - 1) setPlaying(false); else follow(current + 1); }, 400) : 0;
  $("play").setAttribute("aria-pressed", String(on));
  $("play").textContent = on ? "Stop" : "Play";
}

slider.addEventListener("input", () => follow(Number(slider.value)));
$("previous").addEventListener("click", () => follow(current - 1));
$("next").addEventListener("click", () => follow(current + 1));
$("play").addEventListener("click", () => { if (!playing && current >= frames.length - 1) follow(0); setPlaying(!playing); });
$("unit").addEventListener("change", (event) => { look.unit = event.target.value; view = null; show(current); });
$("mark").addEventListener("change", (event) => { look.mark = event.target.value; showMarks(); redraw(); });
$("zoom-in").addEventListener("click", () => layout && zoom(0.6));
$("zoom-out").addEventListener("click", () => layout && zoom(1 / 0.6));
$("whole").addEventListener("click", () => layout && wholeTree());
$("search").addEventListener("submit", (event) => { event.preventDefault(); if (layout) find(); });
for (const chart of [tokensChart, evictionsChart]) {
  chart.canvas.addEventListener("click", (event) => { if (layout) follow(chart.stepAt(event.offsetX)); });
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea, summary, #tree, .scroll, #requests")) return;
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const step = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: frames.length - 1 }[event.key];
  if (step !== undefined) { event.preventDefault(); follow(step); }
});

const canvas = $("tree"), tip = $("tip");
canvas.addEventListener("keydown", (event) => {
  if (!layout || event.altKey || event.ctrlKey || event.metaKey) return;
  const at = look.selected, go = (i) => { if (i >= 0) select(i); };
  const actions = {
    ArrowRight: () => go(at < 0 ? 0 : layout.firstChild(at)),
    ArrowLeft: () => go(at < 0 ? 0 : layout.nodes.parent[at]),
    ArrowDown: () => go(at < 0 ? 0 : layout.sibling(at, 1)),
    ArrowUp: () => go(at < 0 ? 0 : layout.sibling(at, -1)),
    Enter: () => focusOn(at), Escape: wholeTree, 0: wholeTree,
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
  };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});

const pointOf = (event) => picture.point(view, event.offsetX, event.offsetY);
canvas.addEventListener("wheel", (event) => {
  if (!layout) return;
  event.preventDefault();
  const { x, y } = pointOf(event);
  zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) * 0.0025), x, y);
}, { passive: false });

let drag = null;
canvas.addEventListener("pointerdown", (event) => { if (layout) drag = { at: pointOf(event), view: { ...view }, isMoved: false, x: event.offsetX, y: event.offsetY }; });
canvas.addEventListener("pointermove", (event) => {
  if (!layout) return;
  if (drag && event.buttons) {
    if (Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) > 4) drag.isMoved = true;
    if (drag.isMoved) {
      const now = picture.point(drag.view, event.offsetX, event.offsetY), dx = drag.at.x - now.x, dy = drag.at.y - now.y;
      view = { x0: drag.view.x0 + dx, x1: drag.view.x1 + dx, y0: drag.view.y0 + dy, y1: drag.view.y1 + dy };
      zoom(1);
    }
    return;
  }
  const { x, y } = pointOf(event), i = layout.at(x, y);
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.textContent = textOf(i);
  tip.style.left = `${Math.min(canvas.offsetLeft + event.offsetX + 14, canvas.offsetLeft + canvas.offsetWidth - 262)}px`;
  tip.style.top = `${canvas.offsetTop + event.offsetY + 16}px`;
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.isMoved) { const { x, y } = pointOf(event); focusOn(layout.at(x, y)); }
  drag = null;
});

window.addEventListener("hashchange", openRequest);
// The address may be the request's already, and the tree moved since.
$("requests").addEventListener("click", (event) => {
  if (event.target.closest("a")?.hash === location.hash) openRequest();
});
$("close").addEventListener("click", () => { location.hash = ""; $("tree").focus(); });

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { look.read(); draw(); hour.draw(look); });
new ResizeObserver(() => { draw(); hour.draw(look); }).observe(canvas);

// Requests and frames as they come

let isPaused = false;
function poll() {
  const { source, requests, history, intervalS } = body.dataset;
  $("pause").hidden = false;
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", String(isPaused));
    $("pause").textContent = isPaused ? "Resume updates" : "Pause updates";
  });
  let areExplained = true, historyDue = 0;
  const get = async (address, take, place) => {
    try {
      const answer = await fetch(address, { cache: "no-store" });
      if (address === requests) areExplained = answer.status !== 404;
      if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error ?? `HTTP ${answer.status}`);
      take(await answer.json());
    } catch (error) { place.textContent = `No update: ${error.message}`; }
  };
  const ask = async () => {
    if (!isPaused && !document.hidden) {
      if (areExplained) await get(requests, list, $("requests-summary"));
      await get(source, take, $("summary"));
      if (history && performance.now() >= historyDue) {
        historyDue = performance.now() + 1000 * HISTORY_INTERVAL_S;
        await get(history, (answer) => hour.take(answer, look), $("hour-text"));
      }
    }
    setTimeout(ask, 1000 * (Number(intervalS) || 1));
  };
  ask();
}

function list({ ranks }) {
  latest.take(ranks.flatMap((rank) => rank.requests));
  if (latest.rid !== null) { if (layout) show(current); else trace(); }
}

const NO_NODES = { parent: [], depth: [], tokens: [], kind: [], role: [], uses: [], last_s: [], worth: [], hash: [] };
function take(frame) {
  if (frames.length && frames.at(-1).time_s === frame.time_s) return;
  frames.push(frame);
  if (frames.length > MAX_TREES) frames[frames.length - 1 - MAX_TREES].nodes = NO_NODES;
  if (frames.length > MAX_FRAMES) { frames.shift(); current--; }
  show(isFollowing ? frames.length - 1 : current);
}

function showMarks() {
  const { names, texts } = MARKS[look.mark];
  legend($("tree-legend"), [["live", "KV on the device"], ["host", "KV on the host"], ["ghost", "ghost: evicted, remembered"],
    ...names.map((name, at) => [name, texts[at], "mark"]), ["soft", "dashed: state on the host alone", "dashed mark"]]);
}

// A router has this page at `ui/RANK/page`, and its fleet's at `ui`.
if (/\/ui\/\d+\/page$/.test(location.pathname)) Object.assign($("fleet"), { href: "../../ui", hidden: false });
showMarks();
show(current);
performance.measure("marconi-first-draw", { start: 0, end: performance.now() });
openRequest();
if (body.dataset.source) poll();
