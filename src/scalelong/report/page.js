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
      /* the run's newest grid up to this step, or its first */
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
