"""Fetch a repository's files into the cache that the Hub's tools use, so that no file is fetched twice.

    1 list      list the revision's files and sizes, or the cached files if the Hub is unreachable or HF_HUB_OFFLINE=1
    2 check     report how many bytes are missing, and check that they fit on the disk
    3 fetch     fetch large files into partial files, resuming an interrupted fetch; check the hash, then rename
    4 place     huggingface_hub fetches the small files and links all files of the revision into one folder

The environment variables HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT have their usual effect on huggingface_hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mega.core.files import locked_alone
from mega.core.hub.choice import chosen
from mega.core.hub.faults import explained, needs_library
from mega.core.hub.names import HubName, Kind

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

Report = Callable[[str], None]

LARGE = 1 << 20
"""Minimum size in bytes of a file whose transfer can be resumed after an interruption."""
SPARE = 64 << 20
"""Number of bytes to leave free on the disk."""
TRIES, PAUSE = 8, 1.0
"""Maximum number of consecutive attempts without progress, and the seconds between attempts."""


class Fetched(NamedTuple):
    """The cached files for a name on the Hub. folder: the revision's folder, which may also contain other files."""

    folder: Path
    files: list[Path]


def fetched(flag: str, name: HubName, kind: Kind, report: Report = lambda line: None) -> Fetched:
    """Fetch the files for a name. flag: the option whose value is `name`, for error messages.

    report: called with each message for the user. Errors: ValueError and OSError, as in `explained`.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        message = "no such directory here; names of the Hugging Face Hub"
        raise ValueError(f"{flag} {name}: {message}: {needs_library()}") from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # `report` replaces huggingface_hub's log
    with explained(flag, name):
        files, commit = _listed(flag, name, kind, report)
        missing = [file for file in files if not _is_cached(name, kind, file.path, commit)]
        if missing and commit is not None:
            _check_room(flag, name, kind, missing, report)
            for file in missing:
                if file.lfs is not None and LARGE <= file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                    _fetch(name, kind, file, commit, report)
        cached = commit is None or not missing
        folder = Path(
            snapshot_download(
                name.repository,
                repo_type=_repository_kind(kind),
                revision=commit if cached and commit is not None else name.revision,
                allow_patterns=[_literally(file.path) for file in files],
                local_files_only=cached,
            )
        )
    return Fetched(folder, sorted(folder / file.path for file in files))


def _repository_kind(kind: Kind) -> str:
    return "dataset" if kind == "dataset" else "model"


def _literally(path: str) -> str:
    """Return a pattern that matches only `path`."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


def _listed(flag: str, name: HubName, kind: Kind, report: Report) -> tuple[list[RepoFile], str | None]:
    """Return (files to fetch, commit of the revision), as listed by the Hub. If the Hub is unreachable, the files are
    listed from the cache, and the commit is returned as None."""
    from huggingface_hub import HfApi, constants, errors, get_cached_repo_tree
    from huggingface_hub.hf_api import RepoFile

    repository, repository_kind = name.repository, _repository_kind(kind)
    commit: str | None = None
    try:
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1")
        commit = HfApi().repo_info(repository, revision=name.revision, repo_type=repository_kind).sha
        tree = HfApi().list_repo_tree(repository, recursive=True, revision=commit, repo_type=repository_kind)
        listed = [file for file in tree if isinstance(file, RepoFile)]
    except (errors.HTTPError, ConnectionError) as error:
        # If the Hub refuses access or lacks the repository, cached files must not hide the error.
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            raise
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE=1"
        elif isinstance(error, errors.HfHubHTTPError):
            reason = f"{constants.ENDPOINT}: {detail}"
        else:
            reason = f"{constants.ENDPOINT} cannot be reached: {detail}"
        try:
            listed = get_cached_repo_tree(repository, repo_type=repository_kind, revision=name.revision)
        except (errors.CachedRepoTreeNotFoundError, errors.EntryNotFoundError):
            cache = constants.HF_HUB_CACHE
            raise ValueError(f"{flag} {name}: no such directory, and it is not in {cache}; {reason}") from None
        report(f"{name}: as it is in {constants.HF_HUB_CACHE}; the Hub was not asked ({reason})")
    try:
        selected = set(chosen([file.path for file in listed], name, kind))
    except ValueError as error:
        raise ValueError(f"{flag} {name}: {error}") from None
    return [file for file in listed if file.path in selected], commit


