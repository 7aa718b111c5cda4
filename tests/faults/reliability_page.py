"""Write docs/reliability.md from results/reliability.json, which `make test-faults` leaves."""

import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, PAGE = ROOT / "results" / "reliability.json", ROOT / "docs" / "reliability.md"

HEAD = """# Reliability

What was done to runs, how often, what happened, and what was lost. This page is written by the fault suite:

```
make test-faults                            # the whole suite; a short form of it is in `make test`
python tests/faults/reliability_page.py     # this page again, from results/reliability.json
```

The full disk and the read-only folder are small disks that the suite mounts, so it needs the right to (root in a
container is enough). A row stands here only if its test passed.

What a run relies on:

- A checkpoint is written aside, pushed to the disk and renamed; its manifest holds the hash of every file and of
  itself. What does not fit its hashes is passed over for the checkpoint before, and that is said. Where no checkpoint
  is whole the run stops: it never starts over silently.
- The log is pushed to the disk before a checkpoint is, and cut to the checkpoint's step on a resume: no step twice,
  none missing.
- A step is a function of (config, step), so a resumed run is bit for bit the run that was never stopped (on the same
  machine and software; the kernels in C, where there is a compiler, are part of that).
- A lock of the operating system's keeps a second process out; it ends with its owner.
- Weights that are not finite never become a checkpoint.
- Weights are safetensors, everything else is JSON, text, images or plain arrays. No pickle is executed anywhere.
  Compiled kernels are loaded from the cache only if their hash is in their name and nobody else can write there.
- What can be refused is refused before the work: a folder or file that cannot be written, a sampler or extractor that
  does not exist. On the way, a grid of samples that diverges is said and passed over; training goes on.
- What comes from outside is bounded: a picture by 64 million pixels and 256 MiB, an archive by 200 times its size, a
  caption by 10,000 characters. Links, pipes and devices in archives are refused, names stay inside the cache.
- Names of runs and data, captions and figures are text wherever they are shown, in the page and in the terminal.

Under `torchrun --max-restarts` with the c10d rendezvous on CPUs (gloo), set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`:
without it restarted processes were seen to hang in gloo (once; the likely cause is addresses left by the former ones).

What it does not notice: a disk that lies about having written, a bit that flips in memory, and a log line that became
another valid one.
"""


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def page(record):
    lines = [HEAD]
    total = sum(row["tried"] for row in record["faults"] if row["kind"] != "the source")
    kills = sum(row["tried"] for row in record["faults"] if "SIGKILL" in row["kind"])
    lines.append(
        f"In all {total:,} faults and inputs were tried, {kills:,} of them kills. Not counted: the configs, settings, "
        "scalings,\nlogs, captions and figures that hypothesis draws anew each time, some hundreds.\n"
    )
    for kind in dict.fromkeys(row["kind"] for row in record["faults"]):
        lines += [f"## {kind[0].upper()}{kind[1:]}\n", "| fault | tried | what happened | lost |", "|---|---:|---|---|"]
        for row in record["faults"]:
            if row["kind"] == kind:
                lines.append(
                    f"| {cell(row['fault'])} | {row['tried']:,} | {cell(row['happened'])} | {cell(row['lost'])} |"
                )
        lines.append("")
    lines.append(f"Measured with Python {platform.python_version()} on {platform.system()} {platform.machine()}.")
    return "\n".join(lines) + "\n"


def main():
    if not SOURCE.exists():
        sys.exit(f"{SOURCE.relative_to(ROOT)} is not there: make test-faults writes it")
    PAGE.write_text(page(json.loads(SOURCE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"page: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
