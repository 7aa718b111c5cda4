"""The regime of the CPU-sized experiments: chosen by reasoning and written down before any of their results was seen.

Where scaling would show. The paper's claims are about training that is unstable or slow, so the runs are made as
the paper's are where that costs nothing, and harsher where a CPU cannot follow it:

- the network has the shape of U-ViT-S, 12 blocks around a middle one, hence N = 6 long skips, with initial weights
  that give width 64 the signal scale of width 512;
- no gradient clipping, the paper's betas (0.99, 0.999) and weight decay 0.03;
- a small batch (16): the paper's own lever for noisy gradients (its Fig. 6);
- a high learning rate, 1e-3, and a short warm-up of 100 steps: five times the paper's rate;
- 60,000 images of Fashion-MNIST, so that no run sees an image twice in the mean and the validation loss on the
  10,000 others measures learning, not memory.

What a CPU forbids. The campaign has 2,500 steps, where the paper has 500,000, and the paper's own Table 4 turns
in favour of CS only after 5,000: claims about final quality may well show nothing here. The middle block's
oscillation is what was seen to differ on digits at such lengths. FID is out of reach (the reference alone is 60,000
passes of Inception), and 1,000 samples cannot fill the covariance of a network's 1,280 features; the distance is
that of means over an 8×8 raster, 64 features, and is labelled as such wherever it stands.

The steps were sized by cost alone: a step of 16 images took about 60 ms of processor time on the machine that the
results were made on, and 15 runs with their validation and samples were to stay below an hour of one core. The short
runs on digits have 250 steps for the same reason (400 were planned and cut before the first had started, because the
machine had become busy).
"""

from __future__ import annotations

from dataclasses import replace

from scalelong.paper.study import Arm, Study

KAPPA = 0.7  # the preset's, in the middle of the paper's range [0.5, 0.95]; κ_6 = 0.17
PAPERS = ("train.betas=0.99,0.999", "train.weight_decay=0.03", "train.clip=none")
HARSH = ("train.batch_size=16", "train.lr=1e-3", "train.warmup=100")
QUIET = ("sample.every=0", "sample.n=0")
NONE, UNIFORM, CS, REVERSE, LS = (Arm(word) for word in ("none", "uniform", f"cs:{KAPPA}", f"cs-reverse:{KAPPA}", "ls"))

# The long runs: figures 1, 3 (c), 5, 7, 11, 12 and tables 1, 4.
CAMPAIGN = Study(
    "campaign",
    "fashion-tiny",
    (NONE, UNIFORM, CS, REVERSE, LS),
    steps=2500,
    settings=(
        "model.patch_size=7",
        "model.embed_dim=64",
        "model.init_std=0.0566",  # 0.02·√(512/64)
        *PAPERS,
        *HARSH,
        *QUIET,
        "validate.every=250",
        "monitor.every=10",
        "monitor.samples=8",
        "checkpoint.every=500",
        "checkpoint.keep=5",  # figure 11 and table 4 look at them all
    ),
    distance=("pixels", 1000, 20),
    label="Fashion-MNIST, batch 16",
    seconds=190,
)

# The short runs: figure 6 and 13, tables 2 and 3.
_SHORT = Study(
    "digits",
    "digits",
    (NONE, UNIFORM, CS, LS),
    steps=250,
    settings=(*PAPERS, *HARSH, *QUIET, "validate.every=50", "monitor.every=0", "checkpoint.every=250"),
    label="digits, batch 16",
    seconds=18,
)
LARGE = (Arm("uniform:1.25"), Arm("uniform:1.5"))  # κ_i = κ > 1
DIGITS = replace(
    _SHORT,
    arms=(
        *_SHORT.arms,
        *(Arm("ls", (f"scaling.reduction={r}",)) for r in (4, 8)),
        *(Arm("ls", (f"scaling.activation={name}",)) for name in ("elu", "mish")),
        *(Arm("ls", (f"scaling.calibration={name}",)) for name in ("scalar", "ie")),
        *(Arm("stable", (f"scaling.tau={tau}",)) for tau in (0.1, 0.3)),
        Arm("rezero"),
        *LARGE,
    ),
)
SMALL_BATCH = replace(
    _SHORT,
    name="digits-batch-4",
    label="digits, batch 4",
    seconds=14,
    arms=(*_SHORT.arms, *LARGE),
    settings=tuple("train.batch_size=4" if s.startswith("train.batch_size") else s for s in _SHORT.settings),
)
DEEP = replace(
    _SHORT, name="digits-depth-24", label="digits, depth 24", seconds=32, settings=(*_SHORT.settings, "model.depth=24")
)
