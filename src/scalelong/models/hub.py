"""Folders on the Hugging Face hub: upload one, download one, with errors of one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scalelong.errors import HubError, invalid, one_line

if TYPE_CHECKING:
    from torch import nn


def upload(
    folder: Path | str, repo_id: str, *, private: bool | None = None, token: str | None = None,
    message: str = "Upload with scalelong", create_pr: bool = False,
) -> str:  # fmt: skip
    """Create the repository if it does not exist, upload a folder to it, and return the address of the commit."""
    from huggingface_hub import HfApi

    check_repo_id(repo_id)
    api = HfApi(token=token)
    with hub_errors(repo_id, "upload to"):
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message=message, create_pr=create_pr)
    return str(getattr(commit, "commit_url", commit))


def download(
    repo_id: str, *, revision: str | None = None, token: str | None = None, cache_dir: Path | str | None = None,
    ignore: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Return the local folder of a repository, downloaded into huggingface_hub's cache where it is not there yet."""
    from huggingface_hub import snapshot_download

    check_repo_id(repo_id)
    with hub_errors(repo_id, "load"):
        return Path(
            snapshot_download(
                repo_id, revision=revision, token=token, cache_dir=cache_dir, ignore_patterns=list(ignore) or None
            )
        )


def pipeline_card(net: nn.Module, repo_id: str, licence: str) -> str:
    """The README.md of a pipeline: what the network is, its long skips with κ, and how to open it."""
    from scalelong.skips import describe

    parameters = sum(parameter.numel() for parameter in net.parameters())
    return f"""---
license: {licence}
library_name: scalelong
tags:
- diffusion
- scalelong
---

# {repo_id.split("/")[-1]}

A diffusers pipeline with scaled long skips: {type(net).__name__}, {parameters:,} parameters.

```python
from scalelong import ScaleLongPipeline

pipe = ScaleLongPipeline.from_pretrained("{repo_id}")
```

```
{describe(net)}
```
"""


def check_repo_id(repo_id: str) -> None:
    """Raise unless `repo_id` has the form of a repository's name."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo_id):
        raise invalid("repo_id", "owner/name of a repository on the Hugging Face hub", repo_id)


@contextmanager
def hub_errors(repo_id: str, action: str) -> Iterator[None]:
    """Translate errors of huggingface_hub and of the connection into `HubError`."""
    from huggingface_hub import errors

    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"cannot {action} {repo_id}: the hub has no such repository, or it is private; check the name, or pass "
            "token= (or run hf auth login)"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        hint = "connect to the hub (and unset HF_HUB_OFFLINE), or pass a local folder"
        raise HubError(
            f"cannot {action} {repo_id}: the hub cannot be reached and the cache lacks it; {hint}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"cannot {action} {repo_id}: it has no such revision; pass a branch, tag or commit") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            what = f"the hub refused access ({status})"
            hint = "pass token= with the right to write, or run hf auth login"
            raise HubError(f"cannot {action} {repo_id}: {what}; {hint}") from error
        raise HubError(f"cannot {action} {repo_id}: {one_line(error)}") from error
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise
        raise HubError(f"cannot {action} {repo_id}: no connection to the hub: {one_line(error)}") from error