def _is_cached(name: HubName, kind: Kind, path: str, commit: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(
        name.repository, path, revision=commit or name.revision, repo_type=_repository_kind(kind)
    )
    return isinstance(cached, str)


def _check_room(flag: str, name: HubName, kind: Kind, missing: Sequence[RepoFile], report: Report) -> None:
    """Report the number of bytes to fetch, and check that they fit on the disk. Errors: ValueError if the disk has too
    little free space."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    size = sum(max(0, file.size - _on_disk(name, kind, file)) for file in missing)
    report(f"{name}: {format_size(size)} in {len(missing)} files are fetched into {cache}")
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size + SPARE > free:
        raise ValueError(
            f"{flag} {name}: its {format_size(size)} do not fit: {place} has {format_size(free)} free; "
            "HF_HOME names another place"
        )


def _on_disk(name: HubName, kind: Kind, file: RepoFile) -> int:
    """Number of bytes of a large file that an earlier call or another process has already fetched."""
    paths = () if file.lfs is None else _in_cache(name, kind, file.lfs.sha256)
    return next((path.stat().st_size for path in paths if path.exists()), 0)


def _in_cache(name: HubName, kind: Kind, digest: str) -> tuple[Path, Path]:
    """Return the paths in the cache for a large file: (complete file, partial file)."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type=_repository_kind(kind))
    return folder / "blobs" / digest, folder / "blobs" / f"{digest}.mega-part"


def format_size(count: int) -> str:
    """
    >>> format_size(5_263_000_000), format_size(1_500), format_size(3)
    ('5.3 GB', '1.5 kB', '3 bytes')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def _fetch(name: HubName, kind: Kind, file: RepoFile, commit: str, report: Report) -> None:
    """Fetch a large file, and store it in the cache under its hash, so that huggingface_hub finds the file.

    Errors: OSError if the hash differs from the Hub's hash; the damaged file is removed.
    """
    from huggingface_hub import hf_hub_url

    assert file.lfs is not None
    blob, part = _in_cache(name, kind, file.lfs.sha256)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _alone(part) as stream:
        if blob.exists():  # another process has fetched the file
            return
        url = hf_hub_url(name.repository, file.path, repo_type=_repository_kind(kind), revision=commit)
        _pull(url, file, stream, report)
        stream.seek(0)
        if hashlib.file_digest(stream, "sha256").hexdigest() != file.lfs.sha256:
            part.unlink()
            raise OSError(f"{name}: {file.path}: what came is damaged (sha256), and was removed; try again")
        os.fsync(stream.fileno())
        os.replace(part, blob)


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[BufferedRandom]:
    """Open a partial file and lock it exclusively. If another process holds the lock, wait until the lock is
    released."""
    while True:
        with part.open("ab+") as stream:
            while not locked_alone(stream.fileno()):
                time.sleep(PAUSE)
            if os.fstat(stream.fileno()).st_nlink:  # st_nlink is 0 if another process has removed the file
                yield stream
                return


def _pull(url: str, file: RepoFile, stream: BufferedRandom, report: Report) -> None:
    """Append the missing bytes of a file. Reconnect whenever the connection is lost."""
    from huggingface_hub import errors
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    tries = 0
    while True:
        start = stream.seek(0, os.SEEK_END)
        # A partial file that is longer than the complete file is corrupt.
        if start > file.size:
            stream.truncate(0)
            start = 0
        try:
            http_get(
                url,
                stream,
                resume_size=start,
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.path,
                _nb_retries=0,
            )
            return
        except errors.HfHubHTTPError:
            raise
        except errors.HTTPError:
            stream.flush()
            received = stream.seek(0, os.SEEK_END)
            tries = 0 if received > start else tries + 1
            if tries >= TRIES:
                raise
            if received > start:
                report(
                    f"{file.path}: the connection was cut after {format_size(received)} of {format_size(file.size)}; "
                    "it is continued"
                )
            time.sleep(PAUSE)
