"""The runs behind docs/faq.md: each case makes a run fail in one way and prints what the tools say.

    python docs/faq_cases.py                  # run all cases and rewrite the outputs in docs/faq.md
    python docs/faq_cases.py loss-spike       # run one and print it

`tests/test_faq.py` (slow) runs them all and checks that each output still contains the diagnosis.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import scalelong
from scalelong import ConstantScaling, StabilityMonitor

PAGE = Path(__file__).with_name("faq.md")
TINY = [
    "--set=model.embed_dim=32", "--set=model.depth=4", "--set=model.num_heads=2", "--set=train.warmup=1",
    "--set=train.log_every=1", "--set=validate.n=16", "--set=sample.n=0", "--batch-size=8", "--quiet",
]  # fmt: skip
CASES: dict[str, tuple[Callable[[], None], str]] = {}


def case(name: str, diagnosis: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case; `diagnosis` is a pattern that its output must contain."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = (function, diagnosis)
        return function

    return register


def command(line: str, extra: list[str] | None = None) -> None:
    """Show a command as a user types it, run it with `extra` options that keep it small, and print what it prints."""
    from scalelong.cli import main

    print(f"$ scalelong {line}")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        main([*line.split(), *(extra or [])])
    print(errors.getvalue().strip(), end="\n" if errors.getvalue().strip() else "")


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "norm_num_groups": 8}
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(16, 32), layers_per_block=1, **blocks
    )


def loop(net: nn.Module, steps: int, kick: int | None = None, half: bool = False, **options):
    """Train on digits for some steps, alarms printed; the update of step `kick` is a hundred times too long."""
    from scalelong.diffusion import Denoiser, get_process, simple_loss

    data, process, denoise = scalelong.data.load("digits"), get_process("ddpm"), Denoiser(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    watch = StabilityMonitor(net, window=20, on_alarm=print, **{"every": 2, **options})
    for step in range(1, steps + 1):
        x_0, t = data.batch(torch.randint(len(data), (32,))), process.times(torch.rand(32))
        optimizer.param_groups[0]["lr"] = 0.2 if step == kick else 2e-3
        with watch.step(step), torch.autocast("cpu", torch.float16, enabled=half):
            losses = simple_loss(denoise, process, x_0, t, torch.randn_like(x_0))
            optimizer.zero_grad()
            losses.float().mean().backward()
            watch.note(loss=losses.detach(), t=process.network_time(t))
        optimizer.step()
        if not torch.isfinite(losses).all():
            break
    return watch


@case("nan-half-precision", r"is not finite")
def nan_half_precision() -> None:
    """Features have grown until one layer leaves the range of fp16."""
    net = unet()
    with torch.no_grad():  # late in training: the middle block's features are some thousand times larger
        net.mid_block.resnets[0].conv2.weight.mul_(2e5)
    watch = loop(net, 1, half=True, every=1)
    sizes = watch.last["probe"]["blocks"]
    print("norms of the blocks:", ", ".join("not finite" if v is None else f"{v:.3g}" for v in sizes))


@case("diverges", r"the first module whose output is not finite")
def diverges() -> None:
    """A learning rate that no clipping saves."""
    command("train digits-uvit --set train.lr=1e12 --out broken", [*TINY, "--steps=20", "--set=train.clip=none"])


@case("loss-spike", r"step 6[0-9]: the loss")
def loss_spike() -> None:
    """One update that is far too long, as after a corrupt batch."""
    loop(unet(), 70, kick=61)


@case("bad-checkpoint", r"skipped the damaged checkpoint")
def bad_checkpoint() -> None:
    """The newest checkpoint's EMA is damaged on disk."""
    settings = [*TINY, "--set=checkpoint.every=2"]
    command("train digits-uvit --steps 4 --out run", settings)
    path = Path("run/checkpoints/step-00000004/ema.safetensors")
    content = bytearray(path.read_bytes())
    content[-8:] = b"\xff" * 8
    path.write_bytes(bytes(content))
    command("train digits-uvit --steps 6 --out run", [word for word in settings if word != "--quiet"])


