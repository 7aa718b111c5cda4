/* Curves over steps, skips or noise: one panel, small multiples, or pages of them to choose from. */

const MARKS = [
  (x, y) => `M${x - 3.4},${y}a3.4,3.4 0 1,0 6.8,0a3.4,3.4 0 1,0 -6.8,0`,
  (x, y) => `M${x - 3},${y - 3}h6v6h-6z`,
  (x, y) => `M${x},${y - 4}l3.8,6.6h-7.6z`,
  (x, y) => `M${x},${y - 4.2}l4.2,4.2l-4.2,4.2l-4.2,-4.2z`,
  (x, y) => `M${x},${y + 4}l3.8,-6.6h-7.6z`,
  (x, y) => `M${x - 3.4},${y - 1}h2.4v-2.4h2v2.4h2.4v2h-2.4v2.4h-2v-2.4h-2.4z`,
];

class LineChart {
  constructor(holder, spec) {
    this.holder = holder; this.spec = spec; this.cursor = null;
    this.many = Boolean(spec.panels);
    if (spec.pages) this.chooser(spec.pages);
    else this.choose(spec.panels || [{ title: "", series: spec.series, band: spec.band }]);
    this.body = html("div", this.many ? "panels" : "panel", undefined, holder);
    this.tip = html("div", "tip", undefined, holder);
    this.tip.hidden = true;
    holder.tabIndex = 0;
    holder.setAttribute("role", "group");
    holder.setAttribute("aria-roledescription", "chart");
    holder.addEventListener("keydown", (event) => this.key(event));
    holder.addEventListener("blur", () => this.point(null));
    holder.addEventListener("pointerleave", () => this.point(null));
  }

  choose(panels) {
    this.panels = panels;
    this.xs = [...new Set(panels.flatMap((p) => p.series.flatMap((s) => s.x)))].sort((a, b) => a - b);
  }

  /* A list of layers to choose from; starts with the first (the outermost join). */
  chooser(pages) {
    const name = html("label", "", "Layer ", html("p", "layer", undefined, this.holder));
    const list = html("select", "", undefined, name);
    pages.forEach((page, k) => { html("option", "", page.title, list).value = k; });
    const turn = () => {
      this.cursor = null;
      this.choose(pages[+list.value].panels);
      if (this.body) this.draw();
    };
    list.addEventListener("input", turn);
    list.addEventListener("keydown", (event) => event.stopPropagation());
    turn();
  }

  draw() {
    const total = this.holder.clientWidth;
    if (!total) return;
    const log = state.log && this.spec.level === undefined;
    const weight = this.spec.smooth ? state.smooth : 0;
    const columns = this.many ? Math.max(1, Math.min(4, this.panels.length, Math.floor(total / (this.panels.length > 4 ? 190 : 220)))) : 1;
    const width = this.many ? Math.floor((total - (columns - 1) * 14) / columns) : total;
    const height = this.many ? Math.max(140, Math.round(width * 0.66)) : Math.max(210, Math.min(340, Math.round(width * 0.5)));
    this.body.style.setProperty("--columns", columns);
    const shared = this.spec.own ? null : extent(this.panels, log, weight, this.spec);
    this.body.replaceChildren();
    this.frames = this.panels.map((panel, k) =>
      this.panel(panel, width, height, this.spec.own ? extent([panel], log, weight, this.spec) : shared, log, weight, k));
    if (this.cursor !== null) this.point(this.cursor);
  }

