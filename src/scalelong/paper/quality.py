"""Figures 5, 6 and 13 and tables 1 to 4: validation losses and distances at the end, and curves on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalelong.experiments.measures import CURVES as TITLES
from scalelong.experiments.statistics import mean_interval
from scalelong.paper.claims import cell, label, means_table, ratio_claims, where
from scalelong.paper.item import Outcome, Table
from scalelong.paper.printed import FID, PRINTED, TABLE_2, TABLE_3, TABLE_4
from scalelong.paper.trained import Trained
from scalelong.paper.verdict import Claim, Region, above

OURS = (("cs", "none"), ("ls", "none"), ("cs", "uniform"), ("ls", "uniform"))
LIKE = Region(0.95, 1.05)  # "robust": within 5 %, more than the paper's own 3.10/3.01


def distance_name(trained: Trained) -> str:
    """What the distance at the end is, in full: FID, or that it is not."""
    names = {run.names["frechet"] for run in trained.runs if "frechet" in run.names}
    return next(iter(names)) if len(names) == 1 else "Fréchet distance"


def ends(trained: Trained) -> list[tuple[str, str]]:
    """The measures that a run's end is judged by: the validation loss, and the distance where there is one."""
    loss = trained.loss
    found = [(loss, TITLES[loss])]
    if any("frechet" in run.values for run in trained.runs):
        found.append(("frechet", distance_name(trained)))
    return found


def mean_image_distance(trained: Trained) -> float:
    """tr Σ of the data's features: the Fréchet distance of samples that all are the data's mean."""
    from scalelong.experiments.distance import build
    from scalelong.runs.evaluate import training_reference

    spec = trained.study.spec()
    assert spec is not None
    config = trained.study.config(trained.study.arms[0])
    return float(training_reference(config, build(spec.extractor)).features.moments.covariance.trace())


def invalid_distance(trained: Trained) -> str | None:
    """Why distances are not judged, or None: some variant's samples are no images yet."""
    means = [found.mean for v in trained.variants if (found := trained.mean(v, "frechet")) is not None]
    if not means or max(means) < (edge := mean_image_distance(trained)):
        return None
    return (
        f"{trained.title}: distances of up to {max(means):.3g} are above {edge:.3g}, that of samples which all are the "
        "data's mean: the samples are no images yet, and their distances are not judged."
    )


def end_claims(
    trained: Trained,
    pairs: Sequence[tuple[str, str]],
    *,
    region: Region | None = None,
    verb: str = "lowers",
    paper: dict[tuple[str, str], str] | None = None,
) -> list[Claim]:
    """The pairs by every measure of a run's end; distances of samples that are no images have no verdict."""
    claims: list[Claim] = []
    for key, title in ends(trained):
        valid = key != "frechet" or invalid_distance(trained) is None
        claims += ratio_claims(trained, key, title, pairs, region=region, verb=verb, paper=paper, valid=valid)
    return claims


def _warnings(studies: Sequence[Trained]) -> tuple[str, ...]:
    return tuple(text for trained in studies if (text := invalid_distance(trained)) is not None)


def curve_key(trained: Trained) -> str:
    """FID on the way where it was measured, else the validation loss."""
    for key in ("fid", "frechet"):
        if trained.runs and all(key in run.curves for run in trained.runs):
            return key
    return trained.loss


def figure_5(studies: Sequence[Trained], size: str) -> Outcome:
    claims: list[Claim] = []
    tables, panels, never = [], [], []
    for trained in studies:
        key = curve_key(trained)
        claims += ratio_claims(trained, trained.loss, TITLES[trained.loss], OURS)
        for kind in ("cs", "ls"):
            variant = trained.named(kind)
            if variant is not None:
                claims.append(
                    Claim(
                        f"{where(trained)}{label(variant)} is sooner at the {TITLES[key]} that no scaling ends with",
                        f"steps of no scaling / steps of {label(variant)}",
                        above(1.0),
                        trained.sooner(variant, "none", key),
                        "at least 1.5×",
                    )
                )
                if late := trained.never(variant, "none", key):
                    never.append(
                        f"{where(trained)}{label(variant)} never got there in {len(late)} of {len(trained.seeds)} "
                        "seeds: the interval is then one of bounds and narrower than the truth."
                    )
        tables.append(means_table(trained, ends(trained)[:1], "none"))
        panels.append(_panel(trained, key))
    note = (
        "Sooner: the steps at which no scaling first was at its own final value over the variant's, seed by seed. "
        "A run that never got there counts with the greatest factor it could still have, which flatters it."
    )
    return Outcome(tuple(claims), tuple(tables), {"panels": panels}, (note, *never))


def figure_6(studies: Sequence[Trained], size: str) -> Outcome:
    return _by_setting(studies, OURS, "lowers", None)


def figure_13(studies: Sequence[Trained], size: str) -> Outcome:
    return _by_setting(studies, (("uniform-1.25", "none"), ("uniform-1.5", "none")), "raises", above(1.0))


def _by_setting(
    studies: Sequence[Trained], pairs: Sequence[tuple[str, str]], verb: str, region: Region | None
) -> Outcome:
    claims: list[Claim] = []
    for trained in studies:
        claims += end_claims(trained, pairs, verb=verb, region=region)
    tables = tuple(means_table(trained, ends(trained), "none") for trained in studies)
    return Outcome(tuple(claims), tables, {"panels": [_bars(trained) for trained in studies]}, _warnings(studies))


