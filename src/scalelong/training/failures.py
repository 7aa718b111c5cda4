"""What the machine does to a run (no memory, no disk) as a sentence that says what is safe and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from scalelong.errors import ScaleLongError, one_line, out_of_memory
from scalelong.runs.config import Config
from scalelong.training import checkpoint


class OutOfMemoryError(ScaleLongError):
    """A batch did not fit into memory."""


class UnwritableError(ScaleLongError):
    """The run folder could not be written: a full disk, a folder that is gone or not ours."""


class PeerLostError(ScaleLongError):
    """A process that this one trains together with is gone."""


@contextmanager
def in_sentences(config: Config, folder: Path, checkpoints: Path) -> Iterator[None]:
    """Turn an allocator's or a file system's error into a sentence about the run; let all others pass."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        where = getattr(error, "filename", None) or folder
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UnwritableError(
            f"the run in {folder} stopped: {where}: {reason}. {_kept(checkpoints)} "
            "Once there is room and the folder can be written, the same command goes on from there"
        ) from error
    except Exception as error:
        if _peer_lost(error):
            raise PeerLostError(
                f"another process of this run ended ({one_line(error)[:120]}…). {_kept(checkpoints)} "
                "The same command goes on from there; torchrun --max-restarts does so by itself"
            ) from error
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(_memory(config, checkpoints, error)) from error


def _peer_lost(error: Exception) -> bool:
    signs = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _memory(config: Config, checkpoints: Path, error: Exception) -> str:
    t = config.train
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    part = t.batch_size // (processes * t.accumulate)
    ways = []
    if part > 1:
        ways.append(f"--set train.accumulate={_next_split(part) * t.accumulate} (the same steps in smaller parts)")
    if not t.gradient_checkpointing:
        ways.append("--set train.gradient_checkpointing=true (slower, less memory)")
    ways.append("a smaller --batch-size" if part > 1 else "a smaller network")
    return (
        f"out of memory with {part} image(s) at once ({one_line(error)[:200] or type(error).__name__}). "
        f"{_kept(checkpoints)} What helps: {', or '.join(ways)}"
    )


def _next_split(part: int) -> int:
    """The least number of equal parts, more than one."""
    return next(count for count in range(2, part + 1) if part % count == 0)


def _kept(checkpoints: Path) -> str:
    try:
        step = checkpoint.last_step(checkpoints)
    except OSError:
        step = None
    return f"The checkpoint after step {step} is there." if step is not None else "No checkpoint was written yet."
