"""Read from a build how its sources are compiled, and how the library is linked."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qa import ninja

if TYPE_CHECKING:
    from pyllamakv.building.variant import BuildRequest

#: Enough to detect equal code, in half of the time of -O3.
_OPTIMIZED = "-O1"


@dataclass(frozen=True)
class Unit:
    """One compile command, its output, and the files of the tree that it reads.

    ``holds`` are the tree's sources in it: its own, those that a generated one includes, or none
    for a part of the shim.
    """

    source: str
    output: str
    words: tuple[str, ...]
    reads: frozenset[str]
    holds: frozenset[str]

    @property
    def ours(self) -> bool:
        """Return whether it is part of the shim."""
        return not self.holds


def units(wanted: BuildRequest, tree: Path) -> tuple[Unit, ...]:
    """Return the units of a build, with its tree replaced by a copy."""
    reads = _reads(wanted)
    root, found = wanted.tree, []
    text = (wanted.objects / "compile_commands.json").read_text(encoding="utf-8")
    for entry in json.loads(text):
        words = shlex.split(entry["command"].replace(str(root), str(tree)))
        if Path(words[0]).name in ("ccache", "sccache"):
            del words[0]
        at = words.index("-o") + 1
        output, words[at] = words[at], "{output}"
        words = [_OPTIMIZED if word in ("-O2", "-O3") else word for word in words]
        source = Path(entry["file"])
        read = reads.get(output, frozenset())
        if source.is_relative_to(root):
            name = source.relative_to(root).as_posix()
            holds = frozenset({name})
        else:
            name, holds = str(source), frozenset[str]()
        if source.is_relative_to(wanted.objects):
            # CMake's unity sources name each source by its path in the build's tree.
            own = tree.parent / "generated" / source.relative_to(wanted.objects)
            own.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            own.write_text(text.replace(str(root), str(tree)), encoding="utf-8")
            words = [str(own) if word == name else word for word in words]
            holds = frozenset(path for path in read if f'"{root / path}"' in text)
        found.append(Unit(name, output, tuple(words), read, holds))
    return tuple(found)


def linking(wanted: BuildRequest) -> list[str]:
    """Return the command that links the library, with another output name."""
    words = shlex.split(ninja.commands(wanted.objects)[-1])
    start, end = words.index("&&") + 1, len(words) - words[::-1].index("&&") - 1
    words = words[start:end]
    words[words.index("-o") + 1] = "{output}"
    return words


def _reads(wanted: BuildRequest) -> dict[str, frozenset[str]]:
    """Return the files that each object depends on."""
    root = wanted.tree
    return {
        output: frozenset(
            path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root)
        )
        for output, paths in ninja.reads(wanted.objects).items()
    }
