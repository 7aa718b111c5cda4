"""Record how the long skips of third-party networks are found, and write docs/networks.md.

`python tests/skips/networks_page.py` runs every network of third_party.py that is installed and updates
results/networks.json. Rows of networks that ran once, outside the tests, stay as they were recorded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "results" / "networks.json", ROOT / "docs" / "networks.md"
INTRO = """# Networks

What `scalelong.apply` does with other people's networks, each in a small configuration.

- *found*: **structure** means that `apply(net, scaling)` is enough; **example** means
  `apply(net, scaling, example=(x, t))`, which runs the network once; **sites** means that you list the joins yourself.
- *equal*: the scaled network equals the original with κ multiplied into the joins of its source by hand, bit for bit
  (κ_i are distinct powers of two).
- *placement*: where κ may act.
- *by*: **tests** rows are checked by `tests/skips/test_third_party.py` (`make test`, `make test-slow`); **once** rows
  ran once against the same reference, from the installed package or from a clone of the repository.

`python tests/skips/networks_page.py` writes this page from `results/networks.json`.
"""


def measure(network: Any) -> dict[str, Any]:
    """Return N, how the skips were found, the placements and whether the scaled network equals the reference."""
    import scalelong
    from scalelong.errors import UnsupportedNetworkError

    n = network.count()
    kappas = [2.0 ** ((i % 2 * 2 - 1) * (i // 2 + 1)) for i in range(n)]  # 1/2, 2, 1/4, 4, …
    found, net = "structure", network.make()
    try:
        scalelong.apply(net, scalelong.ExplicitScaling(kappas))
    except UnsupportedNetworkError:
        found = "example"
        scalelong.apply(net, scalelong.ExplicitScaling(kappas), example=network.call())
    sites = net.skip_scaling.sites
    equal = torch.equal(network.run(net), network.by_hand(kappas))
    changed = not torch.equal(network.run(net), network.run(network.make()))
    return {"N": n, "placement": placements(sites), "found": found, "equal": equal and changed}


def placements(sites: Any) -> str:
    return "join, after_norm" if all(site.norm for site in sites) else "join"


def recorded() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())["networks"]


def render(rows: list[dict[str, Any]]) -> str:
    working = sum(row["equal"] is True and row["found"] != "sites" for row in rows)
    counts = {
        how: sum(row["found"] == how and row["equal"] is True for row in rows) for how in ("structure", "example")
    }
    lines = [
        INTRO,
        f"{working} of {len(rows)} configurations work without `sites=`: {counts['structure']} by structure, "
        f"{counts['example']} from an example.\n",
        "| network | package or repository | N | placement | found | equal | by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = {True: "yes", False: "no", None: "–"}[row["equal"]]
        source = f"{row['source']} {row['version']}".strip()
        cells = (row["network"], source, str(row["N"]), row["placement"], row["found"], equal, row["by"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def record() -> None:
    from third_party import THIRD_PARTY

    rows = {row["network"]: row for row in (recorded() if RESULTS.exists() else [])}
    for name, network in THIRD_PARTY.items():
        try:
            result = measure(network)
            source = {"source": network.package, "version": network.version, "by": "tests"}
        except ModuleNotFoundError as error:
            print(f"{name}: {error}; kept as recorded", file=sys.stderr)
            continue
        rows[name] = {"network": name, **source, **result}
        print(name, result, flush=True)
    order = sorted(rows.values(), key=lambda row: (row["by"] != "tests", row["source"].lower(), row["network"]))
    RESULTS.write_text(json.dumps({"networks": order}, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(order))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "skips")]
    record()
