// The last hour as the server noted it, whether or not a page was open: counts since its start at the edges of steps.

const HELD = { KV: "live", states: "states", "in use": "busy" };

// Of edges, the steps between them, each as long as `step_s`; a step in which nothing was reported adds to the next.
function stepsOf({ step_s, at_s, num_prompt_tokens, num_hit_tokens, num_evictions, held }) {
  const first = at_s[0], num = Math.max(Math.ceil((at_s.at(-1) - first) / step_s), 1);
  const blank = () => new Array(num).fill(0), prompt = blank(), hit = blank(), evicted = blank();
  const shares = Object.fromEntries(Object.keys(HELD).map((kind) => [kind, blank()]));
  const place = (i) => Math.min(Math.max(Math.ceil((at_s[i] - first) / step_s), 0), num);
  for (let i = 1; i < at_s.length; i++) {
    const at = Math.max(place(i) - 1, 0), all = Object.values(held).reduce((sum, column) => sum + column[i], 0);
    prompt[at] += num_prompt_tokens[i] - num_prompt_tokens[i - 1];
    hit[at] += num_hit_tokens[i] - num_hit_tokens[i - 1];
    evicted[at] += num_evictions[i] - num_evictions[i - 1];
    for (let step = place(i - 1); step <= at; step++) {
      for (const kind of Object.keys(HELD)) shares[kind][step] = all ? 100 * held[kind][i] / all : 0;
    }
  }
  return { hits: prompt.map((all, at) => (all ? 100 * hit[at] / all : 0)), evicted, shares };
}

const sinceStart = (column) => column.at(-1) - column[0];
const timeOf = (unix_s) => new Date(1000 * unix_s).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

class HourView {
  constructor() {
    const painted = (paint) => (name, ctx, look) => look.color(paint ?? HELD[name]);
    this.hits = new StepChart($("hour-hits"), painted("hit"), 100);
    this.held = new StepChart($("hour-held"), painted(), 100);
    this.evictions = new StepChart($("hour-evictions"), painted("bars"));
    this.latest = null;
    legend($("hour-held-legend"), Object.entries(HELD).map(([name, color]) => [color, name]));
  }

  take(history, look) {
    this.latest = history;
    const { at_s, num_prompt_tokens: prompt, num_hit_tokens: hit, num_evictions, saved_s } = history;
    $("overall").textContent = `Hit rate since the start: ${percent(hit.at(-1), prompt.at(-1))} of ${number(prompt.at(-1))} prompt tokens`
      + `${saved_s === null ? "" : `; ${seconds(saved_s)} of prefill saved`}.`;
    $("hour-text").textContent = `${timeOf(at_s[0])} to ${timeOf(at_s.at(-1))}, in steps of ${history.step_s} s: `
      + `${percent(sinceStart(hit), sinceStart(prompt))} of ${number(sinceStart(prompt))} prompt tokens were cached and `
      + `${number(sinceStart(num_evictions))} states were evicted.`;
    this.draw(look);
  }

  draw(look) {
    if (this.latest === null) return;
    const { hits, evicted, shares } = stepsOf(this.latest);
    this.hits.draw({ hit: hits }, -1, look);
    this.held.draw(shares, -1, look);
    this.evictions.draw({ evictions: evicted }, -1, look);
  }
}
