// Shared by all pages: elements, numbers as text, rows of tables, and small charts: memory as bars, counts over time.

const $ = (id) => document.getElementById(id);
const create = (...tags) => tags.map((tag) => document.createElement(tag));
const number = (value) => Math.round(value).toLocaleString("en");
const percent = (part, all) => (all ? `${(100 * part / all).toFixed(1)} %` : "none");
const hex = (hash) => hash.toString(16).padStart(8, "0");

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) { value /= 1000; power++; }
  return `${power ? Number(value.toPrecision(3)) : Math.round(value)} ${units[power]}`;
}

function seconds(value) {
  if (value < 120) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return [1, 2, 5, 10].find((each) => each * power >= rough) * power;
}

const amount = (value, unit) => (unit === "bytes" ? bytes(value) : `${number(value)} ${unit}`);

// The colours and what else a drawing depends on beside its data.
class Look {
  constructor() {
    Object.assign(this, { matches: [], selected: -1, unit: "tokens", mark: "role", now_s: 0, span_s: 1 });
    Object.assign(this, { end: -1, parts: [] });          // of the request that is looked at
    this.read();
  }

  read() { this.style = getComputedStyle(document.documentElement); this.known = {}; }

  color(name) { return (this.known[name] ??= this.style.getPropertyValue(`--${name}`).trim()); }

  rgb(name) { return [1, 3, 5].map((at) => parseInt(this.color(name).slice(at, at + 2), 16)); }
}

// By name, how a cause is drawn: hatched, so that colour alone need not tell it; other names are not.
const CAUSES = JSON.parse($("causes").textContent);

function hatched(ctx, name, look) {
  const cause = CAUSES[name];
  if (!cause) return look.color(name === "cached" ? "hit" : "bars");
  const tile = document.createElement("canvas"), ratio = window.devicePixelRatio || 1, gap = Math.round(cause.gap * ratio);
  tile.width = 1;
  tile.height = gap + Math.ceil(ratio);
  const paint = tile.getContext("2d");
  paint.fillStyle = look.color("card");
  paint.fillRect(0, 0, 1, tile.height);
  paint.fillStyle = cause.color;
  paint.fillRect(0, 0, 1, gap);
  const pattern = ctx.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().rotate(cause.angle));
  return pattern;
}

// The same in CSS.
function paintOf(name) {
  const cause = CAUSES[name];
  if (!cause) return `var(--${name === "cached" ? "hit" : "bars"})`;
  const { angle, color, gap } = cause;
  return `repeating-linear-gradient(${angle}deg, ${color} 0 ${gap}px, var(--card) 0 ${gap + 1}px)`;
}

// By name, the tokens of each step: those that were cached first, then causes in the order of their table, then others.
function seriesOf(frames) {
  const series = { cached: frames.map((frame) => frame.hit_tokens) };
  for (const name of Object.keys(CAUSES)) {
    if (frames.some((frame) => frame.missed_tokens[name])) series[name] = new Array(frames.length).fill(0);
  }
  frames.forEach((frame, at) => {
    for (const [name, value] of Object.entries(frame.missed_tokens)) {
      series[name] ??= new Array(frames.length).fill(0);
      series[name][at] = value;
    }
  });
  return series;
}

function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) { const td = document.createElement("td"); td.append(cell); row.append(td); }
    return row;
  }));
}

// Bars over steps; the scale ends at `least`, or at the highest bar above it.
class StepChart {
  constructor(canvas, fill, least = 1) { Object.assign(this, { canvas, fill, least }); }

