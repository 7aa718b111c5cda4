"""The paper's own sizes: presets as they are, for GPUs. The paper names κ 0.5, 0.5, 0.7 and 0.8 for its four datasets.

Where the text gives no number (depths of Figs. 1 and 6, κ of Fig. 13) the choice here is marked as ours.
"""

from __future__ import annotations

from dataclasses import replace

from scalelong.paper.regime import DIGITS, LARGE, LS, NONE, UNIFORM
from scalelong.paper.study import Arm, Study

# FID-10k while training is made with DPM-Solver-fast in 50 evaluations, whatever the final samples are made with.
FID_10K = ("evaluate.every=5000", "evaluate.n=10000", "sample.sampler=dpm-solver-fast", "sample.steps=50")
FID_50K, FID_30K = ("inception", 50_000, None), ("inception", 30_000, None)
WATCHED = ("monitor.every=100",)


def _study(name: str, preset: str, kappa: float, steps: int, label: str, *settings: str) -> Study:
    arms = (NONE, UNIFORM, Arm(f"cs:{kappa:g}"), LS)
    return Study(name, preset, arms, steps, (*WATCHED, *settings), distance=FID_50K, label=label)


def _changed(study: Study, name: str, label: str, *settings: str) -> Study:
    return replace(study, name=name, label=label, settings=(*study.settings, *settings))


# For tables and what is looked at inside the network.
CIFAR = _study("cifar10", "cifar10-uvit-s", 0.5, 500_000, "CIFAR-10, U-ViT-S/2", "checkpoint.keep=50")
CIFAR_UNET = _study("cifar10-unet", "cifar10-unet", 0.5, 500_000, "CIFAR-10, U-Net")
CELEBA = _study("celeba64", "celeba64-uvit-s", 0.5, 500_000, "CelebA 64, U-ViT-S/4", "checkpoint.keep=50")
IMAGENET_M = _study("imagenet64-m", "imagenet64-uvit-m", 0.7, 300_000, "ImageNet 64, U-ViT-M/4")
IMAGENET_L = _study("imagenet64-l", "imagenet64-uvit-l", 0.7, 300_000, "ImageNet 64, U-ViT-L/4")
IMAGENET_UNET = _study("imagenet64-unet", "imagenet64-unet", 0.7, 300_000, "ImageNet 64, U-Net")
COCO = replace(_study("coco", "coco-uvit-s", 0.8, 1_000_000, "MS-COCO, U-ViT-S/2"), distance=FID_30K)
COCO_UNET = replace(_study("coco-unet", "coco-unet", 0.8, 1_000_000, "MS-COCO, U-Net"), distance=FID_30K)

# For curves: the same with FID-10k on the way.
CIFAR_CURVES = _changed(CIFAR, "cifar10-curves", "CIFAR-10, batch 128", *FID_10K)
CIFAR_BATCH_64 = _changed(CIFAR, "cifar10-batch-64", "CIFAR-10, batch 64", *FID_10K, "train.batch_size=64")
CIFAR_BATCH_32 = _changed(CIFAR, "cifar10-batch-32", "CIFAR-10, batch 32", *FID_10K, "train.batch_size=32")
CIFAR_DEEP = _changed(CIFAR, "cifar10-depth-24", "CIFAR-10, depth 24", *FID_10K, "model.depth=24")  # the depth is ours
CIFAR_UNET_CURVES = _changed(CIFAR_UNET, "cifar10-unet-curves", "CIFAR-10, U-Net", *FID_10K)
CELEBA_CURVES = _changed(CELEBA, "celeba64-curves", "CelebA 64", *FID_10K)

CIFAR_LARGE = replace(CIFAR, arms=(NONE, *LARGE))
IMAGENET_LARGE = replace(
    _changed(IMAGENET_M, "imagenet64-m-batch-256", "ImageNet 64, batch 256", "train.batch_size=256"),
    arms=(NONE, *LARGE),
)
CIFAR_DESIGNS = replace(CIFAR, arms=tuple(arm for arm in DIGITS.arms if arm.kind == "ls"))
CIFAR_OTHERS = replace(
    CIFAR, arms=(NONE, CIFAR.arms[2], LS, *(arm for arm in DIGITS.arms if arm.kind in ("stable", "rezero")))
)
CIFAR_REVERSE = replace(
    CIFAR_BATCH_64, name="cifar10-batch-64-45k", arms=(Arm("cs-reverse:0.5"), CIFAR.arms[2]), steps=45_000
)
