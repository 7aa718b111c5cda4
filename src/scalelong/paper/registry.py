"""Every item of the paper that can be run: its experiment in both sizes, what it shows, how it is judged."""

from __future__ import annotations

from dataclasses import replace

from scalelong.errors import unknown
from scalelong.paper.full import (
    CELEBA,
    CELEBA_CURVES,
    CIFAR,
    CIFAR_BATCH_32,
    CIFAR_BATCH_64,
    CIFAR_CURVES,
    CIFAR_DEEP,
    CIFAR_DESIGNS,
    CIFAR_LARGE,
    CIFAR_OTHERS,
    CIFAR_REVERSE,
    CIFAR_UNET,
    CIFAR_UNET_CURVES,
    COCO,
    COCO_UNET,
    IMAGENET_L,
    IMAGENET_LARGE,
    IMAGENET_M,
    IMAGENET_UNET,
)
from scalelong.paper.inputs import draw_figure_3, figure_3
from scalelong.paper.item import Item
from scalelong.paper.learned import draw_figure_7, figure_7
from scalelong.paper.norms import draw_figure_11, figure_11
from scalelong.paper.oscillation import draw_figure_1, draw_figure_12, figure_1, figure_12
from scalelong.paper.quality import figure_5, figure_6, figure_13, table_1, table_2, table_3, table_4
from scalelong.paper.quality_figures import draw_bars, draw_curves
from scalelong.paper.regime import CAMPAIGN, CS, DEEP, DIGITS, LARGE, LS, NONE, REVERSE, SMALL_BATCH, UNIFORM
from scalelong.paper.study import Arm, Study

SMALL = "2,500 steps of a U-ViT of width 64 on Fashion-MNIST in place of 500,000 of width 512 on CIFAR-10"
SHORT = "250 steps of a U-ViT of width 64 on 8×8 digits in place of CIFAR-10; validation loss in place of FID"


def _arms(study: Study, *arms: Arm) -> Study:
    return replace(study, arms=arms)


_DESIGNS = tuple(arm for arm in DIGITS.arms if arm.kind == "ls")
_BLOCKS = tuple(arm for arm in DIGITS.arms if arm.kind in ("stable", "rezero"))

