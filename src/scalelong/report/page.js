/* Legend, controls, samples and printing. Text from runs is set with textContent only. */

function swatch(parent, run) {
  const root = svg("svg", { width: 26, height: 12, viewBox: "0 0 26 12", class: "swatch", "aria-hidden": "true" }, parent);
  root.style.color = ink(run);
  svg("line", { x1: 1, x2: 25, y1: 6, y2: 6, class: "line", "stroke-dasharray": DASHES[data.runs[run].dash] }, root);
  svg("path", { class: "mark", d: MARKS[data.runs[run].dash % MARKS.length](13, 6) }, root);
  return root;
}

let sayTimer = 0;
function say(text) {
  clearTimeout(sayTimer);
  sayTimer = setTimeout(() => { document.getElementById("said").textContent = text; }, 150);
}

const state = { log: false, smooth: +document.getElementById("smooth").value };
const charts = [];

function draw() {
  for (const chart of charts) chart.draw();
  document.querySelectorAll("main .sheet").forEach((sheet) => fit(sheet, sheet.parentNode.clientWidth, 0));
  document.querySelectorAll(".table").forEach((holder) => {
    const scroll = holder.firstChild;
    holder.classList.toggle("overflows", scroll.scrollWidth > scroll.clientWidth + 1);
  });
}

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
    document.querySelectorAll("main .strip").forEach((holder) => {
      const frames = [...holder.querySelectorAll("img")];
      /* the run's newest grid up to this step, or its first */
      const there = frames.filter((img) => +img.dataset.step <= step);
      const chosen = there.length ? there[there.length - 1] : frames[0];
      for (const img of frames) img.hidden = img !== chosen;
    });
  };
  slider.addEventListener("input", show);
  show();
}

/* Show a grid at a whole number of screen pixels per pixel. On the page, images have at least 40 pixels and those that
   do not fit are cut off. Enlarged, to about `high` pixels, they have at least 64 and the dialog scrolls. */
function fit(sheet, wide, high) {
  const columns = +sheet.dataset.columns, whole = high || "captioned" in sheet.dataset;
  for (const strip of sheet.querySelectorAll(".strip")) {
    const first = strip.querySelector("img");
    const width = +first.getAttribute("width"), height = +first.getAttribute("height");
    const cell = columns ? (width - 1) / columns : 0;
    const least = Math.max(1, Math.ceil(40 / Math.max(1, cell - 1)));
    const across = columns && !whole ? Math.max(2, Math.min(columns, Math.floor((wide - 1) / (least * cell)))) : columns;
    const shown = columns ? across * cell + 1 : width;
    const one = sheet.querySelectorAll(".strip").length === 1;
    let k = Math.min(wide / shown, high && one ? Math.max(1, high / height) : Infinity);
    k = k >= 1 ? Math.floor(k) : k;
    if (high && cell) k = Math.max(k, Math.ceil(64 / cell));
    strip.style.width = k * shown + "px";
    strip.style.height = k * (whole ? height : Math.min(height, shown)) + "px";
    for (const img of strip.children) {
      img.style.width = k * width + "px";
      img.style.imageRendering = k >= 1 ? "pixelated" : "auto";
    }
  }
  for (const row of sheet.querySelectorAll(".captions")) row.style.width = sheet.querySelector(".strip").style.width;
}

/* A grid enlarged in a dialog; the arrow keys show the grids of the other runs at the same place. */
const zoom = document.getElementById("zoom");
if (zoom) {
  const grids = () => [...document.querySelectorAll("main .samples")].filter((grid) => grid.offsetParent !== null);
  let at = 0;
  const show = (index) => {
    const all = grids();
    at = (index + all.length) % all.length;
    const copy = all[at].cloneNode(true);
    zoom.lastChild.replaceChildren(copy);
    if (!zoom.open) zoom.showModal();
    const sheet = copy.querySelector(".sheet");
    sheet.setAttribute("aria-label", "Close");
    fit(sheet, zoom.lastChild.clientWidth, innerHeight * 0.96 - 120);
    sheet.focus();
    say(copy.querySelector("figcaption").textContent);
  };
  document.querySelectorAll("main .sheet").forEach((sheet) =>
    sheet.addEventListener("click", () => show(grids().indexOf(sheet.parentNode))));
  zoom.addEventListener("click", () => zoom.close());
  zoom.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
  });
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
/* Redraw the charts at the width of the paper for printing, and again for the screen. */
addEventListener("beforeprint", () => {
  document.querySelectorAll("details.print").forEach((d) => { d.open = true; });
  document.documentElement.classList.add("printing");
  draw();
});
addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); draw(); });
document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", draw));
document.documentElement.classList.add("drawn");
draw();
