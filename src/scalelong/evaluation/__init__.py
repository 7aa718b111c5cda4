"""FID, KID and other metrics that can be trusted and compared: feature extractors, metrics by name, and cards."""

from scalelong.diffusion.sampling import to_uint8
from scalelong.evaluation.card import Card, Generation, ReferenceCard
from scalelong.evaluation.evaluate import Evaluation, evaluate_images
from scalelong.evaluation.extractors import FeatureExtractor, InceptionExtractor, ModuleExtractor, build_extractor
from scalelong.evaluation.metrics import (
    METRICS,
    FrechetDistance,
    Interval,
    KernelDistance,
    Metric,
    MetricValue,
    frechet_distance,
    kernel_distance,
)
from scalelong.evaluation.ranking import Comparison, compare
from scalelong.evaluation.reference import (
    Reference,
    dataset_reference,
    images_reference,
    read_reference,
    write_reference,
)
from scalelong.evaluation.sources import DatasetImages, as_reference
from scalelong.evaluation.statistics import FeatureAccumulator, FeatureSet, Moments

__all__ = [
    "METRICS", "Card", "Comparison", "DatasetImages", "Evaluation", "FeatureAccumulator", "FeatureExtractor",
    "FeatureSet", "FrechetDistance", "Generation", "InceptionExtractor", "Interval", "KernelDistance", "Metric",
    "MetricValue", "ModuleExtractor", "Moments", "Reference", "ReferenceCard", "as_reference", "build_extractor",
    "compare", "dataset_reference", "evaluate_images", "frechet_distance", "images_reference", "kernel_distance",
    "read_reference", "to_uint8", "write_reference",
]  # fmt: skip
