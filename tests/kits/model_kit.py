"""A lock file with one small model, and the wheel that contains it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from source_kit import index_page, serving

from pyllamakv.models import catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from source_kit import Server

NAME, PROJECT, MEMBER = "little-1m", "llm-little", "llm_little/little.gguf"
WHEEL = "llm_little-1.0-py3-none-any.whl"
#: Random bytes, so that the wheel is about as large as the content.
CONTENT = b"GGUF" + b"".join(hashlib.sha256(bytes([n])).digest() * 40 for n in range(200))
SHA256 = hashlib.sha256(CONTENT).hexdigest()
#: The definition is in `pyllamakv.content_digest`: one chunk.
DIGEST = hashlib.sha256(
    b"pyllamakv content 1\n" + len(CONTENT).to_bytes(8, "little") + bytes.fromhex(SHA256)
).hexdigest()


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """Write a wheel with these members."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return folder / WHEEL


def pin(folder: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path) -> catalog.PinnedModel:
    """Replace the shipped lock file by one with the small model in this wheel."""
    facts = {
        "name": NAME,
        "description": "a file for tests",
        "licence": "MIT",
        "package": PROJECT,
        "package_version": "1.0",
        "wheel": WHEEL,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": MEMBER,
        "sha256": SHA256,
        "digest": DIGEST,
    }
    lines = ["version = 1", "[[model]]", *(f'{key} = "{value}"' for key, value in facts.items())]
    lock = folder / "models.lock.toml"
    lock.write_text("\n".join([*lines, f"size = {len(CONTENT)}"]), encoding="utf-8")
    monkeypatch.setattr(catalog, "LOCK", lock)
    return catalog.known()[NAME]


class Offer:
    """A package index that offers a wheel; `offer_wheel` creates it."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        members: dict[str, bytes],
    ) -> None:
        self.server = server
        self.wheel = write_wheel(folder, members)
        self.model = pin(folder, monkeypatch, self.wheel)
        monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
        self.publish()

    def publish(self, *, stated: bool = True) -> None:
        """Offer the present bytes of the wheel, with or without their hash on the page."""
        index_page(self.server, self.wheel, stated=stated, project=PROJECT)

    @property
    def downloads(self) -> list[str | None]:
        """Return the requested range of each request for the wheel."""
        return [part for path, part in self.server.asked if path.endswith(".whl")]


def offer_wheel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes] | None = None
) -> Iterator[Offer]:
    """Serve an index with the wheel of the small model; call `source_kit.isolate` before."""
    code = {"llm_little/__init__.py": b"raise SystemExit('nothing of a wheel may run')"}
    with serving({}) as server:
        yield Offer(server, folder / "wheels", monkeypatch, members or {MEMBER: CONTENT} | code)
