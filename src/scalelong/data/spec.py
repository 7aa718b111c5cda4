"""What a named dataset is, and how the first of its sources that can be had is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from scalelong.data.archives import extract, is_archive
from scalelong.data.hub import is_saved_dataset, read_hub
from scalelong.data.images import read_image
from scalelong.data.records import Options, Pixels, Reading, SourceUnavailableError, shown
from scalelong.data.splits import choose
from scalelong.errors import MissingExtraError, ScaleLongError
from scalelong.files import cache_dir

Read = Callable[[Path, str, Options, str], Reading]  # (folder, split, options, title)


@dataclass(frozen=True)
class Source:
    """One way to get a dataset."""

    title: str
    open: Callable[[str, Options, str], Reading]  # (split, options, title)


@dataclass(frozen=True)
class HubSet:
    """A dataset's name on the Hugging Face hub, and what its columns are called there."""

    repository: str
    columns: Options = field(default_factory=Options)
    group: str | None = None
    decode: Callable[[Path | bytes, str, Options], Pixels] = read_image


@dataclass(frozen=True)
class DatasetSpec:
    """A named dataset."""

    name: str
    summary: str
    image_size: int
    channels: int
    counts: dict[str, tuple[int, ...]]  # images of each split; several where editions differ
    read: Read | None = None  # from a local folder of the published files
    sources: tuple[Source, ...] = ()
    hub: HubSet | None = None  # tried last
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    captions: bool = False
    licence: str = ""
    contents: dict[str, str] = field(default_factory=dict)  # split → content_sha256 at the default size
    latent_scale: float | None = None  # what the paper's networks multiply latents by

    def source_titles(self) -> list[str]:
        """The sources in the order in which they are tried."""
        local = [] if self.read is None else ["local copy"]
        hub = [] if self.hub is None else [f"hf:{self.hub.repository}"]
        return local + [source.title for source in self.sources] + hub

    def with_defaults(self, options: Options) -> Options:
        """The options with this dataset's size and channels where none are given."""
        return replace(
            options, image_size=options.image_size or self.image_size, channels=options.channels or self.channels
        )

    def split(self, split: str) -> str:
        """The split that is meant; `validation` is the test split where there is no other."""
        return choose(split, self.counts, 0.0, self.name).split

    def open(self, split: str, options: Options, local: Path | None, stack: ExitStack) -> Reading:
        """The first source that can be had. A local copy, where there is one, is the only source tried."""
        folder = local or local_copy(self.name)
        if folder is not None:
            return self._open_local(folder, split, options, stack)
        failures = []
        for source in self.sources:
            try:
                return source.open(split, options, source.title)
            except SourceUnavailableError as error:
                failures.append(f"{source.title} ({error})")
        if self.hub is not None:
            try:
                return self._open_hub(self.hub.repository, split, options, f"hf:{self.hub.repository}")
            except (SourceUnavailableError, MissingExtraError) as error:
                failures.append(str(error))
        raise ScaleLongError(
            f"{self.name} cannot be had from any of its sources: {'; '.join(failures)}. "
            f"A local copy of the published files is read from --from PATH or $SCALELONG_DATA/{self.name}"
        )

    def _open_local(self, folder: Path, split: str, options: Options, stack: ExitStack) -> Reading:
        title = f"local copy {shown(str(folder))}"
        if self.read is None:
            raise ScaleLongError(f"{self.name} is embedded and is not read from {folder}")
        if not folder.exists():
            raise ScaleLongError(f"{folder}, given as the local copy of {self.name}, does not exist")
        if self.hub is not None and folder.is_dir() and is_saved_dataset(folder):
            return self._open_hub(str(folder), split, options, title)
        return self.read(unpacked(folder, stack), split, options, title)

    def _open_hub(self, name: str, split: str, options: Options, title: str) -> Reading:
        assert self.hub is not None
        columns = self.hub.columns
        options = replace(
            options,
            config=columns.config,
            image_column=columns.image_column,
            label_column=columns.label_column,
            caption_column=columns.caption_column,
        )
        reading = read_hub(name, split, options, source=title, group=self.hub.group, decode=self.hub.decode)
        found = len(reading.class_names) if reading.class_names is not None else None
        if self.num_classes is not None and found != self.num_classes:
            raise SourceUnavailableError(f"it has {found} classes, not {self.num_classes}")
        names = None if self.num_classes is None else self.class_names or reading.class_names
        return replace(reading, class_names=names, captioned=self.captions)


def local_copy(name: str) -> Path | None:
    """$SCALELONG_DATA/NAME, if it is there."""
    base = os.environ.get("SCALELONG_DATA")
    path = Path(base).expanduser() / name if base else None
    return path if path is not None and path.exists() else None


def unpacked(path: Path, stack: ExitStack) -> Path:
    """The folder itself; or, for an archive or a folder with archives, a temporary one with what is in them."""
    if path.is_dir():
        archives = [inside for inside in sorted(path.iterdir()) if inside.is_file() and is_archive(inside)]
        if not archives:
            return path
    elif is_archive(path):
        archives = [path]
    else:
        raise ScaleLongError(f"{path} is neither a folder nor an archive")
    cache_dir().mkdir(parents=True, exist_ok=True)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix=".unpacked.", dir=cache_dir())))
    for number, archive in enumerate(archives):
        target = folder / f"{number}"
        target.mkdir()
        extract(archive, target)
    if path.is_dir():
        for inside in path.iterdir():
            if inside.is_dir():
                (folder / inside.name).symlink_to(inside.resolve())
    return folder
