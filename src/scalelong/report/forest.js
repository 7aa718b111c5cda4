/* Ratios to the baseline: one panel per measure, one row per variant. */

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
    const longest = Math.max(...rows.map((r) => r.label.length), 0);
    const left = Math.min(width * 0.42, Math.max(60, 14 + 6.6 * longest)), right = 22, logs = [0];
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
      const room = Math.floor((left - 14) / 6.6);
      const name = row.label.length > room ? row.label.slice(0, room - 1) + "…" : row.label;
      label(root, left - 8, py + 4, name, { class: "rowname", "text-anchor": "end" });
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
    const every = Math.min(list.length - 1, Math.ceil(list.length / count));
    const anchor = list.indexOf(1) % every;
    return list.filter((_, k) => k % every === anchor);
  }
  return linearTicks(low - 1, high - 1, Math.max(3, count - 1)).map((t) => 1 + t);
}

function percent(t) {
  if (t >= 1.999 || t <= 0.5001) return "×" + +t.toPrecision(2);
  const change = +((t - 1) * 100).toPrecision(2);
  return change === 0 ? "equal" : (change > 0 ? "+" : "−") + Math.abs(change) + " %";
}