def table_1(studies: Sequence[Trained], size: str) -> Outcome:
    claims: list[Claim] = []
    tables = []
    for trained in studies:
        printed = PRINTED.get(trained.study.preset, FID)
        ratios = {(a, b): f"FID {printed[a]} / {printed[b]}" for a, b in OURS}
        claims += end_claims(trained, OURS, paper=ratios)
        tables.append(means_table(trained, ends(trained), "none", {k: f"FID {v}" for k, v in printed.items()}))
    panels = [_bars(trained) for trained in studies]
    notes = () if size == "paper" else ("The paper's FIDs beside ours are of U-ViT-S/2 on CIFAR-10: another quantity.",)
    return Outcome(tuple(claims), tuple(tables), {"panels": panels}, (*_warnings(studies), *notes))


def table_2(studies: Sequence[Trained], size: str) -> Outcome:
    claims: list[Claim] = []
    same = [(name, "ls") for name in TABLE_2 if "reduction" in name or "activation" in name]
    better = [(name, "ls-calibration-scalar") for name in ("ls", "ls-calibration-ie")]
    printed = {(a, b): f"FID {TABLE_2[a]} / {TABLE_2[b]}" for a, b in (*same, *better)}
    for trained in studies:
        claims += end_claims(trained, same, verb="hardly moves", region=LIKE, paper=printed)
        claims += end_claims(trained, better, paper=printed)
    tables = tuple(
        means_table(trained, ends(trained), "ls", {k: f"FID {v}" for k, v in TABLE_2.items()}) for trained in studies
    )
    note = "Robust: within 5 %. There, the third verdict means that the interval is wider than that."
    return Outcome(
        tuple(claims), tables, {"panels": [_bars(trained) for trained in studies]}, (note, *_warnings(studies))
    )


def table_3(studies: Sequence[Trained], size: str) -> Outcome:
    claims: list[Claim] = []
    pairs = [(ours, other) for ours in ("cs", "ls") for other in ("stable-0.1", "stable-0.3", "rezero")]
    printed = {(a, b): f"FID {TABLE_3[a]} / {TABLE_3[b]}" for a, b in pairs}
    for trained in studies:
        claims += end_claims(trained, pairs, paper=printed)
    tables = tuple(
        means_table(trained, ends(trained), "none", {k: f"FID {v}" for k, v in TABLE_3.items()}) for trained in studies
    )
    return Outcome(tuple(claims), tables, {"panels": [_bars(trained) for trained in studies]}, _warnings(studies))


def table_4(studies: Sequence[Trained], size: str) -> Outcome:
    claims: list[Claim] = []
    tables, panels = [], []
    for trained in studies:
        claims += end_claims(
            trained, [("cs", "cs-reverse")], paper={("cs", "cs-reverse"): "FID-10k 6.65 / 12.26 at 45k"}
        )
        tables.append(means_table(trained, ends(trained), "cs-reverse"))
        panel = _panel(trained, curve_key(trained))
        panels.append(panel)
        tables.append(_on_the_way(trained, panel))
    steps, reverse, ours = TABLE_4
    tables.append(
        Table(
            "The paper's FID-10k on CIFAR-10, batch 64",
            ("training step", *steps),
            (("κ_i = κ^(N−i+1)", *reverse), ("κ_i = κ^(i−1)", *ours)),
        )
    )
    return Outcome(tuple(claims), tuple(tables), {"panels": panels}, _warnings(studies))


def _on_the_way(trained: Trained, panel: dict[str, Any]) -> Table:
    """Means over seeds at every second point of the curve, at most nine."""
    steps = sorted({step for line in panel["lines"] for step in line["steps"]})
    shown = steps[1 :: max(1, len(steps) // 9)] if len(steps) > 9 else steps
    rows = []
    for variant in trained.variants:
        lines = [dict(zip(x["steps"], x["values"], strict=True)) for x in panel["lines"] if x["variant"] == variant]
        found = [[line[s] for line in lines if line.get(s) is not None] for s in shown]
        rows.append((label(variant), *(cell(mean_interval(v)) if v else "–" for v in found)))
    return Table(f"{panel['title']} on the way", ("training step", *(f"{s:,}" for s in shown)), tuple(rows))


def _panel(trained: Trained, key: str) -> dict[str, Any]:
    """Curves of every variant and seed."""
    lines = []
    for run in trained.runs:
        curve = run.curves.get(key)
        if curve is not None:
            curve = curve.finite()
            values = [round(float(v), 5) for v in curve.values]
            steps = curve.steps.astype(int).tolist()
            lines.append({"variant": run.variant, "seed": run.seed, "steps": steps, "values": values})
    return {"label": trained.title, "title": TITLES[key], "lines": lines}


def _bars(trained: Trained) -> dict[str, Any]:
    """Ends of every run, measure by measure."""
    measures = []
    for key, title in ends(trained):
        values = {v: {str(s): round(x, 6) for s, x in trained.values(v, key).items()} for v in trained.variants}
        measures.append({"title": title, "values": values})
    return {"label": trained.title, "measures": measures}
