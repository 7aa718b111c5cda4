"""Failures of the machine (memory, disk, another process) as errors that say what is safe and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from safetensors import SafetensorError

from scalelong.errors import RunError, one_line, out_of_memory
from scalelong.runs.config import Config, TrainConfig
from scalelong.runs.run import Run
from scalelong.training import checkpoint

PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


@contextmanager
def explained(config: Config, run: Run) -> Iterator[None]:
    """Translate errors of the allocator, the file system and torch.distributed. All others pass unchanged."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, SafetensorError)):
            path = getattr(error, "filename", None) or run.folder
            problem = f"the run in {run.folder} stopped: {path}: {getattr(error, 'strerror', None) or one_line(error)}"
            advice = "Make room or fix the folder's permissions; the same command then resumes"
        elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_LOST):
            problem = f"another process of this run ended ({one_line(error)[:120]}…)"
            advice = "The same command resumes; torchrun --max-restarts does so automatically"
        elif out_of_memory(error):
            problem, advice = _memory_advice(config.train, one_line(error)[:200] or type(error).__name__)
        else:
            raise
        step = None
        with suppress(OSError):
            step = checkpoint.last_step(run.checkpoints_path)
        state = "No checkpoint was written yet" if step is None else f"The checkpoint of step {step} is intact"
        raise RunError(f"{problem}. {state}. {advice}") from error


def _memory_advice(t: TrainConfig, reason: str) -> tuple[str, str]:
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    part = t.batch_size // (processes * t.accumulate)
    remedies = []
    if part > 1:
        divisor = next(count for count in range(2, part + 1) if part % count == 0)
        remedies.append(f"--set train.accumulate={divisor * t.accumulate} (the same steps in smaller parts)")
    if not t.gradient_checkpointing:
        remedies.append("--set train.gradient_checkpointing=true (slower, less memory)")
    remedies.append("a smaller --batch-size" if part > 1 else "a smaller network")
    return f"out of memory with {part} image(s) at once ({reason})", f"Try {', or '.join(remedies)}"
