"""RUN/robustness.json on the page: what extra noise at the input does to a run (Fig. 3c), beside Theorem 3.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalelong.report.markup import Markup, element
from scalelong.report.read import RunView
from scalelong.report.sections import figure, section
from scalelong.report.thin import number

Chart = dict[str, Any]
Points = list[tuple[float, float, float | None, float | None]]  # x, y, low, high

FIGURES = (
    ("robust_change", "Change of the prediction", "E‖ε̂(x_t + δ) − ε̂(x_t)‖²/m against σ_δ², on held-out images."),
    ("robust_loss", "Loss with extra noise", "The loss at x_t + δ against σ_δ²."),
    ("robust_distance", "Samples with extra noise", "Fréchet distance of samples whose every evaluation sees x + δ; "
     "bars: 95 % over the samples."),
    ("lipschitz", "Local Lipschitz constant", "‖∂ε̂/∂x_t‖₂ at the middle of each timestep bin, found from below."),
)  # fmt: skip


def robustness_charts(runs: Sequence[RunView]) -> dict[str, Chart]:
    """The charts that at least one run has figures for."""
    noise = {"x": "σ_δ² of the extra noise", "point": "σ_δ²", "xlog": True}
    found = {
        "robust_change": _chart(runs, lambda facts: _sensitivity(facts, "change"), noise),
        "robust_loss": _chart(runs, lambda facts: _sensitivity(facts, "loss"), noise),
        "robust_distance": _chart(runs, _distances, noise),
        "lipschitz": _chart(runs, _lipschitz, {"x": "timestep", "point": "timestep", "zero": True}),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def robustness_section(runs: Sequence[RunView], there: set[str]) -> Markup | None:
    figures = [figure(*entry) for entry in FIGURES if entry[0] in there]
    if not figures:
        return None
    metrics = dict.fromkeys(
        str(run.robustness["metric"]) for run in runs if run.robustness and run.robustness.get("metric")
    )
    lead = "Gaussian noise δ of variance σ_δ² added to the network's input (the paper's Fig. 3c)."
    if metrics:
        lead += f" Distance: {'; '.join(metrics)}."
    return section("robustness", "Robustness", lead, element("div", figures, class_="figures"))


def _chart(runs: Sequence[RunView], read: Any, axes: dict[str, Any]) -> Chart | None:
    series = []
    for run in runs:
        points: Points = sorted(read(run.robustness or {}))
        if not points:
            continue
        line: dict[str, Any] = {
            "run": run.index,
            "x": [number(p[0]) for p in points],
            "y": [number(p[1]) for p in points],
        }
        if all(p[2] is not None and p[3] is not None for p in points):
            line |= {"low": [p[2] for p in points], "high": [p[3] for p in points], "whiskers": True}
        series.append(line)
    return {"kind": "lines", "marks": True, "series": series, **axes} if series else None


def _sensitivity(facts: dict[str, Any], name: str) -> Points:
    found: Points = []
    for row in _rows(facts, "sensitivity"):
        overall = row.get("overall")
        x, y = _number(row.get("variance")), _number(overall.get(name) if isinstance(overall, dict) else None)
        if x is not None and x > 0 and y is not None:
            found.append((x, y, None, None))
    return found


def _distances(facts: dict[str, Any]) -> Points:
    found: Points = []
    for row in _rows(facts, "distances"):
        x, y = _number(row.get("variance")), _number(row.get("value"))
        if x is not None and x > 0 and y is not None:
            found.append((x, y, _number(row.get("low")), _number(row.get("high"))))
    return found


def _lipschitz(facts: dict[str, Any]) -> Points:
    edges, rows = facts.get("edges"), _rows(facts, "lipschitz")
    if not isinstance(edges, list) or len(edges) != len(rows) + 1:
        return []
    ends = [_number(edge) for edge in edges]
    found: Points = []
    for k, row in enumerate(rows):
        low, high, y = ends[k], ends[k + 1], _number(row.get("network"))
        if low is not None and high is not None and y is not None:
            found.append(((low + high) / 2, y, None, None))
    return found


def _rows(facts: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = facts.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)
