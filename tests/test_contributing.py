"""The worked examples of CONTRIBUTING.md run, in order, in a fresh process."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"


def test_the_worked_examples_run(tmp_path):
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(examples) >= 5
    script = tmp_path / "examples.py"
    script.write_text("\n".join(examples), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 long skips" in done.stdout  # the table of the network that was trained