_ITEMS = (
    Item(
        "figure-1",
        "Feature oscillation during training",
        "the norm of hidden features over training: unscaled it oscillates, 1/√2 less, CS and LS least",
        figure_1,
        draw_figure_1,
        cpu=(_arms(CAMPAIGN, NONE, UNIFORM, CS, LS),),
        paper=(CIFAR, CIFAR_DEEP),
        differs=SMALL,
        size=(11.0, 4.2),
    ),
    Item(
        "figure-3",
        "Inputs, ratios, and extra noise",
        "(a) ‖x_t‖² is of order m; (b) ‖ε‖²/‖x_t‖² has mean about 1.22 and more than 97 % below 5; (c) extra noise at "
        "the input harms the unscaled network most",
        figure_3,
        draw_figure_3,
        cpu=(_arms(CAMPAIGN, NONE, UNIFORM, CS, LS),),
        paper=(CIFAR,),
        differs="of the paper's datasets CIFAR-10 alone is measured, others stand beside it; (c) is " + SMALL,
        minutes=3,
        commands=tuple(f"scalelong kappa --data {name} --skips 6" for name in ("cifar10", "celeba64", "imagenet64")),
        size=(11.0, 4.2),
    ),
    Item(
        "figure-5",
        "Training curves",
        "FID over training: CS and LS reach the unscaled network's in at most 1/1.5 of its steps, across data, batch "
        "sizes, depths and architectures (batch 32: LS after 6.7 h is better than unscaled after 15.6 h)",
        figure_5,
        draw_curves,
        cpu=(_arms(CAMPAIGN, NONE, UNIFORM, CS, LS),),
        paper=(CIFAR_CURVES, CIFAR_BATCH_32, CIFAR_DEEP, CELEBA_CURVES, CIFAR_UNET_CURVES),
        differs=SMALL + "; validation loss in place of FID-10k",
        size=(11.0, 4.2),
    ),
    Item(
        "figure-6",
        "Small batches and deep networks",
        "FID with smaller batches and more blocks: CS and LS improve much on unscaled and on 1/√2",
        figure_6,
        draw_bars,
        cpu=(_arms(DIGITS, NONE, UNIFORM, CS, LS), _arms(SMALL_BATCH, NONE, UNIFORM, CS, LS), DEEP),
        paper=(CIFAR_BATCH_64, CIFAR_BATCH_32, CIFAR_DEEP),
        differs=SHORT,
        size=(11.0, 4.2),
    ),
    Item(
        "figure-7",
        "The κ_i that LS learns",
        "κ_i of LS on 30 Gaussian inputs: inside CS's range, on almost the same exponential curve",
        figure_7,
        draw_figure_7,
        cpu=(_arms(CAMPAIGN, LS),),
        paper=(_arms(CIFAR, LS), _arms(CELEBA, LS), _arms(IMAGENET_M, LS), _arms(COCO, LS)),
        differs=SMALL,
        minutes=0.5,
        size=(6.5, 4.2),
    ),
    Item(
        "figure-11",
        "‖b_i∘a_i‖ during training",
        "‖b_i∘a_i‖ over training: always above 1 and growing, so that M_0 ≥ 1",
        figure_11,
        draw_figure_11,
        cpu=(_arms(CAMPAIGN, NONE),),
        paper=(_arms(CIFAR, NONE), _arms(CELEBA, NONE)),
        differs=SMALL,
        minutes=5,
        size=(7.0, 4.4),
    ),
    Item(
        "figure-12",
        "Feature oscillation, seed by seed",
        "as Fig. 1 under other random seeds (depth 12): unscaled it oscillates in each, with the proposed method less",
        figure_12,
        draw_figure_12,
        cpu=(_arms(CAMPAIGN, NONE, CS, LS),),
        paper=(_arms(CIFAR, NONE, CIFAR.arms[2], LS),),
        differs=SMALL,
        size=(12.0, 3.8),
    ),
    Item(
        "figure-13",
        "κ > 1",
        "κ_i = κ > 1 degrades the result, most with small batches (ImageNet 64 with batch 256 collapses)",
        figure_13,
        draw_bars,
        cpu=(_arms(DIGITS, NONE, *LARGE), _arms(SMALL_BATCH, NONE, *LARGE)),
        paper=(CIFAR_LARGE, IMAGENET_LARGE),
        differs=SHORT + "; κ of 1.25 and 1.5, as the text names none",
        size=(9.0, 4.2),
    ),
    Item(
        "table-1",
        "FID of every setting",
        "FID at the end of training: CS and LS are best or near it in every setting, also against 1/√2",
        table_1,
        draw_bars,
        cpu=(_arms(CAMPAIGN, NONE, UNIFORM, CS, LS),),
        paper=(CIFAR, CIFAR_UNET, CELEBA, IMAGENET_M, IMAGENET_L, IMAGENET_UNET, COCO, COCO_UNET),
        differs=SMALL + "; a Fréchet distance of 8×8 pixel means (1,000 samples, 20 evaluations) in place of FID",
        size=(10.0, 4.2),
    ),
    Item(
        "table-2",
        "The calibration network of LS",
        "FID of LS by reduction, activation and module: robust to the first two, SE and IE better than a learned κ_i",
        table_2,
        draw_bars,
        cpu=(_arms(DIGITS, *_DESIGNS),),
        paper=(CIFAR_DESIGNS,),
        differs=SHORT,
        size=(8.0, 4.6),
    ),
    Item(
        "table-3",
        "Scaling blocks instead",
        "FID of scaling block outputs (stable τ, ReZero): worse than CS (2.98) and LS (3.01)",
        table_3,
        draw_bars,
        cpu=(_arms(DIGITS, NONE, CS, LS, *_BLOCKS),),
        paper=(CIFAR_OTHERS,),
        differs=SHORT,
        size=(8.0, 4.6),
    ),
    Item(
        "table-4",
        "The direction of scaling",
        "FID-10k over training with κ^(i−1) and the reverse κ^(N−i+1): the reverse leads at 5k steps, never after",
        table_4,
        draw_curves,
        cpu=(_arms(CAMPAIGN, REVERSE, CS),),
        paper=(CIFAR_REVERSE,),
        differs=SMALL + "; validation loss on the way",
        size=(11.0, 4.2),
    ),
)
ITEMS: dict[str, Item] = {item.name: item for item in _ITEMS}


def find_item(name: str) -> Item:
    """The item of a name, or an error with a suggestion. `figure 7`, `fig-7` and `Table-1` are understood."""
    plain = name.strip().lower().replace(" ", "-").replace("_", "-").replace("fig-", "figure-")
    if plain not in ITEMS:
        raise unknown("item", name, ITEMS)
    return ITEMS[plain]
