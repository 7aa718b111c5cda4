"""The studies behind the items: small ones that a CPU can train, and the paper's own for GPUs.

The settings of the CPU studies were chosen before any of their results was seen; page.md explains the choice. The
paper uses κ = 0.5, 0.5, 0.7 and 0.8 for its four datasets. Where its text gives no number (depths of Figs. 1 and 6,
κ of Fig. 13), the choice here is ours and marked as such.
"""

from dataclasses import replace
from pathlib import Path

from scalelong.experiments.plan import DistanceSpec
from scalelong.paper.study import LS, Study
from scalelong.scaling import ConstantScaling, NoScaling, UniformScaling
from scalelong.scaling.specs import ReZeroScaling, StableScaling

NONE, UNIFORM = NoScaling(), UniformScaling()
CS, REVERSE = ConstantScaling(0.7), ConstantScaling(0.7, reverse=True)  # κ in the middle of [0.5, 0.95]; κ_6 = 0.17
FOUR = (NONE, UNIFORM, CS, LS)
LARGE = (UniformScaling(1.25), UniformScaling(1.5))  # κ_i = κ > 1; the values are ours
DESIGNS = (  # LS by reduction, activation and calibration network
    LS,
    *(replace(LS, reduction=reduction) for reduction in (4, 8)),
    *(replace(LS, activation=name) for name in ("elu", "mish")),
    *(replace(LS, calibration=name) for name in ("scalar", "ie")),
)
BLOCKS = (StableScaling(0.1), StableScaling(0.3), ReZeroScaling())

# CPU size

_RECIPE = ("train.betas=0.99,0.999", "train.weight_decay=0.03", "train.clip=none")  # the paper's
_HARSH = ("train.batch_size=16", "train.lr=1e-3", "train.warmup=100")
_NO_SAMPLES = ("sample.every=0", "sample.n=0")

# The long runs: figures 3c, 5, 7, 11 and tables 1, 4.
CAMPAIGN = Study(
    "campaign", "fashion-tiny", (NONE, UNIFORM, CS, REVERSE, LS), steps=2500, label="Fashion-MNIST, batch 16",
    settings=(
        "model.patch_size=7", "model.embed_dim=64", "model.init_std=0.0566",  # 0.02·√(512/64)
        *_RECIPE, *_HARSH, *_NO_SAMPLES, "sample.clip_denoised=false",
        "validate.every=250", "monitor.every=10", "monitor.samples=8",
        "checkpoint.every=500", "checkpoint.keep=5",  # figure 11 reads all of them
    ),
    distance=DistanceSpec("pixels", 1000, 20), seconds=190,
)  # fmt: skip

# Norm growth: figures 1 and 12. Its runs are those of a campaign, so that sessions add to each other.
NORMS = Study(
    "digits-norms", "digits-uvit", (NONE, UNIFORM, ConstantScaling(0.5), LS), steps=8000, label="digits, batch 16",
    settings=(
        "train.batch_size=16", "train.lr=2e-3", "train.clip=none", "monitor.every=20", "monitor.samples=8",
        "validate.every=400", "checkpoint.every=2000", "checkpoint.keep=1", *_NO_SAMPLES,
    ),
    seconds=350, records=Path("results") / "campaign" / "digits-norms",
)  # fmt: skip

# The short runs: figures 6 and 13, tables 2 and 3.
_SHORT = Study(
    "digits", "digits-uvit", FOUR, steps=250, label="digits, batch 16", seconds=18,
    settings=(*_RECIPE, *_HARSH, *_NO_SAMPLES, "validate.every=50", "monitor.every=0", "checkpoint.every=250"),
)  # fmt: skip
DIGITS = replace(_SHORT, scalings=(*FOUR, *DESIGNS[1:], *BLOCKS, *LARGE))
SMALL_BATCH = replace(
    _SHORT, name="digits-batch-4", label="digits, batch 4", seconds=14, scalings=(*FOUR, *LARGE),
    settings=tuple(s.replace("train.batch_size=16", "train.batch_size=4") for s in _SHORT.settings),
)  # fmt: skip
DEEP = replace(
    _SHORT, name="digits-depth-24", label="digits, depth 24", seconds=32, settings=(*_SHORT.settings, "model.depth=24")
)

