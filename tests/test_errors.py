"""Every message names the offending value and says what is right or what to do, and every error has a class."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scalelong
from scalelong import errors
from scalelong.diffusion import get_process, get_sampler
from scalelong.evaluation import evaluate_images
from scalelong.runs.config import override
from scalelong.training import preset

BLACK = np.zeros((8, 8, 8, 1), np.uint8)
SOURCE = Path(scalelong.__file__).parent
REMEDY = re.compile(
    r"must be|must have|did you mean|known:|\b(use|call|pass|choose|set|remove|install|give|put|register|creates)\b",
    re.I,
)


def tiny():
    return scalelong.UViT(img_size=8, in_chans=1, embed_dim=16, depth=4, num_heads=2)


CASES = {
    "reduction": (lambda: scalelong.LearnableScaling(reduction=0), "0", errors.InvalidValueError),
    "kappa": (lambda: scalelong.ConstantScaling(-0.5), "-0.5", errors.InvalidValueError),
    "coefficients": (lambda: scalelong.ExplicitScaling("ab"), "ab", errors.InvalidValueError),
    "scaling name": (lambda: scalelong.parse_scaling("sc", kappa=0.7), "sc", errors.UnknownNameError),
    "option": (lambda: scalelong.parse_scaling("ls", reductoin=4), "reductoin", errors.UnknownNameError),
    "placement": (lambda: scalelong.apply(tiny(), "ls", placement="before"), "before", errors.UnknownNameError),
    "not a module": (lambda: scalelong.apply("unet", "ls"), "str", errors.InvalidValueError),
    "no skips": (lambda: scalelong.apply(nn.Linear(2, 2), "ls"), "Linear", errors.UnsupportedNetworkError),
    "scaled twice": (
        lambda: scalelong.apply(scalelong.apply(tiny(), "ls"), "ls"), "LearnableScaling", errors.ScalingStateError,
    ),
    "depth": (lambda: scalelong.UViT(depth=1), "1", errors.InvalidValueError),
    "input shape": (lambda: tiny()(torch.zeros(1, 3, 8, 8), 0), "3", errors.InvalidValueError),
    "images": (lambda: scalelong.estimate_kappa(np.zeros((4, 4)), num_skips=6), "4", errors.ScaleLongError),
    "process": (lambda: get_process("vpp"), "vpp", errors.UnknownNameError),
    "sampler": (lambda: get_sampler("dpm"), "dpm", errors.UnknownNameError),
    "preset": (lambda: preset("digit"), "digit", errors.UnknownNameError),
    "setting": (lambda: override(preset("digits"), {"train.lrr": 1}), "train.lrr", errors.UnknownNameError),
    "setting's value": (lambda: override(preset("digits"), {"train.lr": "fast"}), "fast", errors.InvalidValueError),
    "dataset": (lambda: scalelong.data.load("digitss"), "digitss", errors.ScaleLongError),
    "run folder": (lambda: scalelong.load_run("no/such/run"), "no/such/run", errors.RunError),
    "metric": (
        lambda: evaluate_images(BLACK, BLACK, "pixels", metrics=["fidd"]),
        "fidd", errors.UnknownNameError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_message_has_the_value_and_a_remedy(case):
    call, value, kind = CASES[case]
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert value in message
    assert REMEDY.search(message), message
    assert "\n" not in message.strip()


def test_the_base_class_is_raised_only_where_no_class_fits():
    """A bare ScaleLongError tells a caller nothing that it could catch."""
    bare = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name) and node.exc.func.id == "ScaleLongError"
    ]  # fmt: skip
    assert len(bare) <= 6, bare
