"""Describe a built variant in one file, and check the library and the machine against it.

This is the only module of the building layer that the binding reads; it imports nothing of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import CpuFeaturesMissing, LoadError, ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Format version; a manifest of another version is refused.
SCHEMA = 1

#: The name of the file in a variant's folder.
NAME = "manifest.json"

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Manifest:
    """The inputs, tools and capabilities of a variant.

    ``patched_tree`` equals ``tree`` if and only if the variant is stock. ``carried`` has the base
    of the port for each patch that was merged from another release. ``capabilities`` are the groups
    of the shim that compiled, and ``probes`` the section that was chosen for each (None:
    absent). ``cpu_flags`` are names in ``/proc/cpuinfo`` that the code may use. ``library`` is a
    file name, ``dropin`` are file names below ``lib/``. ``devices`` are the types of device in the
    library that can store K and V: ``CPU`` is host memory, the others have their own buffers. Times
    are in seconds, ``created`` in UTC.
    """

    variant: str
    release: str
    commit: str
    tree: str
    patched_tree: str
    patches: tuple[str, ...]
    series_digest: str
    backend: str
    options: dict[str, str]
    compiler: str
    cpu_flags: tuple[str, ...]
    abi: int
    library: str
    library_sha256: str
    dropin: tuple[str, ...] = ()
    carried: dict[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    probes: dict[str, str | None] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    machine: str = ""
    created: str = ""
    cpu_seconds: float = 0.0
    schema: int = SCHEMA

    @property
    def stock(self) -> bool:
        """Return whether the tree is upstream's, byte for byte."""
        return self.patched_tree == self.tree

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain JSON values."""
        return dataclasses.asdict(self)

    def save(self, folder: Path) -> Path:
        """Write the manifest into ``folder`` in one step, and return its path."""
        # Imported here, because the binding only reads manifests.
        from pyllamakv.source.files import write_text_atomic

        write_text_atomic(
            folder / NAME, json.dumps(self.to_json(), indent=2, sort_keys=True) + "\n"
        )
        return folder / NAME

    def check_library(self, folder: Path) -> Path:
        """Return the path of the library after comparing its sha256 with the manifest's.

        Raises ManifestError when the file is missing or was changed.
        """
        path = folder / self.library
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ManifestError(
                f"the manifest in {folder} names the library {self.library}, which cannot be read "
                f"({error.strerror}); build the variant again: pyllamakv build {self.release}"
            ) from error
        if found != self.library_sha256:
            raise ManifestError(
                f"{path} is not the library that its manifest describes: expected sha256 "
                f"{self.library_sha256}, found {found}; remove {folder} and build again"
            )
        return path

    def missing_flags(self, cpuinfo: Path = _CPUINFO) -> tuple[str, ...]:
        """Return the CPU features that this variant may use and this machine lacks.

        Without a list of features (not Linux), none is reported as missing.
        """
        here = machine_flags(cpuinfo)
        return tuple(flag for flag in self.cpu_flags if flag not in here) if here else ()

    def check_machine(self, machine: str = "", cpuinfo: Path = _CPUINFO) -> None:
        """Check that this machine's processor can run the library's code.

        Raises CpuFeaturesMissing with the features, or LoadError for another kind of processor.
        """
        here = machine or os.uname().machine
        if self.machine and self.machine != here:
            raise LoadError(
                f"variant {self.variant} was built for {self.machine}, this machine is {here}; "
                f"build it here: pyllamakv build {self.release}"
            )
        missing = self.missing_flags(cpuinfo)
        if missing:
            tuned = self.options.get("GGML_NATIVE") == "ON"
            where = "here, or elsewhere with --portable" if tuned else "here"
            raise CpuFeaturesMissing(
                f"variant {self.variant} uses CPU instructions that this machine lacks: "
                f"{', '.join(missing)}; build it {where}: pyllamakv build "
                f"{self.release}, which needs a C++ compiler and git",
                missing,
            )


def machine_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the CPU flags that the kernel reports, or an empty set where it reports none."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()


def load(path: Path) -> Manifest:
    """Read the manifest at ``path``: the file, or the folder of a variant.

    Raises ManifestError when it is missing, damaged, incomplete or of another schema.
    """
    file = path / NAME if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ManifestError(
            f"expected a manifest at {file}; a directory without one is not a built variant: "
            "build it with pyllamakv build"
        ) from error
    except (OSError, ValueError) as error:
        raise ManifestError(
            f"{file} is not a readable manifest ({error}); remove its directory and build again"
        ) from error
    return _parse(raw, file)


def _parse(raw: object, file: Path) -> Manifest:
    if not isinstance(raw, dict):
        raise ManifestError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    if raw.get("schema") != SCHEMA:
        raise ManifestError(
            f"{file}: expected schema {SCHEMA}, found {raw.get('schema')!r}; "
            "build the variant again with this version of pyllamakv"
        )
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Manifest):
        if item.name not in raw:
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise ManifestError(f"{file}: {item.name} is missing; build the variant again")
            continue
        kind = str(item.type)
        values[item.name] = _convert(raw[item.name], kind, f"{file}: {item.name}")
    library = values["library"]
    if library != Path(library).name or library in {"", ".", ".."}:
        raise ManifestError(f"{file}: library must be a file name, found {library!r}")
    return Manifest(**values)


def _convert(value: object, kind: str, where: str) -> object:
    if kind.startswith("tuple"):
        if isinstance(value, list) and _all_text(value):
            return tuple(value)
    elif kind.startswith("dict"):
        if isinstance(value, dict) and _all_text(v for v in value.values() if v is not None):
            return value
    elif kind == "float":
        if isinstance(value, int | float):
            return float(value)
    elif type(value).__name__ == kind:
        return value
    raise ManifestError(f"{where}: expected {kind}, found {value!r}; build the variant again")


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
