"""Semantic mutation testing: hand-written slips of a maintainer, each in a patch of a release.

The slips are in ``slips.toml``. Each is built, and must be detected by a header test or by a
scenario in a quick setting, as `check --quick` runs it. One that passes everything is a defect, and
so is one that does not compile or changes no code.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import variant
from pyllamakv.building.build import build
from pyllamakv.errors import HarnessError, PatchFormatError
from pyllamakv.home import home
from pyllamakv.patching import apply, series, strict_toml, trees
from pyllamakv.source import releases, spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.mutation import header_drivers
from qa.mutation.mutant import Mutant
from qa.mutation.mutant_builder import MutantBuilder
from qa.mutation.mutant_evaluation import MutantEvaluator
from qa.mutation.mutant_results import MutantResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.series import Series

SECTION = "semantic_mutation"

#: The shipped slips.
FILE = Path(__file__).with_name("slips.toml")

#: Number of slips of a patch that run whatever the time limit is.
LEAST = 1

#: From this time limit in seconds, the slips of every built release are tested.
LONG = 900.0

#: Maximum seconds of one slip: all quick scenarios take less.
_PATIENCE = 600.0

_KEYS = {"id", "patch", "kind", "releases", "was", "now"}


@dataclass(frozen=True)
class Slip:
    """A mistake in a patch: ``was``, which occurs once in its files, is replaced by ``now``."""

    id: str
    patch: str
    kind: str
    releases: tuple[str, ...]
    was: str
    now: str

    def apply(self, files: Mapping[str, bytes]) -> Mutant:
        """Return the mutant of the patched files; raises HarnessError unless ``was`` occurs once.

        Line ends of the files stay unchanged.
        """
        was = self.was.encode()
        places = [(path, data.count(was)) for path, data in files.items() if was in data]
        if sum(n for _, n in places) != 1:
            found = ", ".join(f"{path} ({n})" for path, n in places) or "no file"
            msg = f"slip {self.id} of {self.patch}: expected its text once, found it in {found}"
            raise HarnessError(msg)
        path, data = places[0][0], files[places[0][0]]
        line = data[: data.index(was)].count(b"\n") + 1
        changed: dict[str, bytes | None] = {path: data.replace(was, self.now.encode())}
        return Mutant(self.patch, path, line, f"{self.kind}: {self.id}", files=changed)


def load(path: Path = FILE) -> tuple[Slip, ...]:
    """Read the file; raises PatchFormatError for a slip that a release has twice."""
    table = strict_toml.load(path, {"schema", "slip"}, schema=1)
    found = tuple(
        Slip(
            part.string("id"),
            part.string("patch"),
            part.string("kind"),
            part.strings("releases"),
            part.string("was"),
            part.string("now", ""),
        )
        for part in table.tables("slip", _KEYS)
    )
    names = Counter((release, each.patch, each.id) for each in found for release in each.releases)
    twice = next((name for name, n in names.items() if n > 1), None)
    if twice:
        msg = f"{path}: {' '.join(twice)} is defined twice"
        raise PatchFormatError(msg, str(path))
    return found


def names() -> tuple[str, ...]:
    """Return the names of the entries: each release with each patch that has slips there."""
    return tuple(_by_entry(load()))


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Test the slips of every patch; an entry is ``0.3.9 full-defrag``.

    A short run tests the test release, and a long one all that are built; ``only`` builds the
    named ones. Results are stored, and cost no time when nothing changed.
    """
    shipped = series.load()
    wanted = {name: slips for name, slips in _by_entry(load()).items() if effort.wants(name)}
    found: list[Entry] = []
    end = time.monotonic() + effort.seconds
    for release in dict.fromkeys(name.split()[0] for name in wanted):
        own = {name: slips for name, slips in wanted.items() if name.split()[0] == release}
        if not (effort.only or release == releases.TEST_RELEASE):
            built = variant.find(f"{release}+patched") is not None
            if effort.seconds < LONG or not built:
                why = "a short run" if built else f"{release} is not built"
                found += [skipped_entry(SECTION, name, why) for name in own]
                continue
        tick(f"{release}: preparing")
        with _prepared(release, shipped) as (patched, evaluator):
            for name, slips in own.items():
                patch = name.split()[1]
                evaluator.own = shipped.definition(patch).scenarios
                files = patched_files(patched, patch)
                mutants = [each.apply(files) for each in slips]
                random.Random(effort.seed).shuffle(mutants)
                found.append(entry_of(name, run(mutants, evaluator, end, tick), effort.seed))
    return found