  draw(series, current, look) {
    const { canvas } = this, ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
    const W = canvas.width = Math.max(Math.round(box.width * ratio), 1);
    const H = canvas.height = Math.max(Math.round(box.height * ratio), 1);
    const ctx = canvas.getContext("2d"), names = Object.keys(series), num = series[names[0]].length;
    const fills = names.map((name) => this.fill(name, ctx, look)), left = 44 * ratio, plot = H - 4 * ratio, step = (W - left) / Math.max(num, 1);
    let most = this.least;
    for (let i = 0; i < num; i++) most = Math.max(most, names.reduce((sum, name) => sum + series[name][i], 0));
    const grid = niceStep(most / 3);
    most = Math.ceil(most / grid) * grid;
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (let value = 0; value <= most; value += grid) {
      const y = plot - value / most * (plot - 8 * ratio);
      ctx.fillStyle = look.color("line");
      ctx.fillRect(left, y, W - left, ratio);
      ctx.fillStyle = look.color("soft");
      ctx.fillText(short(value), left - 6 * ratio, Math.min(y, H - 6 * ratio));
    }
    if (num && current >= 0) {
      ctx.fillStyle = look.color("free");
      ctx.fillRect(left + current * step, 0, Math.max(step, 2), plot);
    }
    for (let i = 0; i < num; i++) {
      let y = plot;
      names.forEach((name, at) => {
        const h = series[name][i] / most * (plot - 8 * ratio);
        ctx.fillStyle = fills[at];
        ctx.globalAlpha = i === current ? 1 : 0.8;
        y -= h;
        ctx.fillRect(left + i * step, y, Math.max(step - (step > 4 * ratio ? ratio : 0), 0.5), h);
      });
    }
    ctx.globalAlpha = 1;
    if (num && current >= 0) {
      ctx.fillStyle = look.color("accent");
      ctx.fillRect(left + current * step, plot, Math.max(step, 3), 4 * ratio);
    }
    this.left = left / ratio;
    this.num = num;
  }

  stepAt(x) {
    const width = this.canvas.getBoundingClientRect().width - this.left;
    return Math.min(Math.max(Math.floor((x - this.left) / width * this.num), 0), this.num - 1);
  }
}

function short(value) {
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  return value >= 1e3 ? `${Number((value / 1e3).toPrecision(3))}k` : `${value}`;
}

function legend(list, entries) {
  const paint = (color, text) => (color ? `var(--${color})` : paintOf(text));
  list.replaceChildren(...entries.map(([color, text, kind]) => swatched(paint(color, text), text, kind)));
}

function swatched(background, text, kind = CAUSES[text] ? "cause" : "", item = document.createElement("li")) {
  const swatch = document.createElement("i");
  swatch.style.background = background;
  swatch.className = kind;
  if (CAUSES[text]) item.title = `Cure: ${CAUSES[text].cure}`;
  item.append(swatch, text);
  return item;
}

function inUse(pool) { return pool.size - pool.free - Object.values(pool.cached).reduce((sum, each) => sum + each, 0); }

function drawPools(place, pools) {
  const shades = { KV: "live", states: "states" };
  place.replaceChildren(...pools.map((pool) => {
    const box = document.createElement("div"), line = document.createElement("p"), track = document.createElement("div");
    const parts = [...Object.entries(pool.cached), ["in use", Math.max(inUse(pool), 0)]];
    box.className = "pool";
    track.className = "track";
    track.setAttribute("aria-hidden", "true");
    for (const [name, value] of parts) {
      const part = document.createElement("span");
      part.style.width = `${pool.size ? 100 * value / pool.size : 0}%`;
      part.style.background = `var(--${shades[name] ?? "busy"})`;
      track.append(part);
    }
    const name = document.createElement("span"), size = document.createElement("span"), list = document.createElement("ul");
    name.textContent = pool.name;
    size.textContent = amount(pool.size, pool.unit);
    line.append(name, size);
    list.className = "legend";
    legend(list, [...parts.map(([part, value]) => [shades[part] ?? "busy", `${part} ${amount(value, pool.unit)}`]),
      ["free", `free ${amount(pool.free, pool.unit)}`]]);
    box.append(line, track, list);
    return box;
  }));
}
