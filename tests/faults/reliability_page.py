"""Write docs/reliability.md from results/reliability.json, which `make test-faults` produces."""

import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, PAGE = ROOT / "results" / "reliability.json", ROOT / "docs" / "reliability.md"

HEAD = """# Reliability

The faults that were injected into runs, how often, what happened, and what was lost. The fault suite writes this page:

```
make test-faults                            # the complete suite; `make test` runs a short form
python tests/faults/reliability_page.py     # this page again, from results/reliability.json
```

The suite mounts small disks to fill them or make them read-only, which needs root (in a container is enough). A row
appears only if its test passed.

How a run protects itself:

- A checkpoint is written to a temporary folder, flushed to disk and renamed. Its manifest contains the hash of every
  file and of itself. A checkpoint that does not match its hashes is skipped for the previous one, with a message. If no
  checkpoint is intact, the run stops; it never starts over silently.
- The log is flushed to disk before the checkpoint, and cut to the checkpoint's step on resume: no step appears twice,
  none is missing.
- A step is a function of (config, step), so a resumed run equals an uninterrupted one bit for bit (on the same machine
  and software).
- A lock of the operating system keeps a second process out. It is freed when its owner ends.
- Weights that are not finite are never saved as a checkpoint.
- Weights are safetensors; everything else is JSON, text, images or plain arrays. No pickle is ever executed.
- Problems are reported before the work starts: a folder or file that cannot be written, an unknown sampler or
  extractor. During training, a sample grid that diverges is reported and skipped.
- Input is bounded: an image by 64 million pixels and 256 MiB, an archive by 200 times its size, a caption by 10,000
  characters. Links, pipes and devices in archives are refused; names stay inside the cache.
- Names of runs and data, captions and values are shown as text, in the page and in the terminal.

Under `torchrun --max-restarts` with the c10d rendezvous on CPUs (gloo), set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`.
Without it, restarted processes once hung in gloo; the likely cause is addresses left by the former processes.

Not detected: a disk that reports a write it did not make, a bit flip in memory, and a log line that turned into another
valid one.
"""


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def page(record):
    lines = [HEAD]
    total = sum(row["tried"] for row in record["faults"] if row["kind"] != "the source")
    kills = sum(row["tried"] for row in record["faults"] if "SIGKILL" in row["kind"])
    lines.append(
        f"{total:,} faults and inputs were tried in total, {kills:,} of them kills. Hypothesis draws some hundred more "
        "configs,\nsettings, scalings, logs, captions and values each time, which are not counted.\n"
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
        sys.exit(f"{SOURCE.relative_to(ROOT)} does not exist; make test-faults writes it")
    PAGE.write_text(page(json.loads(SOURCE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"page: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
