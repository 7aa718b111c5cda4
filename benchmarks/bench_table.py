"""The table of docs/performance.md from results/bench.json: `python benchmarks/bench_table.py [FILE]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def row(figure: dict) -> str:
    value = figure["value"]
    digits = 3 if value["median"] < 0.1 else 2
    middle, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "low", "high"))
    spread = middle if low == high else f"{middle} ({low} … {high})"
    target = "" if figure["target"] is None else f"{figure['sense']} {figure['target']:g}"
    holds = {True: "yes", False: "**no**", None: ""}[figure["holds"]]
    return f"| {figure['name']} | {figure['against']} | {spread} | {target} | {holds} |"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "results" / "bench.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    print("| what | against | median (quartiles) | target | holds |\n|---|---|---|---|---|")
    print("\n".join(row(figure) for figure in record["figures"]))
    if record["growth"]:
        print("\n| size | slope | from … to |\n|---|---|---|")
        for growth in record["growth"]:
            print(f"| {growth['axis']} | {growth['slope']:.2f} | {growth['sizes'][0]} … {growth['sizes'][-1]} |")
