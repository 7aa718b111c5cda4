/* Shared by all charts: elements, formatting of numbers, scales and ticks. All script files share one scope. */

const data = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 2.5", "9 3 2 3", "4 2", "1 3", "12 4", "6 2 1 2 1 2"];
const shown = data.runs.map(() => true);

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

/* A tick's label, with as many digits as ticks `step` apart need to differ. */
function short(v, step) {
  const a = Math.abs(v);
  const digits = Math.min(9, Math.max(3, step ? Math.ceil(Math.log10(a / step)) + 1 : 3));
  if (a >= 1e6) return +(v / 1e6).toPrecision(digits) + "M";
  if (a >= 1e4) return +(v / 1e3).toPrecision(digits) + "k";
  if (a !== 0 && a < 1e-3) return v.toExponential(Math.max(0, digits - 3)).replace("-", "−");
  return String(+v.toPrecision(digits)).replace("-", "−");
}

/* Round numbers from low to high, about `count` of them and at least two. */
function linearTicks(low, high, count) {
  const span = high - low || 1;
  let ticks = [];
  for (let wanted = Math.max(1, count); ticks.length < 2 && wanted < 40; wanted++) {
    const raw = span / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    ticks = [];
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(+t.toPrecision(12));
  }
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
  const kept = ticks.filter((_, k) => k % every === 0);
  return kept.length < 2 ? [ticks[0], ticks[ticks.length - 1]] : kept;
}

const spacing = (ticks) => (ticks.length < 2 ? 0 : Math.min(...ticks.slice(1).map((t, k) => t - ticks[k])));

function scale(low, high, from, to, log) {
  const f = log ? Math.log : (v) => v;
  const a = f(low), b = f(high), width = b - a || 1;
  const map = (v) => from + ((f(v) - a) / width) * (to - from);
  map.invert = (p) => { const v = a + ((p - from) / (to - from)) * width; return log ? Math.exp(v) : v; };
  map.low = low; map.high = high;
  return map;
}

function smoothed(y, weight) {
  /* exponential moving average with bias correction */
  if (!weight) return y;
  let sum = 0, mass = 0;
  return y.map((v) => {
    if (v === null) return v;
    sum = weight * sum + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function extent(panels, log, weight, spec) {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  const include = (v) => { if (v !== null && isFinite(v) && (!log || v > 0)) { if (v < y0) y0 = v; if (v > y1) y1 = v; } };
  for (const panel of panels) {
    for (const s of panel.series) {
      if (!shown[s.run]) continue;
      for (const v of s.x) { if (v < x0) x0 = v; if (v > x1) x1 = v; }
      s.y.forEach(include);
      if (weight) smoothed(s.y, weight).forEach(include);
      if (s.low && (s.whiskers || spec.pages)) { s.low.forEach(include); s.high.forEach(include); }
    }
    if (panel.band && x0 < Infinity) { panel.band.low.forEach(include); panel.band.high.forEach(include); }
  }
  if (x0 === Infinity || y0 === Infinity) return null;
  if (spec.zero && !log && y0 > 0) y0 = 0;
  if (spec.level !== undefined) include(spec.level);
  if (y0 === y1) { const d = Math.abs(y0) * 0.1 || 1; y0 = log ? y0 / 1.2 : y0 - d; y1 = log ? y1 * 1.2 : y1 + d; }
  else if (log) { const r = (y1 / y0) ** 0.04; y0 /= r; y1 *= r; }
  else { const d = (y1 - y0) * 0.04; y0 = y0 >= 0 && y0 - d < 0 ? 0 : y0 - d; y1 += d; }
  if (x0 === x1) { const d = spec.whole ? 0.5 : 1; x0 -= d; x1 += d; }
  return { x0, x1, y0, y1 };
}
