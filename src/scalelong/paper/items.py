"""The items: every figure and table of the paper that can be run, with its studies, analysis and figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from scalelong.errors import unknown
from scalelong.paper import inputs, networks, norms, quality
from scalelong.paper import studies as s
from scalelong.paper.judge import Outcome, above
from scalelong.paper.quality import OURS, Pairs, compare_ends, draw_curves, draw_ends
from scalelong.paper.study import Study, Trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalelong.scaling import Scaling

SIZES = ("cpu", "paper")


@dataclass(frozen=True)
class Item:
    """One figure or table.

    shows       what the paper's version shows, with its numbers if it prints any
    analyse     (finished runs, size) → outcome
    draw        draws the outcome's data into a figure of `inches`
    cpu, paper  the studies at each size
    differs     how the CPU experiment differs from the paper's
    minutes     CPU minutes of the analysis itself at CPU size
    commands    commands at the paper's size besides training
    """

    name: str
    title: str
    shows: str
    analyse: Callable[[Sequence[Trained], str], Outcome]
    draw: Callable[[dict[str, Any], Figure], None]
    cpu: tuple[Study, ...] = ()
    paper: tuple[Study, ...] = ()
    differs: str = ""
    minutes: float = 0.0
    commands: tuple[str, ...] = ()
    inches: tuple[float, float] = (11.0, 4.2)

    def studies(self, size: str, seeds: tuple[int, ...] | None = None, steps: int | None = None) -> list[Study]:
        """Return the studies of a size, with other seeds or steps if they are given."""
        return [study.changed(seeds, steps) for study in (self.cpu if size == "cpu" else self.paper)]


def _with(study: Study, *scalings: Scaling) -> Study:
    return replace(study, scalings=scalings)


GROWTH = "8,000 steps of a U-ViT of width 64 on 8×8 digits, lr 2e-3, no clipping, instead of CIFAR-10 at width 512"
LONG = "2,500 steps of a U-ViT of width 64 on Fashion-MNIST instead of 500,000 steps of width 512 on CIFAR-10"
SHORT = "250 steps of a U-ViT of width 64 on 8×8 digits instead of CIFAR-10; validation loss instead of FID"
# (variant, baseline) of the claims
LARGE = (("uniform-1.25", "none"), ("uniform-1.5", "none"))
DESIGNS = tuple((f"ls-{name}", "ls") for name in ("reduction-4", "reduction-8", "activation-elu", "activation-mish"))
MODULES = (("ls", "ls-calibration-scalar"), ("ls-calibration-ie", "ls-calibration-scalar"))
BLOCKS = tuple(product(("cs", "ls"), ("stable-0.1", "stable-0.3", "rezero")))
_FOUR = (_with(s.CAMPAIGN, *s.FOUR),)

_ITEMS = (
    Item(
        "figure-1", "Norms of features during training",
        "the norm of a hidden feature against iterations (it does not say which): it grows and oscillates most without "
        "scaling (20,000 at iteration 30,000), less with 1/√2 (14,000), and least with LS (11,000) and CS (10,000)",
        norms.figure_1, norms.draw_figure_1, cpu=(s.NORMS,), paper=(s.CIFAR, s.CIFAR_DEEP), differs=GROWTH,
        inches=(13.0, 4.2),
    ),
    Item(
        "figure-3", "Inputs, ratios, and extra noise",
        "(a) ‖x_t‖² is of order m; (b) ‖ε‖²/‖x_t‖² has a mean of about 1.22, with more than 97 % below 5; (c) extra "
        "noise at the input harms the unscaled network most",
        inputs.figure_3, inputs.draw_figure_3, cpu=_FOUR, paper=(s.CIFAR,), minutes=3,
        differs="of the paper's datasets only CIFAR-10 is measured, next to other data; (c) is " + LONG,
        commands=tuple(f"scalelong kappa --data {name} --skips 6" for name in ("cifar10", "celeba64", "imagenet64")),
    ),
    Item(
        "figure-5", "Training curves",
        "FID during training: CS and LS reach the unscaled network's FID in at most 1/1.5 of its steps, across data, "
        "batch sizes, depths and architectures (batch 32: LS after 6.7 h is better than unscaled after 15.6 h)",
        quality.figure_5, draw_curves, cpu=_FOUR,
        paper=(s.CIFAR_CURVES, s.CIFAR_BATCH_32, s.CIFAR_DEEP, s.CELEBA_CURVES, s.CIFAR_UNET_CURVES),
        differs=LONG + "; validation loss instead of FID-10k",
    ),
    Item(
        "figure-6", "Small batches and deep networks",
        "FID with smaller batches and more blocks: CS and LS improve clearly on no scaling and on 1/√2",
        partial(compare_ends, claims=(Pairs(OURS),)), draw_ends,
        cpu=(_with(s.DIGITS, *s.FOUR), _with(s.SMALL_BATCH, *s.FOUR), s.DEEP),
        paper=(s.CIFAR_BATCH_64, s.CIFAR_BATCH_32, s.CIFAR_DEEP), differs=SHORT,
    ),
    Item(
        "figure-7", "The κ_i that LS learns",
        "κ_i of LS on 30 Gaussian inputs: inside the range of CS, on almost the same exponential curve",
        networks.figure_7, networks.draw_figure_7, cpu=(_with(s.CAMPAIGN, s.LS),),
        paper=tuple(_with(study, s.LS) for study in (s.CIFAR, s.CELEBA, s.IMAGENET_M, s.COCO)),
        differs=LONG, minutes=0.5, inches=(6.5, 4.2),
    ),
    Item(
        "figure-11", "‖b_i∘a_i‖ during training", "‖b_i∘a_i‖ during training: always above 1 and growing, so M_0 ≥ 1",
        networks.figure_11, networks.draw_figure_11, cpu=(_with(s.CAMPAIGN, s.NONE),),
        paper=(_with(s.CIFAR, s.NONE), _with(s.CELEBA, s.NONE)), differs=LONG, minutes=5, inches=(7.0, 4.4),
    ),
    Item(
        "figure-12", "Norms of features, seed by seed",
        "Fig. 1 with other random seeds (depth 12): norms grow and oscillate without scaling for every seed, and less "
        "with the proposed methods",
        norms.figure_12, norms.draw_figure_12, cpu=(_with(s.NORMS, s.NONE, s.CIFAR_CS, s.LS),),
        paper=(_with(s.CIFAR, s.NONE, s.CIFAR_CS, s.LS),), differs=GROWTH, inches=(12.0, 6.0),
    ),
    Item(
        "figure-13", "κ > 1",
        "κ_i = κ > 1 degrades the result, most with small batches (ImageNet 64 with batch 256 collapses)",
        partial(compare_ends, claims=(Pairs(LARGE, "raises", above(1.0)),)), draw_ends,
        cpu=(_with(s.DIGITS, s.NONE, *s.LARGE), _with(s.SMALL_BATCH, s.NONE, *s.LARGE)),
        paper=(_with(s.CIFAR, s.NONE, *s.LARGE), s.IMAGENET_LARGE),
        differs=SHORT + "; κ of 1.25 and 1.5, because the text names none", inches=(9.0, 4.2),
    ),
    Item(
        "table-1", "FID of every setting",
        "FID at the end of training: CS and LS are best or close to it in every setting, also compared with 1/√2",
        partial(compare_ends, claims=(Pairs(OURS),), printed=quality.TABLE_1, notes={
            "cpu": "The paper's FIDs next to ours are of U-ViT-S/2 on CIFAR-10: another quantity.",
        }),
        draw_ends, cpu=_FOUR,
        paper=(s.CIFAR, s.CIFAR_UNET, s.CELEBA, s.IMAGENET_M, s.IMAGENET_L, s.IMAGENET_UNET, s.COCO, s.COCO_UNET),
        differs=LONG + "; a Fréchet distance of 8×8 pixel means (1,000 samples, 20 evaluations) instead of FID",
        inches=(10.0, 4.2),
    ),
    Item(
        "table-2", "The calibration network of LS",
        "FID of LS by reduction, activation and module: robust to the first two; SE and IE beat a learned κ_i",
        partial(
            compare_ends, claims=(Pairs(DESIGNS, "hardly moves", quality.SIMILAR), Pairs(MODULES)), baseline="ls",
            printed=quality.TABLE_2, notes=dict.fromkeys(
                SIZES, "Robust means within 5 %. The third verdict then means that the interval is wider than that."
            ),
        ),
        draw_ends, cpu=(_with(s.DIGITS, *s.DESIGNS),), paper=(_with(s.CIFAR, *s.DESIGNS),),
        differs=SHORT, inches=(8.0, 4.6),
    ),
    Item(
        "table-3", "Scaling blocks instead",
        "FID when the outputs of blocks are scaled instead (stable τ, ReZero): worse than CS (2.98) and LS (3.01)",
        partial(compare_ends, claims=(Pairs(BLOCKS),), printed=quality.TABLE_3),
        draw_ends, cpu=(_with(s.DIGITS, s.NONE, s.CS, s.LS, *s.BLOCKS),),
        paper=(_with(s.CIFAR, s.NONE, s.CIFAR_CS, s.LS, *s.BLOCKS),), differs=SHORT, inches=(8.0, 4.6),
    ),
    Item(
        "table-4", "The direction of scaling",
        "FID-10k during training with κ^(i−1) and the reverse κ^(N−i+1): the reverse leads at 5k steps and never after",
        quality.table_4, draw_curves, cpu=(_with(s.CAMPAIGN, s.REVERSE, s.CS),), paper=(s.CIFAR_REVERSE,),
        differs=LONG + "; validation loss during training",
    ),
)  # fmt: skip
ITEMS: dict[str, Item] = {item.name: item for item in _ITEMS}


def find_item(name: str) -> Item:
    """Return the item of a name. `figure 7`, `fig-7` and `Table-1` work too; an unknown name raises."""
    plain = name.strip().lower().replace(" ", "-").replace("_", "-").replace("fig-", "figure-")
    if plain not in ITEMS:
        raise unknown("item", name, [*ITEMS, "list", "all", "page"])
    return ITEMS[plain]
