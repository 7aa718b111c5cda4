"""Export the network of a run as ONNX or as a torch.export program, and check that it computes the same.

The exported network is called as `output = net(x, t)`, with `y` (labels) or `context` (text tokens) where the run was
trained with them: x (B, C, H, W), t (B,) float, y (B,) int64, context (B, L, D). κ is part of it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalelong.errors import RunError, require
from scalelong.files import atomic_file
from scalelong.models.registry import Shapes

if TYPE_CHECKING:
    from scalelong.runs.run import Run

FILES = {"onnx": "model.onnx", "torch-export": "model.pt2"}
TOLERANCE = 1e-4
BATCHES = (1, 3, 8)  # sizes that are compared; the network is traced with 2


@dataclass(frozen=True)
class Exported:
    """One exported file, and how far its outputs are from the network's."""

    path: Path
    format: str
    difference: float  # largest |exported − network| over BATCHES
    inputs: tuple[str, ...]
    largest_batch: int | None  # None: any


def export_run(run: Run, format: str, path: Path) -> Exported:
    """Write the EMA network of a run to `path` in one of FILES' formats; raise unless outputs agree to 1e-4."""
    if format == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            require(module, "export", "ONNX")
    from scalelong.diffusion.network import Denoiser

    net = Denoiser(run.net).eval()
    example = inputs(run.facts.shapes, 2)
    with torch.no_grad(), _quiet():
        shapes = {name: {0: torch.export.Dim.AUTO} for name in example}
        program = torch.export.export(net, (), example, dynamic_shapes=shapes)
        # the copy that is checked is the file, read back
        with atomic_file(path) as temporary:
            exported = _write_onnx(program, example, temporary) if format == "onnx" else _write(program, temporary)
            cases = [inputs(run.facts.shapes, n) for n in BATCHES]
            difference = max(float((exported(case) - net(**case)).abs().max()) for case in cases)
            if not difference <= TOLERANCE:
                raise RunError(
                    f"the exported network differs by {difference:.2g}, more than {TOLERANCE:g}: not written"
                )
    limits = [int(r.upper) for r in program.range_constraints.values() if r.upper < 1 << 20]
    limit = min(limits, default=None) if format == "torch-export" else None
    return Exported(path, format, difference, tuple(example), limit)


def inputs(shapes: Shapes, n: int) -> dict[str, Tensor]:
    """Return n random inputs by name: images, timesteps from 0 to 999, and the conditions that the network takes."""
    random = torch.Generator().manual_seed(n)
    values = {"x": torch.randn(n, shapes.channels, shapes.size, shapes.size, generator=random)}
    values["t"] = torch.rand(n, generator=random) * 999
    if shapes.text_width:
        values["context"] = torch.randn(n, shapes.text_tokens or 1, shapes.text_width, generator=random)
    elif shapes.label_rows:
        values["y"] = torch.randint(shapes.label_rows, (n,), generator=random)
    return values


def _write(program: Any, path: Path) -> Callable[[dict[str, Tensor]], Tensor]:
    buffer = io.BytesIO()  # torch.export.save insists on the ending .pt2, which a temporary file lacks
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getvalue())
    loaded: nn.Module = torch.export.load(io.BytesIO(path.read_bytes())).module()
    return lambda case: loaded(**case)


def _write_onnx(program: Any, example: dict[str, Tensor], path: Path) -> Callable[[dict[str, Tensor]], Tensor]:
    import onnxruntime

    names = {"input_names": list(example), "output_names": ["output"]}
    written: Any = torch.onnx.export(program, (), kwargs=example, dynamo=True, verbose=False, **names)  # type: ignore[arg-type]
    written.save(str(path), external_data=False)
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return lambda case: torch.from_numpy(session.run(None, {name: v.numpy() for name, v in case.items()})[0])


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the exporters' notes about themselves from the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
