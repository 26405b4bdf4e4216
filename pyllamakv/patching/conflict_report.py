"""Report the patches that can neither be applied nor carried to a release.

Each conflict has its file, the hunk of the port, the lines of both sides, and the releases between
which upstream changed the lines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.patching import conflict_help, drift, port_comparison, status
from pyllamakv.patching import series as series_module
from pyllamakv.source import release_chain
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.drift import Drift
    from pyllamakv.patching.hunks import FilePatch, Hunk
    from pyllamakv.patching.port_choice import Manual, MergeConflict
    from pyllamakv.patching.series import Series
    from pyllamakv.patching.status import PatchStatus
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.release_chain import ChainLink
    from pyllamakv.source.releases import Release


@dataclass(frozen=True)
class HunkConflict:
    """A place where a patch conflicts with a release.

    ``hunk`` is counted from 1 in the port's changes to the file; it is 0 if no hunk of the port has
    the lines. ``line`` is counted from 1 in the release's file, with the
    earlier patches of the series. ``upstream``, ``base`` and
    ``patch`` are the lines of the release, of the port's base and of the patched base. Upstream
    changed them between ``changed_after`` and ``changed_in``. ``decision`` is the likely way to
    resolve the conflict, or empty.
    """

    file: str
    hunk: int
    function: str
    line: int
    upstream: tuple[str, ...]
    base: tuple[str, ...]
    patch: tuple[str, ...]
    changed_after: str
    changed_in: str
    decision: str = ""

    def __str__(self) -> str:
        words = [self.file]
        if self.hunk:
            # The end of a signature is the function's name.
            name = self.function.rsplit(" ", 1)[-1]
            words.append(f"hunk {self.hunk} in {name}" if name else f"hunk {self.hunk}")
        if self.line:
            words.append(f"line {self.line}")
        changed = drift.changed_text(self.changed_after, self.changed_in)
        likely = f"; likely: {self.decision}" if self.decision else ""
        return f"{', '.join(words)}: {changed}{likely}"


@dataclass(frozen=True)
class UncarriedPatch:
    """A patch that requires manual work on a release, with its conflicts.

    ``port`` is the base of the port that was tried.
    """

    id: str
    state: status.State
    port: str
    reason: str
    conflicts: tuple[HunkConflict, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return asdict(self)


def of_release(
    release: Release,
    *,
    series: Series | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[UncarriedPatch, ...]:
    """Return the patches of a series that require manual work on a release, in order."""
    store = store or open_store()
    series = series_module.load() if series is None else series
    bad = [one for one in status.of_release(release, series, store, progress) if one.bad]
    if not bad:
        return ()
    chain = release_chain.chain(store)
    found = []
    for one in bad:
        # The nearest port is the first; one with a conflict shows more than one without.
        tried = sorted(one.manual, key=lambda manual: not manual.conflicts)
        if tried and tried[0].conflicts:
            conflicts = tuple(_merged(one, tried[0], release, series, chain, store))
            patch = UncarriedPatch(one.id, one.state, tried[0].base, tried[0].reason, conflicts)
        elif one.state == "blocked":
            patch = UncarriedPatch(one.id, one.state, one.port, one.reason)
        else:
            (measured,) = drift.drift(release, [one.id], series=series, store=store)
            reason = tried[0].reason if tried else one.reason
            patch = UncarriedPatch(
                one.id, one.state, measured.base, reason, tuple(_strict(measured, release))
            )
        found.append(patch)
    return tuple(found)


def _merged(
    one: PatchStatus,
    manual: Manual,
    release: Release,
    series: Series,
    chain: Sequence[ChainLink],
    store: Store,
) -> Iterable[HunkConflict]:
    """Yield the conflicts of a merge, each with the hunk of the port that it comes from."""
    port = series.definition(one.id).port(manual.base)
    for conflict in manual.conflicts:
        file, number = _hunk(port, conflict)
        hunk = file.hunks[number - 1] if file and number else None
        after, changed = manual.base, release.name
        if file and hunk:
            found, before = drift.changed(port, file, hunk, release, chain, store)
            after, changed = (before, found) if found else (after, changed)
        yield HunkConflict(
            conflict.file,
            number,
            _function(hunk, conflict),
            conflict.line,
            conflict.upstream,
            conflict.base,
            conflict.patch,
            after,
            changed,
            conflict_help.decision(conflict.upstream, conflict.base, conflict.patch)
            if conflict.line
            else "",
        )


def _function(hunk: Hunk | None, conflict: MergeConflict) -> str:
    """Return the function of a conflict; the heading of a hunk may name the one before it."""
    heading = port_comparison.heading(hunk) if hunk else ""
    return heading if conflict.function in heading else conflict.function


def _strict(measured: Drift, release: Release) -> Iterable[HunkConflict]:
    """Yield the hunks that do not apply, of a patch that no merge was tried for."""
    for hunk in measured.bad:
        place = hunk.placement
        known = (hunk.changed_after, hunk.changed_in) if hunk.changed_in else ()
        after, changed = known or (measured.base, release.name)
        yield HunkConflict(
            place.file,
            place.hunk,
            hunk.function,
            place.line,
            tuple(place.found.splitlines()),
            tuple(place.expected.splitlines()),
            (),
            after,
            changed,
            "drop the hunk: upstream makes its change" if place.state == "already" else "",
        )


def _hunk(port: Port, conflict: MergeConflict) -> tuple[FilePatch | None, int]:
    """Return the part of a port for a conflict's file, and the hunk with most of its lines."""
    file = next((each for each in port.patch.files if each.path == conflict.file), None)
    if file is None:
        return None, 0
    # A file that one side deleted has no conflicting lines: its first hunk represents all.
    if not conflict.line:
        return file, min(1, len(file.hunks))
    shared = [_shared(hunk, conflict) for hunk in file.hunks]
    best = max(shared, default=0)
    return file, shared.index(best) + 1 if best else 0


def _shared(hunk: Hunk, conflict: MergeConflict) -> int:
    """Count the lines that a hunk and a conflict have in common."""
    old, new = set(_text(hunk.old)), set(_text(hunk.new))
    found = [line for line in conflict.base if line.strip() and line in old]
    return len(found) + len([line for line in conflict.patch if line.strip() and line in new])


def _text(lines: Iterable[bytes]) -> list[str]:
    return [line.decode("utf-8", "replace").rstrip("\r\n") for line in lines]