# the paper's size

# Tables have the FID-50k (COCO: FID-30k) of the preset's sampler, curves the FID-10k of DPM-Solver-fast with 50
# evaluations, during training and at the end; both with the preset's extractor, labels and captions.
_FID_10K = ("evaluate.every=5000", "evaluate.n=10000", "sample.sampler=dpm-solver-fast", "sample.steps=50")
_FID_50K, _FID_30K = DistanceSpec(None, 50_000), DistanceSpec(None, 30_000)
_CHECKPOINTS = ("checkpoint.every=50000", "checkpoint.keep=10")  # figure 11 reads all of them


def _study(name: str, preset: str, kappa: float, steps: int, label: str, *settings: str) -> Study:
    scalings = (NONE, UNIFORM, ConstantScaling(kappa), LS)
    return Study(name, preset, scalings, steps, label, ("monitor.every=100", *settings), distance=_FID_50K)


def _changed(study: Study, name: str, label: str, *settings: str) -> Study:
    return replace(study, name=name, label=label, settings=(*study.settings, *settings))


def _curves(study: Study, name: str, label: str, *settings: str) -> Study:
    return replace(_changed(study, name, label, *_FID_10K, *settings), distance=DistanceSpec(None, 10_000))


# For tables and for measurements inside the network.
CIFAR = _study("cifar10", "cifar10-uvit-s", 0.5, 500_000, "CIFAR-10, U-ViT-S/2", *_CHECKPOINTS)
CIFAR_UNET = _study("cifar10-unet", "cifar10-unet", 0.5, 500_000, "CIFAR-10, U-Net")
CELEBA = _study("celeba64", "celeba64-uvit-s", 0.5, 500_000, "CelebA 64, U-ViT-S/4", *_CHECKPOINTS)
IMAGENET_M = _study("imagenet64-m", "imagenet64-uvit-m", 0.7, 300_000, "ImageNet 64, U-ViT-M/4")
IMAGENET_L = _study("imagenet64-l", "imagenet64-uvit-l", 0.7, 300_000, "ImageNet 64, U-ViT-L/4")
IMAGENET_UNET = _study("imagenet64-unet", "imagenet64-unet", 0.7, 300_000, "ImageNet 64, U-Net")
COCO = replace(_study("coco", "coco-uvit-s", 0.8, 1_000_000, "MS-COCO, U-ViT-S/2"), distance=_FID_30K)
COCO_UNET = replace(_study("coco-unet", "coco-unet", 0.8, 1_000_000, "MS-COCO, U-Net"), distance=_FID_30K)

# For curves: the same runs with FID-10k during training.
CIFAR_CURVES = _curves(CIFAR, "cifar10-curves", "CIFAR-10, batch 128")
CIFAR_BATCH_64 = _curves(CIFAR, "cifar10-batch-64", "CIFAR-10, batch 64", "train.batch_size=64")
CIFAR_BATCH_32 = _curves(CIFAR, "cifar10-batch-32", "CIFAR-10, batch 32", "train.batch_size=32")
CIFAR_DEEP = _curves(CIFAR, "cifar10-depth-24", "CIFAR-10, depth 24", "model.depth=24")  # the depth is ours
CIFAR_UNET_CURVES = _curves(CIFAR_UNET, "cifar10-unet-curves", "CIFAR-10, U-Net")
CELEBA_CURVES = _curves(CELEBA, "celeba64-curves", "CelebA 64")

CIFAR_CS = ConstantScaling(0.5)
_OFTEN = ("checkpoint.every=5000", "checkpoint.keep=2")
CIFAR_REVERSE = replace(
    CIFAR_BATCH_64, name="cifar10-batch-64-45k", scalings=(ConstantScaling(0.5, reverse=True), CIFAR_CS), steps=45_000,
    settings=(*CIFAR_BATCH_64.settings, *_OFTEN),
)  # fmt: skip
IMAGENET_LARGE = replace(
    _changed(IMAGENET_M, "imagenet64-m-batch-256", "ImageNet 64, batch 256", "train.batch_size=256"),
    scalings=(NONE, *LARGE),
)
