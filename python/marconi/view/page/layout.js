"use strict";
// Where each node of a frame is drawn, and which node is at a point. Lengths are tokens or bytes, heights are leaves.

const KIND = { live: 1, state: 2, hostKv: 4, hostState: 8, locked: 16, ghost: 32 };
const UNKNOWN = -1;                          // a hash that is not computed yet
const ROLES = ["none", "way", "prompt", "answer", "branch"];
const ROLE_NAMES = { way: "on the way", prompt: "near a prompt's end", answer: "near an answer's end", branch: "at a branch point" };
const ROOM = 12;                             // leaves, so many that each is high enough to be read
const UNRANKED = -1;                         // the worth of a state without a place in the order of eviction

// By what marks are coloured: names of colours with what they mean, and the number of that of node i, from 1.
const MARKS = {
  role: {
    names: ROLES.slice(1),
    texts: ROLES.slice(1).map((name) => `state ${ROLE_NAMES[name]}`),
    of: (nodes, i) => nodes.role[i],
  },
  age: {
    names: ["scale-5", "scale-4", "scale-3", "scale-2", "scale-1"],
    texts: ["state used in the last 10 s", "in the last minute", "in the last 10 min", "in the last hour", "before"],
    of: (nodes, i, now_s) => 1 + AGES_S.filter((age_s) => now_s - nodes.last_s[i] > age_s).length,
  },
  worth: {
    names: ["next", "scale-1", "scale-2", "scale-4", "scale-5", "unranked"],
    texts: ["state evicted next", "in the first tenth", "in the first half", "in the second half", "in the last tenth",
      "not to be evicted: in use, or on the host alone"],
    of: ({ worth }, i) => (worth[i] === UNRANKED ? 6 : 1 + WORTHS.filter((least) => worth[i] > least).length),
  },
};
const AGES_S = [10, 60, 600, 3600], WORTHS = [0, 10, 50, 90];

class Layout {
  constructor(frame, unit) {
    const { parent, tokens, kind } = frame.nodes;
    const n = parent.length;
    this.num = n;
    this.nodes = frame.nodes;
    this.end = new Int32Array(n);            // one past the last node of its subtree
    this.x0 = new Float64Array(n);
    this.x1 = new Float64Array(n);
    this.y0 = new Float64Array(n);
    this.y1 = new Float64Array(n);
    const leaves = new Int32Array(n), size = new Int32Array(n);
    for (let i = n - 1; i >= 0; i--) {
      size[i] += 1;
      if (leaves[i] === 0) leaves[i] = 1;
      this.end[i] = i + size[i];
      if (parent[i] >= 0) { size[parent[i]] += size[i]; leaves[parent[i]] += leaves[i]; }
    }
    const next = new Int32Array(n);          // leaves of the children that are placed
    let numLeaves = 0, width = 0;
    for (let i = 0; i < n; i++) {
      const p = parent[i];
      if (p < 0) { this.y0[i] = numLeaves; numLeaves += leaves[i]; }
      else { this.x0[i] = this.x1[p]; this.y0[i] = this.y0[p] + next[p]; next[p] += leaves[i]; }
      let length = tokens[i];
      if (unit === "bytes") {
        length *= frame.kv_bytes_per_token;
        if (kind[i] & KIND.state) length += frame.state_bytes;
      }
      this.x1[i] = this.x0[i] + length;
      this.y1[i] = this.y0[i] + leaves[i];
      if (this.x1[i] > width) width = this.x1[i];
    }
    this.width = Math.max(width, 1);
    this.height = Math.max(numLeaves, 1);
  }

  whole() { return { x0: 0, x1: this.width * 1.02, y0: 0, y1: this.height }; }

  // The part of the plane that the subtree of node i takes.
  boundsOf(i) {
    let x1 = this.x1[i];
    for (let j = i; j < this.end[i]; j++) if (this.x1[j] > x1) x1 = this.x1[j];
    const pad = Math.max(x1 - this.x0[i], 1) * 0.02;
    return { x0: Math.max(this.x0[i] - pad, 0), x1: x1 + pad, y0: this.y0[i], y1: this.y1[i] };
  }

  // The part of the plane from the root to the end of node i, with the siblings on its way that leave it room.
  around(i) {
    let top = i;
    for (let p = i; p >= 0 && this.y1[p] - this.y0[p] <= ROOM; p = this.nodes.parent[p]) top = p;
    return { ...this.boundsOf(top), x0: 0 };
  }

  // Where the tokens `start` to `end` of the path to node i are: pieces from left to right, one for each node.
  pieces(i, start, end) {
    const { parent, depth, tokens } = this.nodes, found = [];
    for (; i >= 0 && depth[i] > start; i = parent[i]) {
      const from = depth[i] - tokens[i], length = this.x1[i] - this.x0[i];
      const x = (token) => this.x0[i] + length * (token - from) / tokens[i];
      if (from < end) found.unshift([x(Math.max(start, from)), x(Math.min(end, depth[i]))]);
    }
    return found;
  }

  at(x, y) {
    let i = 0;
    while (i < this.num) {
      if (y < this.y0[i] || y >= this.y1[i] || x < this.x0[i]) i = this.end[i];
      else if (x < this.x1[i]) return i;
      else i++;
    }
    return -1;
  }

  find(hash, depth) {
    const { hash: hashes, depth: depths } = this.nodes;
    for (let i = 0; i < this.num; i++) if (hashes[i] === hash && (depth === undefined || depths[i] === depth)) return i;
    return -1;
  }

  findAll(hash) {
    const found = [];
    this.nodes.hash.forEach((each, i) => { if (each === hash) found.push(i); });
    return found;
  }

  firstChild(i) { return i >= 0 && i + 1 < this.end[i] ? i + 1 : -1; }

  sibling(i, step) {
    const p = this.nodes.parent[i];
    if (step > 0) {
      const after = this.end[i];
      return after < this.num && this.nodes.parent[after] === p ? after : -1;
    }
    let before = -1;
    for (let j = p < 0 ? 0 : p + 1; j < i; j = this.end[j]) before = j;
    return before;
  }
}
