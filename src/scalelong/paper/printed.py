"""The paper's own numbers: FIDs as its Tables 1 to 4 print them."""

from __future__ import annotations

FID = {"none": "3.11", "uniform": "3.11", "cs": "2.98", "ls": "3.01"}  # U-ViT-S/2 on CIFAR-10
# Table 1: FID by preset and scaling.
PRINTED = {
    "cifar10-uvit-s": FID,
    "cifar10-unet": {"none": "3.17", "uniform": "3.14", "cs": "3.05", "ls": "3.07"},
    "celeba64-uvit-s": {"none": "2.87", "uniform": "3.15", "cs": "2.78", "ls": "2.73"},
    "imagenet64-uvit-m": {"none": "5.85", "uniform": "5.80", "cs": "5.68", "ls": "5.75"},
    "imagenet64-uvit-l": {"none": "4.26", "uniform": "4.20", "cs": "3.83", "ls": "4.08"},
    "imagenet64-unet": {"none": "3.77", "uniform": "3.66", "cs": "3.48", "ls": "3.39"},
    "coco-uvit-s": {"none": "5.95", "uniform": "5.88", "cs": "5.77", "ls": "5.60"},
    "coco-unet": {"none": "7.32", "uniform": "7.19", "cs": "7.04", "ls": "6.89"},
}
TABLE_2 = {
    "ls-reduction-4": "3.06", "ls-reduction-8": "3.10", "ls": "3.01", "ls-activation-elu": "3.08",
    "ls-activation-mish": "3.08", "ls-calibration-scalar": "3.46", "ls-calibration-ie": "3.09",
}  # fmt: skip
TABLE_3 = {"stable-0.1": "3.77", "stable-0.3": "3.75", "rezero": "3.46", "cs": "2.98", "ls": "3.01", "none": "3.11"}
TABLE_4 = (
    ("5k", "10k", "15k", "20k", "25k", "30k", "35k", "40k", "45k"),
    ("67.26", "33.93", "22.78", "16.91", "15.01", "14.01", "12.96", "12.34", "12.26"),
    ("85.19", "23.74", "15.36", "11.38", "10.02", "8.61", "7.92", "7.27", "6.65"),
)
