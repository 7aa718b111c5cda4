"""FID and KID that can be trusted and compared: feature extractors, distances with intervals, and cards."""

from __future__ import annotations

from scalelong.diffusion.sampling import to_uint8
from scalelong.evaluation.card import Card, Generation
from scalelong.evaluation.compare import Comparison, Difference, compare
from scalelong.evaluation.evaluate import Evaluation, as_reference, evaluate_images
from scalelong.evaluation.extractors import (
    FeatureExtractor,
    InceptionExtractor,
    ModuleExtractor,
    build_extractor,
)
from scalelong.evaluation.frechet import FrechetDistance, frechet_distance
from scalelong.evaluation.interval import Interval
from scalelong.evaluation.kernel import KernelDistance, kernel_distance
from scalelong.evaluation.reference import (
    Reference,
    ReferenceCard,
    dataset_reference,
    images_reference,
    read_reference,
    write_reference,
)
from scalelong.evaluation.statistics import FeatureAccumulator, FeatureSet, Moments

__all__ = [
    "Card",
    "Comparison",
    "Difference",
    "Evaluation",
    "FeatureAccumulator",
    "FeatureExtractor",
    "FeatureSet",
    "FrechetDistance",
    "Generation",
    "InceptionExtractor",
    "Interval",
    "KernelDistance",
    "ModuleExtractor",
    "Moments",
    "Reference",
    "ReferenceCard",
    "as_reference",
    "build_extractor",
    "compare",
    "dataset_reference",
    "evaluate_images",
    "frechet_distance",
    "images_reference",
    "kernel_distance",
    "read_reference",
    "to_uint8",
    "write_reference",
]
