"""Load the series: which patches there are, and in which order they are applied."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyllamakv import home
from pyllamakv.errors import PatchFormatError, UnknownPatch
from pyllamakv.patching import definition, strict_toml
from pyllamakv.source import lockfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyllamakv.patching.definition import Definition

_KEYS = {"schema", "order", "scenarios"}


@dataclass(frozen=True)
class Series:
    """Patches in the order of their application.

    ``definitions`` change the libraries. ``server`` change only llama-server: they are applied
    after the others when a server is built, and are no part of a variant. ``scenarios`` are those
    that the series claims as a whole, besides those of its patches.
    """

    definitions: tuple[Definition, ...]
    folder: Path | None = None
    server: tuple[Definition, ...] = ()
    scenarios: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Definition]:
        return iter(self.definitions)

    def __len__(self) -> int:
        return len(self.definitions)

    @property
    def order(self) -> tuple[str, ...]:
        """Return the ids of the patches of the libraries, in order."""
        return tuple(patch.id for patch in self.definitions)

    @property
    def lock(self) -> Path | None:
        """Return the lock file with the git commits that ports are for, if there may be one."""
        there = self.folder is not None and (self.folder / "series.toml").is_file()
        return self.folder / lockfile.SERIES_LOCK if self.folder and there else None

    @property
    def every(self) -> Series:
        """Return the series with the patches of the server as ordinary ones."""
        return replace(self, definitions=(*self.definitions, *self.server), server=())

    @property
    def digest(self) -> str:
        """Return the sha256 of everything that determines where and how the patches apply."""
        facts = [
            (each.id, each.covered, each.requires, each.scenarios, each.target, each.carry)
            for each in self.every
        ]
        ports = [
            (port.id, port.base, port.markers, port.requires, port.patch.data)
            for each in self.every
            for port in each.ports
        ]
        return hashlib.sha256(repr((self.scenarios, facts, ports)).encode()).hexdigest()

    def including(self, ids: Iterable[str]) -> Series:
        """Return the series, with the patches of the server as ordinary ones if ``ids`` has one.

        Raises UnknownPatch.
        """
        targets = {self.definition(id_).target for id_ in ids}
        return self.every if "server" in targets else self

    def definition(self, id: str) -> Definition:
        """Return a patch by its id; raise UnknownPatch with the closest ids."""
        every = self.every
        for patch in every:
            if patch.id == id:
                return patch
        known = every.order
        if "/" in id or id.endswith((".patch", ".diff")):
            msg = (
                f"{id} is a file, not the id of a patch: add it with `pyllamakv patch import {id}`"
            )
            raise UnknownPatch(msg, id)
        close = difflib.get_close_matches(id, known, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
        raise UnknownPatch(f"There is no patch {id!r}; {hint}", id, close)


def load(folder: Path | None = None, *, missing_ok: bool = False) -> Series:
    """Read the shipped series, or the one in a folder of the same shape.

    With ``missing_ok``, ports whose file is not written yet are empty.
    """
    folder = folder or home.data("patches")
    table = strict_toml.load(folder / "series.toml", _KEYS, schema=1)
    order = table.strings("order", ())
    twice = sorted({id_ for id_ in order if order.count(id_) > 1})
    if twice:
        raise table.wrong(f"{twice[0]} occurs twice in the order")
    strange = [id_ for id_ in order if not definition.ID.fullmatch(id_)]
    if strange:
        raise table.wrong(
            f"{strange[0]!r} is not an id: expected a-z, 0-9 and -, at most 60 of them"
        )
    missing = [id_ for id_ in order if not (folder / id_ / "patch.toml").is_file()]
    if missing:
        raise table.wrong(f"{missing[0]} has no file {missing[0]}/patch.toml")
    definitions = tuple(definition.load(folder / id_, missing_ok=missing_ok) for id_ in order)
    before: set[str] = set()
    for patch in definitions:
        for required in {id_ for port in patch.ports for id_ in port.requires} - before:
            # A series of the user may require patches of the shipped one.
            if required not in order and folder != home.data("patches") and required in _shipped():
                continue
            raise PatchFormatError(
                f"{patch.id} requires {required}, which must come before it in the series.",
                str(folder / "series.toml"),
            )
        before.add(patch.id)
    served = {patch.id for patch in definitions if patch.target == "server"}
    for patch in definitions:
        wrong = served.intersection(id_ for port in patch.ports for id_ in port.requires)
        if patch.id not in served and wrong:
            raise PatchFormatError(
                f"{patch.id} changes the libraries and requires {min(wrong)}, which changes "
                "llama-server: remove the requirement, or set target to server.",
                str(folder / "series.toml"),
            )
    library = tuple(patch for patch in definitions if patch.target == "library")
    server = tuple(patch for patch in definitions if patch.target == "server")
    return Series(library, folder, server, table.strings("scenarios", ()))


def _shipped() -> tuple[str, ...]:
    table = strict_toml.load(home.data("patches") / "series.toml", _KEYS, schema=1)
    return table.strings("order", ())
