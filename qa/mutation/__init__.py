"""Mutation testing of the shipped patches: a scenario or header test must detect each mutant.

Mutants of every patch of a series are built and tested one after another, in random order, until
the time is up; results are stored in the data directory. A mutant that passes everything is a
defect, unless ``qa/mutation/equivalent.toml`` states why no test can detect it.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import variant
from pyllamakv.building.build import build
from pyllamakv.errors import HarnessError
from pyllamakv.home import home
from pyllamakv.patching import apply, series, trees
from pyllamakv.source import releases, spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery
from pyllamakv.verification.header_tests import HEADERS
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.mutation import equivalent_mutants, header_tests, mutant_schemata, mutation_run
from qa.mutation.mutant import HUNK, Made, Mutant, make
from qa.mutation.mutant_builder import MutantBuilder
from qa.mutation.mutant_evaluation import MutantEvaluator
from qa.mutation.scenario_runs import SchemataLibrary

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant
    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.series import Series
    from pyllamakv.source.releases import Release

#: One per era, and 0.3.12; the default first. Others are tested if they are named, or in a long run
#: if they are built.
RELEASES = ("0.3.9", "0.3.36", "b6845", "0.3.16", "0.3.12", "0.3.14", "b4980", "0.3.8", "0.3.5")

#: From this time limit in seconds, every mutant of every built release is tested, until the time is
#: up.
LONG = 900.0

#: Number of mutants of a patch in a shorter run, independent of the machine's speed.
SIZED = 4

#: Minimum seconds of each patch, however long its preparation took.
_LEAST = 15.0

#: The entry that checks whether the mutants listed as equivalent still exist.
ACCEPTED = "accepted"


def names() -> tuple[str, ...]:
    """Return the names of entries: each release with each patch of the series."""
    patches = series.load().order
    return (*(f"{name} {patch}" for name in RELEASES for patch in patches), ACCEPTED)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Test mutants of every patch of each release of `RELEASES`; an entry is ``0.3.9 full-defrag``.

    Builds the patched variant if it is missing, because its objects are reused.
    """
    shipped, known = series.load(), equivalent_mutants.load()
    long = effort.seconds >= LONG
    found: list[Entry] = []
    end = time.monotonic() + effort.seconds
    wanted = [
        (name, [p.id for p in shipped if effort.wants(f"{name} {p.id}")])
        for name in RELEASES
        if effort.only
        or name == releases.TEST_RELEASE
        or (long and variant.find(f"{name}+patched") is not None)
    ]
    wanted = [(name, patches) for name, patches in wanted if patches]
    for number, (name, patches) in enumerate(wanted):
        later = sum(len(each) for _, each in wanted[number + 1 :])
        tick(f"{name}: preparing")
        with prepare_release(name, shipped, effort.jobs) as prepared:
            given = prepared.patched.patches
            if effort.only:
                none = f"the series does not have this patch on {name}"
                lack = [f"{name} {patch}" for patch in patches if patch not in given]
                found += [skipped_entry(mutation_run.SECTION, each, none) for each in lack]
            patches = [patch for patch in patches if patch in given]
            for done, patch in enumerate(patches):
                # Unused time of one patch is available to the others.
                now, left = time.monotonic(), len(patches) - done + later
                what = f"{name} {patch}"
                tally = mutation_run.run(
                    prepared.made[patch],
                    known,
                    prepared.evaluators(shipped.definition(patch).scenarios),
                    seed=effort.seed,
                    deadline=now + max((end - now) / left, _LEAST),
                    most=None if long or effort.only else SIZED,
                    tick=functools.partial(_about, tick, what),
                )
                found.append(tally.entry(what, effort.seed))
    if effort.wants(ACCEPTED):
        found.append(_accepted(known, shipped))
    return found


def _about(tick: Tick, what: str, about: str) -> None:
    tick(f"{what} {about}")


def _accepted(known: tuple[equivalent_mutants.EquivalentMutant, ...], shipped: Series) -> Entry:
    stale = equivalent_mutants.stale(known, shipped)
    defects = tuple(
        f"{each} is listed as equivalent, but no patch has this mutant" for each in stale
    )
    return Entry(mutation_run.SECTION, ACCEPTED, {"equivalent": str(len(known))}, defects)


@dataclass(frozen=True)
class MutationSetup:
    """The objects that all patches of a release share."""

    release: Release
    patched: PatchedRelease
    variant: Variant
    builders: tuple[MutantBuilder, ...]
    header_tests: dict[str, header_tests.HeaderTest]
    made: dict[str, Made]
    switched: SchemataLibrary | None
    stock: Variant | None

    def evaluators(self, own: tuple[str, ...]) -> list[MutantEvaluator]:
        """Return an evaluator per builder, for a patch with its scenarios."""
        every = list(discovery.discover().values())
        return [
            MutantEvaluator(
                self.variant, shop, every, own, self.header_tests, self.switched, self.stock
            )
            for shop in self.builders
        ]


@contextlib.contextmanager
def prepare_release(name: str, shipped: Series, jobs: int = 1) -> Iterator[MutationSetup]:
    """Prepare a release: build it patched, and open builders in a temporary directory."""
    spec = f"{name}+patched"
    built = build(spec)
    release, store = spec_resolver.resolve(name), open_store()
    patched = apply.apply(release, series=shipped, store=store)
    if built.manifest.patched_tree != patched.tree:
        msg = f"{built.id} was built from other patches: run pyllamakv build {spec}"
        raise HarnessError(msg)
    tree = trees.StoreTree(store, patched.tree)
    parent = home() / "objects"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"mutants-{release.key}-", dir=parent) as folder:
        shops = tuple(MutantBuilder(Path(folder) / str(job), spec, patched) for job in range(jobs))
        made = {patch: make(store, release, patched, patch) for patch in patched.patches}
        logic = dict(header_drivers(tree))
        library = _switched(shops[0], [m for each in made.values() for m in each.mutants], tree)
        for header, driver in logic.items():
            if library is not None and header in library.files:
                driver.switch(library.files[header])
        stock = variant.find(f"{name}+stock")
        yield MutationSetup(release, patched, built, shops, logic, made, library, stock)


def _switched(
    shop: MutantBuilder, mutants: Sequence[Mutant], tree: trees.StoreTree
) -> SchemataLibrary | None:
    """Build the library that contains all mutants."""
    files = {}
    for path in {each.file for each in mutants if each.operator != HUNK}:
        entry = tree.entry(path)
        if entry is not None and mutant_schemata.CPP.match(path):
            files[path] = entry.data
    found = shop.switched(
        lambda refused: mutant_schemata.build_schemata(mutants, files, refused),
        shop.folder / "switched",
    )
    return SchemataLibrary.of(*found, shop.objects.name) if found else None


def header_drivers(tree: trees.StoreTree) -> Iterator[tuple[str, header_tests.HeaderTest]]:
    """Return the tests of the headers that a tree has, by path."""
    for header in HEADERS:
        entry, source = tree.entry(header.path), header.source
        if entry is not None and source is not None:
            needs = {Path(path).name: tree.entry(path) for path in header.needs}
            beside = {name: each.data for name, each in needs.items() if each is not None}
            yield header.path, header_tests.HeaderTest(header, entry.data, source, beside)
