"use strict";
/* Draws the page's charts as SVG from the data in #data. Text from runs is only ever set as text. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 3", "2 2.5", "9 3 2 3", "4 2", "1 3", "12 4", "6 2 1 2 1 2"];
  const shown = data.runs.map(() => true);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  /* ------------------------------------------------------------------ small helpers */

  function svg(tag, attributes, parent) {
    const node = document.createElementNS(NS, tag);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(node);
    return node;
  }

  function label(parent, x, y, text, attributes) {
    const node = svg("text", { x, y, ...attributes }, parent);
    node.textContent = text;
    return node;
  }

  function html(tag, className, text, parent) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  const round = (v) => Math.round(v * 10) / 10;
  const runName = (run) => data.runs[run].label + (data.runs[run].seed === null ? "" : " · seed " + data.runs[run].seed);
  const ink = (run) => "var(--c" + data.runs[run].color + ")";

  function figure(v) {
    if (v === null || v === undefined || !isFinite(v)) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a < 1e-3 || a >= 1e6)) return v.toExponential(2).replace("e+", "e").replace("-", "−");
    return String(a >= 1000 ? Math.round(v) : +v.toPrecision(4)).replace("-", "−");
  }

  function short(v) {
    const a = Math.abs(v);
    if (a >= 1e6) return +(v / 1e6).toPrecision(3) + "M";
    if (a >= 1e4) return +(v / 1e3).toPrecision(3) + "k";
    if (a !== 0 && a < 1e-3) return v.toExponential(0).replace("-", "−");
    return String(+v.toPrecision(3)).replace("-", "−");
  }

  /* ------------------------------------------------------------------ scales and ticks */

  function linearTicks(low, high, count) {
    const span = high - low || 1;
    const raw = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const ticks = [];
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(+t.toPrecision(12));
    return ticks;
  }

  function logTicks(low, high, count) {
    const ticks = [];
    const decades = Math.log10(high / low);
    const marks = decades > count ? [1] : decades > 1.5 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of marks) {
        const t = m * 10 ** e;
        if (t >= low * 0.9999 && t <= high * 1.0001) ticks.push(+t.toPrecision(6));
      }
    if (ticks.length < 2) return linearTicks(low, high, count).filter((t) => t > 0);
    const every = Math.ceil(ticks.length / (count + 1));
    return ticks.filter((_, k) => k % every === 0);
  }

  function scale(low, high, from, to, log) {
    const f = log ? Math.log : (v) => v;
    const a = f(low), b = f(high), width = b - a || 1;
    const map = (v) => from + ((f(v) - a) / width) * (to - from);
    map.invert = (p) => { const v = a + ((p - from) / (to - from)) * width; return log ? Math.exp(v) : v; };
    map.low = low; map.high = high;
    return map;
  }

  function smoothed(y, weight) {
    /* an exponential moving average, corrected for its start */
    if (!weight) return y;
    let sum = 0, mass = 0;
    return y.map((v) => {
      if (v === null) return v;
      sum = weight * sum + (1 - weight) * v;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }

  function extent(panels, log, weight, zero) {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    const see = (v) => { if (v !== null && isFinite(v) && (!log || v > 0)) { if (v < y0) y0 = v; if (v > y1) y1 = v; } };
    for (const panel of panels) {
      for (const s of panel.series) {
        if (!shown[s.run]) continue;
        for (const v of s.x) { if (v < x0) x0 = v; if (v > x1) x1 = v; }
        s.y.forEach(see);
        if (weight) smoothed(s.y, weight).forEach(see);
        if (s.low && s.whiskers) { s.low.forEach(see); s.high.forEach(see); }
      }
      if (panel.band && x0 < Infinity) { panel.band.low.forEach(see); panel.band.high.forEach(see); }
    }
    if (x0 === Infinity || y0 === Infinity) return null;
    if (zero && !log && y0 > 0) y0 = 0;
    if (y0 === y1) { const d = Math.abs(y0) * 0.1 || 1; y0 = log ? y0 / 1.2 : y0 - d; y1 = log ? y1 * 1.2 : y1 + d; }
    else if (log) { const r = (y1 / y0) ** 0.04; y0 /= r; y1 *= r; }
    else { const d = (y1 - y0) * 0.04; y0 = y0 >= 0 && y0 - d < 0 ? 0 : y0 - d; y1 += d; }
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    return { x0, x1, y0, y1 };
  }

  /* ------------------------------------------------------------------ a chart of lines: one panel or many */

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
      this.many = Boolean(spec.panels || spec.pages);
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

    /* Many pages of panels: a slider turns them, the last (the middle block's) is open. */
    chooser(pages) {
      const holder = html("p", "slider", undefined, this.holder);
      const name = html("label", "", "Long skip, outermost to innermost ", holder);
      const slider = html("input", "", undefined, name);
      const output = html("output", "", undefined, holder);
      Object.assign(slider, { type: "range", min: 0, max: pages.length - 1, step: 1, value: pages.length - 1 });
      const turn = () => {
        const page = pages[+slider.value];
        output.textContent = page.title;
        slider.setAttribute("aria-valuetext", page.title);
        this.cursor = null;
        this.choose(page.panels);
        if (this.body) this.draw();
      };
      slider.addEventListener("input", turn);
      slider.addEventListener("keydown", (event) => event.stopPropagation());
      turn();
    }

    draw() {
      const total = this.holder.clientWidth;
      if (!total) return;
      const log = state.log;
      const weight = this.spec.smooth ? state.smooth : 0;
      const columns = this.many ? Math.max(1, Math.min(4, this.panels.length, Math.floor(total / (this.panels.length > 4 ? 190 : 220)))) : 1;
      const width = this.many ? Math.floor((total - (columns - 1) * 14) / columns) : total;
      const height = this.many ? Math.max(120, Math.round(width * 0.62)) : Math.max(210, Math.min(340, Math.round(width * 0.5)));
      this.body.style.setProperty("--columns", columns);
      const zero = this.spec.zero;
      const shared = this.spec.own ? null : extent(this.panels, log, weight, zero);
      this.body.replaceChildren();
      this.frames = this.panels.map((panel, k) =>
        this.panel(panel, width, height, this.spec.own ? extent([panel], log, weight, zero) : shared, log, weight, k));
      if (this.cursor !== null) this.point(this.cursor);
    }

    panel(panel, width, height, box, log, weight, index) {
      const holder = html("div", "plot", undefined, this.body);
      const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, holder);
      const small = this.many;
      const m = { left: small ? 38 : 50, right: small ? 6 : 14, top: panel.title ? 20 : 10, bottom: small ? 22 : 38 };
      if (panel.title) label(root, m.left, 12, panel.title, { class: "title" });
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
        label(root, m.left - 6, at + 3.5, short(t), { class: "tick", "text-anchor": "end" });
      }
      const whole = this.spec.whole;
      let xt = linearTicks(x.low, x.high, small ? 3 : Math.max(3, Math.floor(width / 110)));
      if (this.spec.xlog) xt = logTicks(x.low, x.high, small ? 3 : 5);
      if (whole) {
        xt = [];
        const step = Math.max(1, Math.ceil((x.high - x.low + 1) / (small ? 6 : Math.max(6, Math.floor(width / 40)))));
        for (let t = Math.ceil(x.low); t <= x.high; t += step) xt.push(t);
      }
      for (const t of xt) {
        const at = round(x(t));
        svg("line", { class: "axis", x1: at, x2: at, y1: height - m.bottom, y2: height - m.bottom + 4 }, root);
        label(root, at, height - m.bottom + 15, short(t), { class: "tick", "text-anchor": "middle" });
      }
      svg("line", { class: "axis", x1: m.left, x2: width - m.right, y1: height - m.bottom, y2: height - m.bottom }, root);
      if (!small) label(root, width - m.right, height - 5, this.spec.x, { class: "name", "text-anchor": "end" });
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

    /* The cursor: a hair line in every panel, and what each run has there. */
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
        html("span", "tip-value", figure(row.value), line);
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
      if (!event) say(head + ": " + rows.map((r) => runName(r.run) + " " + figure(r.value)).join(", "));
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

  /* ------------------------------------------------------------------ ratios to the baseline, a row a variant */

  class ForestChart {
    constructor(holder, spec) {
      this.holder = holder; this.spec = spec;
      this.body = html("div", "panels", undefined, holder);
    }

    draw() {
      const total = this.holder.clientWidth;
      if (!total) return;
      const columns = Math.max(1, Math.min(3, Math.floor(total / 280)));
      const width = Math.floor((total - (columns - 1) * 18) / columns);
      this.body.style.setProperty("--columns", columns);
      this.body.replaceChildren();
      for (const panel of this.spec.panels) this.panel(panel, width);
    }

    panel(panel, width) {
      const rows = panel.rows.filter((row) => row.points.some((p) => shown[p.run]));
      const height = 44 + rows.length * 24 + 18;
      const holder = html("div", "plot", undefined, this.body);
      const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, holder);
      svg("title", {}, root).textContent = panel.title + ": " + rows.map((r) => r.label + " " + r.text).join("; ");
      label(root, 0, 14, panel.title, { class: "title" });
      const left = 76, right = 8, logs = [0];
      for (const row of rows) {
        for (const v of [row.mean, row.low, row.high]) if (v !== null) logs.push(Math.log(v));
        for (const p of row.points) logs.push(Math.log(p.value));
      }
      let reach = Math.max(0.01, ...logs.map(Math.abs)) * 1.1;
      reach = Math.min(reach, Math.log(panel.cap || 30));
      const low = Math.max(-reach, Math.min(...logs) - reach * 0.15), high = Math.min(reach, Math.max(...logs) + reach * 0.15);
      const x = scale(low, high, left, width - right, false);
      const at = (v) => Math.max(left, Math.min(width - right, x(Math.log(v))));
      const bottom = 30 + rows.length * 24;
      for (const t of ratioTicks(Math.exp(low), Math.exp(high), Math.max(2, Math.floor((width - left) / 62)))) {
        const px = round(x(Math.log(t)));
        svg("line", { class: Math.abs(t - 1) < 1e-9 ? "one" : "gridline", x1: px, x2: px, y1: 24, y2: bottom }, root);
        label(root, px, bottom + 14, percent(t), { class: "tick", "text-anchor": "middle" });
      }
      rows.forEach((row, k) => {
        const py = 40 + k * 24;
        const group = svg("g", { class: "series", "data-runs": row.points.map((p) => p.run).join(" ") }, root);
        group.style.color = `var(--c${row.color})`;
        label(root, left - 8, py + 4, row.label, { class: "rowname", "text-anchor": "end" });
        if (row.low !== null) svg("line", { class: "interval", x1: at(row.low), x2: at(row.high), y1: py, y2: py }, group);
        for (const p of row.points) if (shown[p.run])
          svg("line", { class: "seed", x1: at(p.value), x2: at(p.value), y1: py - 6, y2: py + 6 }, group);
        svg("path", { class: "mark", d: MARKS[row.dash % MARKS.length](round(at(row.mean)), py) }, group);
      });
    }
  }

  function ratioTicks(low, high, count) {
    const inside = (list) => list.filter((t) => t >= low && t <= high);
    if (high / low > 3) {
      const list = inside([0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 1, 1.5, 2, 3, 5, 10, 20]);
      const every = Math.ceil(list.length / count);
      const anchor = list.indexOf(1) % every;
      return list.filter((_, k) => k % every === anchor);
    }
    return inside(linearTicks(low - 1, high - 1, Math.max(3, count - 1)).map((t) => 1 + t));
  }

  function percent(t) {
    if (t >= 1.999 || t <= 0.5001) return "×" + +t.toPrecision(2);
    const change = +((t - 1) * 100).toPrecision(2);
    return change === 0 ? "equal" : (change > 0 ? "+" : "−") + Math.abs(change) + " %";
  }

  /* ------------------------------------------------------------------ the page around the charts */

  function swatch(parent, run) {
    const root = svg("svg", { width: 26, height: 12, viewBox: "0 0 26 12", class: "swatch", "aria-hidden": "true" }, parent);
    root.style.color = ink(run);
    svg("line", { x1: 1, x2: 25, y1: 6, y2: 6, class: "line", "stroke-dasharray": DASHES[data.runs[run].dash] }, root);
    svg("path", { class: "mark", d: MARKS[data.runs[run].dash % MARKS.length](13, 6) }, root);
    return root;
  }

  let sayLater = 0;
  function say(text) {
    clearTimeout(sayLater);
    sayLater = setTimeout(() => { document.getElementById("said").textContent = text; }, 150);
  }

  const state = { log: false, smooth: +document.getElementById("smooth").value };
  const charts = [];

  function draw() { for (const chart of charts) chart.draw(); }

  function toggled() {
    document.querySelectorAll("[data-member]").forEach((node) => {
      const runs = node.dataset.member.split(" ").map(Number);
      node.hidden = !runs.some((run) => shown[run]);
    });
    document.querySelectorAll("button[data-toggle]").forEach((button) => {
      const runs = button.dataset.toggle.split(" ").map(Number);
      const on = runs.filter((run) => shown[run]).length;
      button.setAttribute("aria-pressed", on === runs.length ? "true" : on ? "mixed" : "false");
    });
    draw();
  }

  document.querySelectorAll("button[data-toggle]").forEach((button) => {
    const runs = button.dataset.toggle.split(" ").map(Number);
    if (button.classList.contains("chip")) button.prepend(swatch(button, runs[0]));
    else button.title = "seed " + button.textContent;
    button.addEventListener("click", () => {
      const all = runs.every((run) => shown[run]);
      for (const run of runs) shown[run] = !all;
      toggled();
    });
  });
  document.getElementById("all").addEventListener("click", () => { shown.fill(true); toggled(); });
  document.getElementById("log").addEventListener("change", (event) => { state.log = event.target.checked; draw(); });
  document.getElementById("smooth").addEventListener("input", (event) => { state.smooth = +event.target.value; draw(); });

  document.querySelectorAll("[data-swatch]").forEach((node) => swatch(node, +node.dataset.swatch));

  const slider = document.getElementById("frame");
  if (slider) {
    const steps = JSON.parse(slider.dataset.steps);
    const show = () => {
      const step = steps[+slider.value];
      document.getElementById("frame-step").textContent = "step " + step.toLocaleString("en");
      slider.setAttribute("aria-valuetext", "step " + step);
      document.querySelectorAll(".samples").forEach((holder) => {
        const frames = [...holder.querySelectorAll("img")];
        /* the run's newest grid that is no later than the step, else its first */
        const there = frames.filter((img) => +img.dataset.step <= step);
        const chosen = there.length ? there[there.length - 1] : frames[0];
        for (const img of frames) img.hidden = img !== chosen;
      });
    };
    slider.addEventListener("input", show);
    show();
  }

  for (const holder of document.querySelectorAll("[data-chart]")) {
    const spec = data.charts[holder.dataset.chart];
    spec.id = holder.dataset.chart;
    charts.push(new (spec.kind === "forest" ? ForestChart : LineChart)(holder, spec));
  }

  let width = 0, waiting = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  }).observe(document.body);
  /* Paper has a width of its own: charts are drawn for it, and back for the screen. */
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details.print").forEach((d) => { d.open = true; });
    document.documentElement.classList.add("printing");
    draw();
  });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); draw(); });
  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", draw));
  document.documentElement.classList.add("drawn");
  if (!still) document.documentElement.classList.add("moves");
  draw();
})();
