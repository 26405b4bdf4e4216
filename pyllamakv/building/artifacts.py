"""Collect the files of a build, and publish them as a variant in one step."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import variant
from pyllamakv.building.manifest import Manifest
from pyllamakv.errors import BuildError
from pyllamakv.home import shim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyllamakv.building.variant import BuildRequest, Variant


@dataclass(frozen=True)
class Source:
    """The tree to compile, and its origin."""

    commit: str
    tree: str
    patches: tuple[str, ...]
    digest: str
    carried: dict[str, str] = field(default_factory=dict)


def publish(wanted: BuildRequest, source: Source, name: str, spent: float) -> Variant:
    """Copy the results into ``built/`` under a passing name, and rename when all is there."""
    target = variant.built() / name
    stage = variant.built() / f".{name}.{os.getpid()}.part"
    for old in (*variant.built().glob(f".{name}.*.part"), target):
        shutil.rmtree(old, ignore_errors=True)
    (stage / "lib").mkdir(parents=True)
    try:
        made = collect(wanted.objects)
        shutil.copy2(made.library, stage / made.library.name)
        for path in made.dropin:
            shutil.copy2(path, stage / "lib" / path.name, follow_symlinks=False)
        _describe(wanted, source, name, spent, made).save(stage)
        stage.rename(target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return variant.Variant(target)


@dataclass(frozen=True)
class BuildArtifacts:
    """The files of a finished build, and the results of the compile probes."""

    library: Path
    dropin: tuple[Path, ...]
    abi: int
    probes: dict[str, str | None]


def collect(folder: Path) -> BuildArtifacts:
    """Find the files of a build: library, drop-in libraries, and results of probes."""
    library = next((path for path in _shared(folder) if path.name.startswith("libplk.")), None)
    if library is None:
        raise BuildError(f"expected libplk in {folder}, found none; see {folder / 'build.log'}")
    try:
        raw = json.loads((folder / "plk-capabilities.json").read_text(encoding="utf-8"))
        groups: Mapping[str, str | None] = raw["groups"]
        probes = {str(key): None if value is None else str(value) for key, value in groups.items()}
        abi = int(raw.get("abi", 0)) or _abi()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"expected the results of the probes in {folder}/plk-capabilities.json: {error}"
        ) from error
    return BuildArtifacts(library, tuple(_shared(folder / "dropin")), abi, probes)


def _shared(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.glob("lib*")
        if path.suffix in {".so", ".dylib"} or ".so." in path.name
    )


def _abi() -> int:
    header = shim() / "plk.h"
    for line in header.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:2] == ["#define", "PLK_ABI"]:
            return int(words[2])
    raise BuildError(f"expected `#define PLK_ABI` in {header}")


def _describe(
    wanted: BuildRequest, source: Source, name: str, spent: float, made: BuildArtifacts
) -> Manifest:
    with made.library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Manifest(
        variant=name,
        release=wanted.release.name,
        commit=wanted.release.commit,
        tree=wanted.release.tree,
        patched_tree=source.tree,
        patches=source.patches,
        series_digest=source.digest,
        carried=source.carried,
        backend=wanted.backend.name,
        options=wanted.backend.options,
        compiler=wanted.compiler.identity,
        cpu_flags=wanted.cpu_flags,
        abi=made.abi,
        library=made.library.name,
        library_sha256=digest,
        dropin=tuple(path.name for path in made.dropin),
        capabilities=tuple(sorted(key for key, value in made.probes.items() if value)),
        probes=made.probes,
        devices=wanted.backend.devices,
        machine=os.uname().machine,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu_seconds=round(spent, 1),
    )
