"""How FID falls with the number of reference images: CIFAR-10's test images against more and more training images.

    scalelong data stats cifar10 --split test
    scalelong data stats cifar10 --split train --n 10000
    python benchmarks/studies/fid_bias.py [--json results/fid-cifar10-bias.json]

Takes the features that the reference statistics keep (10,000 a side), the training images in random order, and fits
FID = a + b/N to the larger N (the leading term of the bias). What the line says at N = 50,000 is an extrapolation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from scalelong.evaluation import Moments, build_extractor, dataset_reference, frechet_distance
from scalelong.theory.fits import fit_line

SIZES, FITTED, ASKED = (3000, 4000, 5000, 6000, 8000, 10_000), 5000, 50_000


def moments(features: torch.Tensor) -> Moments:
    x = features.double()
    return Moments(len(x), x.mean(0), x.T.cov())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    extractor = build_extractor("inception")
    test = dataset_reference("cifar10", "test", extractor).features.moments
    kept = dataset_reference("cifar10", "train", extractor, n=10_000).features.kept
    assert kept is not None
    fids = {n: frechet_distance(test, moments(kept[:n])).value for n in SIZES}
    for n, fid in fids.items():
        print(f"10,000 test images against {n:6,} training images: {fid:.3f}", flush=True)
    fitted = [n for n in SIZES if n >= FITTED]
    fit = fit_line([1 / n for n in fitted], [fids[n] for n in fitted])
    line = fit.intercept + fit.slope / ASKED
    print(f"a line in 1/N through N ≥ {FITTED:,} gives {line:.3f} at {ASKED:,}")
    if options.json:
        record = {
            "command": "python benchmarks/studies/fid_bias.py",
            "fid of 10,000 test images by training images": {str(n): round(fid, 4) for n, fid in fids.items()},
            "fitted from": FITTED,
            "line": {"limit": round(fit.intercept, 4), "slope": round(fit.slope, 1)},
            "extrapolated": {str(ASKED): round(line, 4)},
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
