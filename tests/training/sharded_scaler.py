"""One of two processes: four sharded steps with a gradient scaler on the CPU, one of which overflows in one shard."""

import json
import sys
from pathlib import Path

import torch

from scalelong.training import parallel, sharding
from scalelong.training.examples import Examples
from scalelong.training.trainer import Trainer
from tiny_runs import tiny_config


def steps(scaler):
    """Run four steps; in the second, the last process's gradient overflows."""
    made, config = parallel.make_accelerator, tiny_config(train__parallel="fsdp", train__steps=4)

    def accelerator(t):
        result = made(t)
        result.scaler = scaler
        return result

    parallel.make_accelerator = accelerator
    trainer = Trainer(config, Examples(config, "train"))
    parallel.make_accelerator = made
    backward, taken = trainer.accelerator.backward, []

    def overflowing(loss):
        backward(loss)
        if scaler is not None and trainer.progress.step == 1 and trainer.accelerator.process_index == 1:
            local = (sharding.local(p.grad) for p in trainer.net.parameters())
            next(shard for shard in local if shard.numel()).view(-1)[0] = float("inf")

    trainer.accelerator.backward = overflowing
    for _ in range(4):
        outcome = trainer.step()
        taken.append((outcome.loss, outcome.skipped, scaler.get_scale() if scaler else 1.0))
    return trainer, *map(list, zip(*taken, strict=True))


_, unscaled, _, _ = steps(None)
trainer, losses, skipped, scales = steps(torch.amp.GradScaler("cpu", init_scale=1024.0))
found = {
    "losses": losses,
    "skipped": skipped,
    "scales": scales,
    "unscaled": unscaled,
    "updates": trainer.update.count(),
}
Path(sys.argv[1], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
trainer.accelerator.end_training()