@case("resume", r"identical: True")
def resume() -> None:
    """Killed and resumed, against the uninterrupted run."""
    from scalelong.runs.run import Run

    settings = [*TINY, "--set=checkpoint.every=3"]
    command("train digits-uvit --steps 6 --out whole", settings)
    command("train digits-uvit --steps 3 --out resumed", settings)
    command("train digits-uvit --steps 6 --out resumed", settings)
    whole, resumed = (Run(name).column("loss").values for name in ("whole", "resumed"))
    print("losses, uninterrupted:", " ".join(f"{v:.6f}" for v in whole))
    print("losses, resumed:      ", " ".join(f"{v:.6f}" for v in resumed))
    print("identical:", bool((whole == resumed).all()))


@case("changed-settings", r"train\.lr")
def changed_settings() -> None:
    """The same folder, another learning rate."""
    command("train digits-uvit --steps 2 --out run", TINY)
    command("train digits-uvit --steps 4 --set train.lr=0.01 --out run", TINY)


@case("fid", r"cannot rank evaluations whose cards differ")
def fid() -> None:
    """Two values of one network with different samplers and numbers of images."""
    import shutil

    from scalelong.runs import Request, Run
    from scalelong.runs.locate import SHIPPED

    for name, n, steps in (("a", 100, 5), ("b", 200, 10)):
        shutil.copytree(SHIPPED / "digits", name)
        request = Request(n=n, steps=steps, sampler="dpm-solver++", guidance=1.25, batch_size=n)
        value = Run(name).evaluate(request, extractor="pixels", metrics=["frechet"], save_as="evaluate").frechet
        print(f"{name}: {n} images, {steps} steps: {value:.3f}")
    command("evaluate a b --compare")


@case("samples-are-noise", r"before the final clamp")
def samples_are_noise() -> None:
    """A network that has hardly been trained."""
    command("train digits-uvit --steps 5 --out run", TINY)
    command("sample run --n 16 --no-clip --out grid.png")


@case("no-effect", r"cancels κ_i")
def no_effect() -> None:
    """κ in a U-Net that normalizes after the join."""
    net = scalelong.apply(unet(), ConstantScaling(0.5))
    print(scalelong.describe(net, torch.randn(2, 1, 8, 8), torch.tensor([50, 800])))


@case("kappa-too-small", r"almost cuts it")
def kappa_too_small() -> None:
    """κ = 0.5 with twelve skips."""
    net = scalelong.UViT(img_size=8, in_chans=1, embed_dim=32, depth=24, num_heads=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scalelong.apply(net.train(), ConstantScaling(0.5))
    print(*(f"{w.category.__name__}: {w.message}" for w in caught), sep="\n")


@case("data-range", r"must be rescaled")
def data_range() -> None:
    """Images in [0, 1] where the process expects [-1, 1]."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same sentence
        estimate = scalelong.estimate_kappa(images, num_skips=6)
    print(estimate)
    print(*(f"{notice.level}: {notice.text}" for notice in estimate.notices), sep="\n")


@case("scaling-lost", r"returns it unscaled[\s\S]*load_scaling: 0.0%")
def scaling_lost() -> None:
    """A scaled network saved as if it were diffusers' own."""
    from diffusers import UNet2DModel

    net = scalelong.apply(unet(), ConstantScaling(0.5), placement="after_norm").eval()
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([500])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.save_pretrained("saved")
    print(*(f"{w.category.__name__}: {w.message}" for w in caught if "scal" in str(w.message)), sep="\n")

    def moved(other: nn.Module) -> float:
        return ((other(x, t).sample - net(x, t).sample).norm() / net(x, t).sample.norm()).item()

    with torch.no_grad():
        print(f"reloaded as it is: the output moved by {moved(UNet2DModel.from_pretrained('saved')):.1%}")
        scalelong.save_scaling(net, "saved")
        again = scalelong.load_scaling(UNet2DModel.from_pretrained("saved").eval(), "saved")
        print(f"with save_scaling and load_scaling: {moved(again):.1%}")


def output(name: str) -> str:
    """Run a case in an empty folder and return what it printed."""
    torch.manual_seed(0)
    printed, here = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(printed):
                CASES[name][0]()
        finally:
            os.chdir(here)
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    text = PAGE.read_text(encoding="utf-8") if not sys.argv[1:] else ""
    for name in names:
        result = output(name)
        print(f"--- {name}\n{result}\n", flush=True)
        block = f"<!-- case: {name} -->\n```text\n{result}\n```"
        text = re.sub(rf"<!-- case: {name} -->\n```text\n.*?```", lambda _, b=block: b, text, flags=re.S)
    if text:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