def _by_entry(slips: Iterable[Slip]) -> dict[str, list[Slip]]:
    """Return the slips by entry, the test release first, then in the order of the file."""
    found: dict[str, list[Slip]] = {}
    for slip in slips:
        for release in slip.releases:
            found.setdefault(f"{release} {slip.patch}", []).append(slip)
    first = [name for name in found if name.split()[0] == releases.TEST_RELEASE]
    return {name: found[name] for name in [*first, *found]}


@contextlib.contextmanager
def _prepared(name: str, shipped: Series) -> Iterator[tuple[PatchedRelease, MutantEvaluator]]:
    """Open a builder of a patched release in a temporary directory, with its evaluator."""
    built = build(f"{name}+patched")
    release, store = spec_resolver.resolve(name), open_store()
    patched = apply.apply(release, series=shipped, store=store)
    if built.manifest.patched_tree != patched.tree:
        msg = f"{built.id} was built from other patches: run pyllamakv build {name}"
        raise HarnessError(msg)
    scenarios = list(discovery.discover().values())
    drivers = dict(header_drivers(trees.StoreTree(store, patched.tree)))
    parent = home() / "objects"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"slips-{release.key}-", dir=parent) as folder:
        builder = MutantBuilder(Path(folder), f"{name}+patched", patched)
        stock = variant.find(f"{name}+stock")
        yield (
            patched,
            MutantEvaluator(built, builder, scenarios, (), drivers, stock=stock, quick=True),
        )


def patched_files(patched: PatchedRelease, patch: str) -> dict[str, bytes]:
    """Return the files of the patched tree that a patch touches."""
    tree = trees.StoreTree(open_store(), patched.tree)
    port = next((each for each in patched.ports if each.id == patch), None)
    if port is None:
        msg = f"{patch} does not apply to {patched.release}: correct the releases of its slips"
        raise HarnessError(msg)
    entries = {path: tree.entry(path) for path in port.patch.paths}
    return {path: entry.data for path, entry in entries.items() if entry is not None}


def run(
    mutants: Sequence[Mutant], evaluator: MutantEvaluator, end: float, tick: Tick
) -> list[tuple[Mutant, MutantResult]]:
    """Test mutants until the deadline of the monotonic clock, at least `LEAST` of them."""
    found: list[tuple[Mutant, MutantResult]] = []
    tried = 0
    for mutant in mutants:
        result = evaluator.recall(mutant)
        if result is None:
            if tried >= LEAST and time.monotonic() > end:
                continue
            tick(f"{len(found)} of {len(mutants)}: {mutant}")
            result = evaluator.answer(mutant, time.monotonic() + _PATIENCE)
            tried += 1
        found.append((mutant, result))
    return found


def entry_of(name: str, results: Sequence[tuple[Mutant, MutantResult]], seed: int) -> Entry:
    """Return the row of an entry; a slip that no test detects is a defect."""
    count = Counter(result.outcome for _, result in results)
    caught = count["driver"] + count["scenario"]
    catchers = Counter(result.by for _, result in results if result.outcome == "scenario")
    row = {
        "tried": str(len(results)),
        "caught": f"{caught} of {len(results)}",
        "by header tests": str(count["driver"]),
        "by scenarios": str(count["scenario"]),
        "caught most": ", ".join(f"{by} {n}" for by, n in catchers.most_common(3)),
    }
    about = {
        "compiler": "does not compile",
        "same code": "changes no code",
        "survivor": "is not detected",
    }
    defects = tuple(
        f"{mutant} {about.get(result.outcome, result.outcome)} {result.message}".strip()
        for mutant, result in results
        if result.outcome not in ("driver", "scenario")
    )
    by = {mutant.operator: result.by for mutant, result in results}
    return Entry(SECTION, name, row, defects, seed, {**count, "by": by})
