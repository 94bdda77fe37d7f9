// The latest requests, newest first: each with its age, its bar and the sentence that explains it. A cause or a piece
// of an id narrows the list; each request has an address of its own, `#rid=...`.

// The parts of a prompt: what was cached, then what was missed, each under the words of its cause.
const partsOf = (request) => [{ name: "cached", start: 0, end: request.num_hit_tokens },
  ...request.missed.map(({ cause, start, end }) => ({ name: cause.replaceAll("_", " "), start, end }))];

const tokensOf = (requests, wanted) => requests.flatMap(({ parts }) => parts)
  .reduce((sum, { name, start, end }) => sum + (name === wanted ? end - start : 0), 0);

class RequestList {
  constructor(list, filter, query, summary) {
    Object.assign(this, { list, query, summary, latest: [], rows: new Map(), cause: null, rid: null });
    this.causes = Object.keys(CAUSES).map((name) => this.causeButton(name));
    filter.replaceChildren(swatched(paintOf("cached"), "cached"), ...this.causes.map(({ item }) => item));
    query.addEventListener("input", () => { if (this.latest.length) this.sift(); });
    list.addEventListener("focusin", (event) => this.reach(event.target.closest("a")));
    list.addEventListener("keydown", (event) => this.step(event));
  }

  causeButton(name) {
    const [item, button, num] = create("li", "button", "span");
    button.type = "button";
    swatched(paintOf(name), name, "cause", button).append(" ", num);
    button.addEventListener("click", () => { this.cause = this.cause === name ? null : name; this.sift(); });
    item.append(button);
    return { name, item, button, num };
  }

  // Rows stay the elements that they are, so that neither focus nor place is lost.
  take(requests) {
    this.latest = requests.map((request) => ({ ...request, parts: partsOf(request) }));
    const known = this.rows, counts = new Map();
    this.rows = new Map();
    for (const request of this.latest.toReversed()) {
      const nth = (counts.get(request.rid) ?? 0) + 1, key = `${nth} ${request.rid}`;
      counts.set(request.rid, nth);
      const row = known.get(key) ?? this.row(request);
      row.request = request;
      row.age.textContent = `${seconds(request.seconds_ago)} ago`;
      this.rows.set(key, row);
      if (!known.delete(key)) this.list.prepend(row.item);
    }
    for (const { item } of known.values()) item.remove();
    this.sift();
  }

  row(request) {
    const [item, link, track, id, age, line] = create("li", "a", "span", "code", "span", "span");
    link.href = `#${new URLSearchParams({ rid: request.rid })}`;
    track.className = "track";
    track.setAttribute("aria-hidden", "true");
    track.append(...request.parts.map(({ name, start, end }) => {
      const [part] = create("span");
      part.style.width = `${100 * (end - start) / request.num_prompt_tokens}%`;
      part.style.background = paintOf(name);
      part.title = `${number(end - start)}: ${name}`;
      return part;
    }));
    id.textContent = request.rid;
    line.textContent = request.line;
    link.append(id, " ", age, " ", track, line);
    item.append(link);
    return { request, item, link, age };
  }

  // Show those of the chosen cause and id.
  sift() {
    const wanted = this.query.value.trim(), { cause, latest, rid } = this, shown = [];
    for (const { request, item, link } of this.rows.values()) {
      item.hidden = !request.rid.includes(wanted) || (cause !== null && !tokensOf([request], cause));
      if (!item.hidden) shown.push(request);
      if (request.rid === rid) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    }
    for (const { name, item, button, num } of this.causes) {
      const tokens = tokensOf(latest, name);
      item.hidden = !tokens && cause !== name;
      button.setAttribute("aria-pressed", String(cause === name));
      num.textContent = number(tokens);
    }
    this.summary.textContent = this.summed(shown);
    const focused = document.activeElement;
    this.reach(this.list.contains(focused) ? focused : this.list.querySelector("[aria-current]"));
  }

  summed(shown) {
    const { cause, latest } = this, all = `${number(latest.length)} latest requests`;
    if (!latest.length) return "No request yet.";
    if (!shown.length) return `None of the ${all} is of this kind.`;
    const of = shown.length < latest.length ? `${number(shown.length)} of the ${all}` : all;
    const prompt = shown.reduce((sum, request) => sum + request.num_prompt_tokens, 0);
    const said = `of ${number(prompt)} prompt tokens`;
    if (cause === null) return `${of}: ${percent(tokensOf(shown, "cached"), prompt)} ${said} were cached.`;
    return `${of} missed ${number(tokensOf(shown, cause))} ${said}: ${cause}. Cure: ${CAUSES[cause].cure}.`;
  }

  // The Tab key reaches one row of the list, arrow keys the others.
  reach(link) {
    const links = this.links(), at = links.includes(link) ? link : links[0];
    for (const { link: each } of this.rows.values()) each.tabIndex = each === at ? 0 : -1;
  }

  links() { return [...this.list.querySelectorAll("li:not([hidden]) a")]; }

  step(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const links = this.links(), at = links.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    links[to]?.focus();
  }

  choose(rid) { this.rid = rid; this.sift(); }

  // The newest request with the chosen id.
  get chosen() { return this.latest.find((request) => request.rid === this.rid); }
}