  panel(panel, width, height, box, log, weight, index) {
    const holder = html("div", "plot", undefined, this.body);
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, holder);
    const small = this.many;
    const m = { left: small ? 42 : 50, right: small ? 6 : 14, top: small ? 36 : 24, bottom: small ? 34 : 38 };
    if (panel.title) label(root, 0, 12, panel.title, { class: "title" });
    label(root, 0, small ? 27 : 11, this.spec.y, { class: "name" });
    if (!box) {
      label(root, width / 2, height / 2, "nothing to show", { class: "empty", "text-anchor": "middle" });
      return null;
    }
    const x = scale(box.x0, box.x1, m.left, width - m.right, this.spec.xlog);
    const y = scale(box.y0, box.y1, height - m.bottom, m.top, log);
    this.axes(root, x, y, width, height, m, log, small);
    const clip = "clip-" + this.spec.id + "-" + index;
    const path = svg("clipPath", { id: clip }, svg("defs", {}, root));
    svg("rect", { x: m.left - 4, y: m.top - 4, width: width - m.left - m.right + 8, height: height - m.top - m.bottom + 8 }, path);
    if (this.spec.level !== undefined && this.spec.level >= y.low && this.spec.level <= y.high)
      svg("line", { class: "one", x1: m.left, x2: width - m.right, y1: y(this.spec.level), y2: y(this.spec.level) }, root);
    const layer = svg("g", { "clip-path": `url(#${clip})` }, root);
    if (panel.band) this.band(layer, panel.band, x, y, log);
    for (const s of panel.series) if (shown[s.run]) this.line(layer, s, x, y, log, weight);
    const hair = svg("g", { class: "hair" }, root);
    root.addEventListener("pointermove", (event) => {
      const rect = root.getBoundingClientRect();
      this.point(this.nearest(x.invert((event.clientX - rect.left) * (width / rect.width))), index, event);
    });
    return { hair, x, y, m, height, width, panel, log, weight, root };
  }

  axes(root, x, y, width, height, m, log, small) {
    const grid = svg("g", { class: "grid" }, root);
    const yt = log ? logTicks(y.low, y.high, small ? 3 : 6) : linearTicks(y.low, y.high, small ? 3 : 6);
    for (const t of yt) {
      const at = round(y(t));
      svg("line", { x1: m.left, x2: width - m.right, y1: at, y2: at }, grid);
      label(root, m.left - 6, at + 3.5, short(t, spacing(yt)), { class: "tick", "text-anchor": "end" });
    }
    const whole = this.spec.whole;
    let xt = linearTicks(x.low, x.high, small ? 3 : Math.max(3, Math.floor(width / 110)));
    if (this.spec.x === "step") xt = xt.filter(Number.isInteger);
    if (this.spec.xlog) xt = logTicks(x.low, x.high, small ? 3 : 5);
    if (whole) {
      xt = [];
      const step = Math.max(1, Math.ceil((x.high - x.low + 1) / (small ? 6 : Math.max(6, Math.floor(width / 40)))));
      for (let t = Math.ceil(x.low); t <= x.high; t += step) xt.push(t);
    }
    for (const t of xt) {
      const at = round(x(t));
      svg("line", { class: "axis", x1: at, x2: at, y1: height - m.bottom, y2: height - m.bottom + 4 }, root);
      label(root, at, height - m.bottom + 15, short(t, spacing(xt)), { class: "tick", "text-anchor": at > width - 16 ? "end" : "middle" });
    }
    svg("line", { class: "axis", x1: m.left, x2: width - m.right, y1: height - m.bottom, y2: height - m.bottom }, root);
    label(root, width - m.right, height - 5, this.spec.x, { class: "name", "text-anchor": "end" });
  }

  band(layer, band, x, y, log) {
    const top = [], bottom = [];
    band.x.forEach((v, k) => {
      if (log && !(band.low[k] > 0)) return;
      top.push(round(x(v)) + "," + round(y(band.high[k])));
      bottom.unshift(round(x(v)) + "," + round(y(band.low[k])));
    });
    if (top.length) svg("path", { class: "band", d: "M" + top.concat(bottom).join("L") + "Z" }, layer);
  }

  line(layer, s, x, y, log, weight) {
    const ok = (v) => v !== null && isFinite(v) && (!log || v > 0);
    const group = svg("g", { class: "series", "data-run": s.run }, layer);
    group.style.color = ink(s.run);
    if (s.low && !s.whiskers) {
      const top = [], bottom = [];
      s.x.forEach((v, k) => {
        if (!ok(s.low[k]) || !ok(s.high[k])) return;
        top.push(round(x(v)) + "," + round(y(s.high[k])));
        bottom.unshift(round(x(v)) + "," + round(y(s.low[k])));
      });
      if (top.length) svg("path", { class: "range", d: "M" + top.concat(bottom).join("L") + "Z" }, group);
    } else if (weight && s.x.length > 2) {
      svg("path", { class: "faint", d: trace(s.x, s.y, x, y, ok) }, group);
    }
    const values = smoothed(s.y, weight);
    svg("path", { class: "line", d: trace(s.x, values, x, y, ok), "stroke-dasharray": this.spec.pages ? "" : DASHES[data.runs[s.run].dash] }, group);
    const marks = this.spec.marks || s.x.length === 1;
    s.x.forEach((v, k) => {
      if (!ok(values[k])) return;
      if (s.whiskers && ok(s.low[k]) && ok(s.high[k]))
        svg("line", { class: "whisker", x1: x(v), x2: x(v), y1: y(s.low[k]), y2: y(s.high[k]) }, group);
      if (marks) svg("path", { class: "mark", d: MARKS[data.runs[s.run].dash % MARKS.length](round(x(v)), round(y(values[k]))) }, group);
    });
  }

  nearest(v) {
    let best = null;
    for (const c of this.xs) if (best === null || Math.abs(c - v) < Math.abs(best - v)) best = c;
    return best;
  }

  /* The cursor: a hairline in every panel, and the value of each run. */
  point(at, index, event) {
    this.cursor = at;
    if (!this.frames) return;
    for (const f of this.frames) if (f) f.hair.replaceChildren();
    if (at === null) { this.tip.hidden = true; return; }
    const rows = [];
    this.frames.forEach((f, k) => {
      if (!f) return;
      const px = round(f.x(Math.min(Math.max(at, f.x.low), f.x.high)));
      svg("line", { x1: px, x2: px, y1: f.m.top, y2: f.height - f.m.bottom }, f.hair);
      for (const s of f.panel.series) {
        if (!shown[s.run]) continue;
        const j = closest(s.x, at);
        const v = smoothed(s.y, f.weight)[j];
        if (v === null || v === undefined) continue;
        const dot = svg("circle", { cx: f.x(s.x[j]), cy: f.y(v), r: 3 }, f.hair);
        dot.style.fill = ink(s.run);
        if (k === (index || 0)) rows.push({ run: s.run, value: v, low: s.low && s.low[j], high: s.high && s.high[j] });
      }
    });
    const panel = this.panels[index || 0];
    rows.sort((a, b) => b.value - a.value);
    this.tip.replaceChildren();
    const head = (panel.title ? panel.title + ", " : "") + (this.spec.point || "step") + " " + figure(at);
    html("div", "tip-head", head, this.tip);
    for (const row of rows) {
      const line = html("div", "tip-row", undefined, this.tip);
      swatch(line, row.run);
      html("span", "tip-name", runName(row.run), line);
      html("span", "tip-value", figure(row.value) + this.spread(row), line);
    }
    this.tip.hidden = rows.length === 0;
    const frame = this.frames[index || 0];
    if (frame) {
      const here = frame.root.getBoundingClientRect(), base = this.holder.getBoundingClientRect();
      const px = frame.x(Math.min(Math.max(at, frame.x.low), frame.x.high)) + here.left - base.left;
      const left = px > base.width / 2 ? px - this.tip.offsetWidth - 12 : px + 12;
      this.tip.style.left = Math.max(0, Math.min(left, base.width - this.tip.offsetWidth)) + "px";
      this.tip.style.top = here.top - base.top + 8 + "px";
    }
    if (!event) say(head + ": " + rows.map((r) => runName(r.run) + " " + figure(r.value) + this.spread(r)).join(", "));
  }

  /* The band around a curve that has one. */
  spread(row) {
    return this.spec.pages && row.high !== null && row.high !== undefined ? " ± " + figure(row.high - row.value) : "";
  }

  key(event) {
    const jump = event.shiftKey ? 10 : 1;
    const moves = { ArrowRight: jump, ArrowLeft: -jump, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in moves) || !this.xs.length) return;
    event.preventDefault();
    const now = this.cursor === null ? (moves[event.key] > 0 ? -1 : this.xs.length) : this.xs.indexOf(this.cursor);
    this.point(this.xs[Math.max(0, Math.min(this.xs.length - 1, now + moves[event.key]))]);
  }
}

function trace(xs, ys, x, y, ok) {
  let d = "", pen = false;
  xs.forEach((v, k) => {
    if (!ok(ys[k])) { pen = false; return; }
    d += (pen ? "L" : "M") + round(x(v)) + "," + round(y(ys[k]));
    pen = true;
  });
  return d || "M0,0";
}

function closest(xs, v) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < v) low = mid; else high = mid; }
  return Math.abs(xs[low] - v) <= Math.abs(xs[high] - v) ? low : high;
}
