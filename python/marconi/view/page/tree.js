// Draws a layout. What is lower than a pixel is summed up: the coverage of a pixel is the share of the leaves in its
// row whose path reaches it, and states there colour it as far as they are of many leaves.

const AXIS = 20;

class TreePicture {
  constructor(canvas) { this.canvas = canvas; this.buffers = null; }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const box = this.canvas.getBoundingClientRect();
    const width = Math.max(Math.round(box.width * ratio), 1), height = Math.max(Math.round(box.height * ratio), 1);
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    this.ratio = ratio;
  }

  // A point of the canvas, in CSS pixels, on the plane.
  point(view, x, y) {
    const { width, height } = this.canvas, ratio = this.ratio, top = AXIS * ratio;
    return {
      x: view.x0 + (x * ratio) / width * (view.x1 - view.x0),
      y: view.y0 + (y * ratio - top) / (height - top) * (view.y1 - view.y0),
    };
  }

  draw(layout, view, look) {
    this.resize();
    const { canvas, ratio } = this;
    const ctx = canvas.getContext("2d");
    const top = Math.round(AXIS * ratio), W = canvas.width, H = Math.max(canvas.height - top, 1);
    const sx = W / (view.x1 - view.x0), sy = H / (view.y1 - view.y0);
    const { kind, role } = layout.nodes, { of } = MARKS[look.mark];
    const sums = this.cleared(W, H), large = [];
    let numSmall = 0;
    for (let i = 0; i < layout.num;) {
      if (layout.y1[i] <= view.y0 || layout.y0[i] >= view.y1 || layout.x0[i] > view.x1) { i = layout.end[i]; continue; }
      const h = (layout.y1[i] - layout.y0[i]) * sy;
      if (h >= 1) { if (layout.x1[i] >= view.x0) large.push(i); i++; continue; }
      numSmall++;
      const row = Math.floor(((layout.y0[i] + layout.y1[i]) / 2 - view.y0) * sy);
      if (row >= 0 && row < H && layout.x1[i] >= view.x0) {
        const a = Math.min(Math.max(Math.round((layout.x0[i] - view.x0) * sx), 0), W);
        const b = Math.min(Math.max(Math.round((layout.x1[i] - view.x0) * sx), 0), W);
        if (b > a) {
          const sum = sums[this.kindOf(kind[i])], start = row * (W + 1);
          sum[start + a] += h;
          sum[start + b] -= h;
        }
        if (role[i] && b > 0 && layout.x1[i] <= view.x1) {
          const at = row * W + b - 1;
          if (h >= sums.most[at]) { sums.marks[at] = of(layout.nodes, i, look.now_s); sums.most[at] = h; }
          sums.weight[at] += h;
        }
      }
      i++;
    }
    ctx.fillStyle = look.color("card");
    ctx.fillRect(0, 0, W, canvas.height);
    if (numSmall) this.paint(ctx, sums, W, H, top, look);
    const place = { view, sx, sy, top, W, H, ratio };
    this.spans(ctx, layout, large, place, look);
    this.marks(ctx, layout, large, place, look);
    this.rings(ctx, layout, place, look);
    this.request(ctx, layout, place, look);
    this.axis(ctx, place, look);
  }

  kindOf(kind) { return kind & KIND.live ? "live" : kind & KIND.hostKv ? "host" : "ghost"; }

  cleared(W, H) {
    if (!this.buffers || this.buffers.W !== W || this.buffers.H !== H) {
      const sum = () => new Float32Array((W + 1) * H);
      this.buffers = { W, H, live: sum(), host: sum(), ghost: sum(), most: sum(), weight: sum(),
        marks: new Uint8Array(W * H), image: new ImageData(W, H) };
    } else for (const name of ["live", "host", "ghost", "most", "weight", "marks"]) this.buffers[name].fill(0);
    return this.buffers;
  }

  paint(ctx, sums, W, H, top, look) {
    const pixels = new Uint32Array(sums.image.data.buffer);
    const base = look.rgb("card"), live = look.rgb("live"), host = look.rgb("host"), ghost = look.rgb("ghost");
    const colors = [base, ...MARKS[look.mark].names.map((name) => look.rgb(name))];
    const pack = (r, g, b) => (255 << 24) | (b << 16) | (g << 8) | r;
    const blank = pack(...base);
    for (let y = 0; y < H; y++) {
      let l = 0, h = 0, g = 0;
      for (let x = 0, at = y * (W + 1), to = y * W; x < W; x++, at++, to++) {
        l += sums.live[at]; h += sums.host[at]; g += sums.ghost[at];
        const mark = sums.marks[to];
        const all = Math.max(l + h + g, 1e-9);
        if (all < 1e-4 && !mark) { pixels[to] = blank; continue; }
        const cover = Math.min(0.3 + 0.7 * all, 1), a = cover * l / all, b = cover * h / all, c = cover * g / all;
        const rest = 1 - cover, state = mark ? Math.min(0.2 + 1.6 * sums.weight[to], 1) : 0, kv = 1 - state;
        const color = colors[mark];
        pixels[to] = pack(
          (base[0] * rest + live[0] * a + host[0] * b + ghost[0] * c) * kv + color[0] * state,
          (base[1] * rest + live[1] * a + host[1] * b + ghost[1] * c) * kv + color[1] * state,
          (base[2] * rest + live[2] * a + host[2] * b + ghost[2] * c) * kv + color[2] * state,
        );
      }
    }
    ctx.putImageData(sums.image, 0, top);
  }

  box(layout, i, { view, sx, sy, top, W, H }) {
    const x = Math.max((layout.x0[i] - view.x0) * sx, 0), right = Math.min((layout.x1[i] - view.x0) * sx, W);
    const y = Math.max((layout.y0[i] - view.y0) * sy, 0), below = Math.min((layout.y1[i] - view.y0) * sy, H);
    return { x, y: y + top, w: right - x, h: below - y };
  }

  spans(ctx, layout, large, place, look) {
    const { ratio } = place, { kind, tokens } = layout.nodes, labels = [];
    for (const name of ["ghost", "host", "live"]) {
      ctx.fillStyle = look.color(name);
      for (const i of large) {
        if (this.kindOf(kind[i]) !== name) continue;
        const { x, y, w, h } = this.box(layout, i, place);
        if (w <= 0) continue;
        const gap = h > 5 * ratio ? ratio : h > 2.5 ? 0.5 : 0;
        ctx.fillRect(x, y, Math.max(w - (w > 3 * ratio ? ratio : 0), Math.min(w, 1)), h - gap);
        if (w > 56 * ratio && h > 15 * ratio) labels.push([i, x, y, w, h]);
      }
    }
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    for (const [i, x, y, w, h] of labels) {
      ctx.fillStyle = look.color(this.kindOf(kind[i]) === "ghost" ? "soft" : "ink");
      const text = w > 100 * ratio ? `${number(tokens[i])} tokens` : number(tokens[i]);
      ctx.fillText(text, x + 6 * ratio, y + h / 2, w - 14 * ratio);
    }
  }

  marks(ctx, layout, large, place, look) {
    const { ratio, W } = place, { role, uses, last_s, kind } = layout.nodes, { names, of } = MARKS[look.mark];
    for (const i of large) {
      if (!role[i]) continue;
      const { y, h } = this.box(layout, i, place);
      const right = (layout.x1[i] - place.view.x0) * place.sx;
      if (right < 0 || right > W + 2) continue;
      const size = Math.min(2 + 1.2 * Math.log2(1 + uses[i]), 9) * ratio;
      const width = Math.max(Math.min(size, (layout.x1[i] - layout.x0[i]) * place.sx), 1.5);
      const age = Math.max(look.now_s - last_s[i], 0) / Math.max(look.span_s, 1e-9);
      if (look.mark === "role") ctx.globalAlpha = 1 - 0.6 * Math.min(Math.sqrt(age), 1);
      ctx.fillStyle = look.color(names[of(layout.nodes, i, look.now_s) - 1]);
      const gap = h > 5 * ratio ? ratio : 0;
      if (kind[i] & KIND.state) ctx.fillRect(right - width, y, width, h - gap);
      else {                                 // on the host alone: a dashed mark
        const dash = Math.max(3 * ratio, 1);
        for (let at = 0; at < h - gap; at += 2 * dash) ctx.fillRect(right - width, y + at, width, Math.min(dash, h - gap - at));
      }
      ctx.globalAlpha = 1;
      if (kind[i] & KIND.locked) {
        ctx.strokeStyle = look.color("ink");
        ctx.lineWidth = ratio;
        ctx.strokeRect(right - width - 1.5 * ratio, y, width + 1.5 * ratio, Math.max(h - gap, 2));
      }
    }
  }

  rings(ctx, layout, place, look) {
    const { ratio, W, H, top } = place;
    ctx.strokeStyle = ctx.fillStyle = look.color("accent");
    ctx.lineWidth = 2 * ratio;
    for (const i of new Set([...look.matches, look.selected])) {
      if (i < 0 || i >= layout.num) continue;
      const { x, y, w, h } = this.box(layout, i, place);
      if (w < 0 || h < 0 || x > W || y > top + H) continue;
      ctx.strokeRect(x + ratio, y + ratio, Math.max(w - 2 * ratio, 2), Math.max(h - 2 * ratio, 2));
      if (h < 4 * ratio) ctx.fillRect(W - 8 * ratio, y - 2 * ratio, 8 * ratio, 4 * ratio);
    }
  }

  // The bar of the request that is looked at, along its path, at the foot of the path's last node.
  request(ctx, layout, { view, sx, sy, top, W, H, ratio }, look) {
    if (look.end < 0) return;
    const h = 10 * ratio, y = top + Math.min((layout.y1[look.end] - view.y0) * sy, H) - h - ratio;
    if (y + h < top || (layout.y0[look.end] - view.y0) * sy > H) return;
    const at = (x) => Math.min(Math.max((x - view.x0) * sx, 0), W);
    const strip = (start, end, fill, height) => {
      ctx.fillStyle = fill;
      for (const [a, b] of layout.pieces(look.end, start, end)) {
        ctx.fillRect(at(a), y + (h - height) / 2, at(b) - at(a), height);
      }
    };
    strip(0, Infinity, look.color("ink"), 2 * ratio);
    for (const { start, end } of look.parts) strip(start, end, look.color("card"), h + 2 * ratio);
    for (const { name, start, end } of look.parts) strip(start, end, hatched(ctx, name, look), h);
  }

  axis(ctx, { view, sx, W, ratio }, look) {
    ctx.fillStyle = look.color("card");
    ctx.fillRect(0, 0, W, AXIS * ratio);
    const step = niceStep((view.x1 - view.x0) / Math.max(W / (110 * ratio), 1));
    ctx.font = `${11.5 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    for (let x = Math.ceil(view.x0 / step) * step; x <= view.x1; x += step) {
      const at = (x - view.x0) * sx;
      ctx.fillStyle = look.color("line");
      ctx.fillRect(at, 0, ratio, AXIS * ratio);
      ctx.fillStyle = look.color("soft");
      const text = x === 0 ? `0 ${look.unit}` : look.unit === "bytes" ? bytes(x) : number(x);
      if (at + ctx.measureText(text).width + 4 * ratio < W) ctx.fillText(text, at + 4 * ratio, 2 * ratio);
    }
  }
}
