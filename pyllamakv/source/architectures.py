"""Find the pinned releases that know a model architecture.

``architectures.toml`` beside the lock lists, by release, the architectures that no older pinned
release knows. `pyllamakv upstream add --pin` and the branches of `matrix watch` write it from the
trees in the store.
"""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

from pyllamakv.errors import LockFileError
from pyllamakv.home import data
from pyllamakv.source import lockfile, verified
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release
    from pyllamakv.source.store import Store

_NAME = "architectures.toml"
_HEAD = """\
# The architectures that each pinned release knows and no older one: LLM_ARCH_NAMES of llama.cpp.
# Written by `pyllamakv upstream add --pin`.
"""
#: Releases before the split of the sources have the names in the second file.
_FILES = ("src/llama-arch.cpp", "src/llama.cpp")
_NAMES = re.compile(r"LLM_ARCH_NAMES = \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r'^\s*\{\s*LLM_ARCH_\w+\s*,\s*"([\w.-]+)"', re.MULTILINE)


def shipped() -> Path:
    """Return the path of the table that ships with the package."""
    return data("vendor") / _NAME


def read(store: Store, release: Release | str) -> set[str]:
    """Return the names of the architectures that a fetched release, or a tree, knows."""
    files = store.read_many(release, _FILES)
    text = "\n".join((data or b"").decode("utf-8", "replace") for data in files.values())
    found = _NAMES.search(text)
    return set(_ENTRY.findall(found[1])) if found else set()


def load(path: Path) -> dict[str, str]:
    """Return the first pinned release of each architecture. Raises LockFileError."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        return {name: release for release, names in table.items() for name in names}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        msg = f"cannot read the architectures in {path}: {error}"
        raise LockFileError(msg) from error


def add(lock: Path, store: Store, release: Release) -> None:
    """Add the architectures of a release of a lock to the table beside it, in any order."""
    path = lock.with_name(_NAME)
    known = {each.name: each for each in lockfile.load(lock)}
    table = load(path)
    for name in read(store, release):
        if name not in table or known[table[name]].order > release.order:
            table[name] = release.name
    by_release: dict[str, list[str]] = {}
    for name, first in sorted(table.items()):
        by_release.setdefault(first, []).append(name)
    lines = [_HEAD]
    for first in sorted(by_release, key=lambda each: known[each].order):
        lines.append(f'"{first}" = [')
        lines += [f'  "{name}",' for name in by_release[first]]
        lines.append("]")
    write_text_atomic(path, "\n".join(lines) + "\n")


def remedy(architecture: str, *, server: bool = False) -> str:
    """Return which release to use for an architecture that a library or a server does not know."""
    known = lockfile.known()
    first = known.get(load(shipped()).get(architecture, ""))
    if first is None:
        return "no pinned release knows it; `pyllamakv upstream list --new` lists newer releases"
    for release in verified.releases():
        if release.order >= first.order:
            name = release.name
            use = (
                f"{name} --server` and use {name}" if server else f"{name}` and open {name}+patched"
            )
            return f"{name} knows it: run `pyllamakv build {use}"
    return (
        f"{first.name} knows it but is not verified: `pyllamakv check {first.name}` builds and "
        "verifies it"
    )
