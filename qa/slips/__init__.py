"""Hand-written slips of a maintainer, each in a patch of a release; a quick test must catch each.

The slips are in ``slips.toml``. The patched tree with one slip is built, and must fail a header
test or a scenario in a quick setting that the patched tree passes, as `check --quick` runs them.
Every hunk of the port of the test release is also left out once, which may be a compiler's error.
A slip in a patch of the server must fail a header test or a server scenario, and one in the cache
managers (`cache_slips`) one of their quick tests. A slip that passes everything is a defect, and so
is one that does not compile.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import random
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyllamakv.binding.library import open_library
from pyllamakv.binding.remote import Remote
from pyllamakv.building import variant
from pyllamakv.building.build import build, build_patched
from pyllamakv.errors import CommandFailed, HarnessError, PatchFormatError
from pyllamakv.patching import apply, series, strict_toml, trees
from pyllamakv.patching.strict_apply import DraftEntry, TreeOverlay
from pyllamakv.server import server_build, server_patches
from pyllamakv.server.server_build import build_server
from pyllamakv.server.server_check import run_scenario
from pyllamakv.server.server_scenarios import SCENARIOS
from pyllamakv.source import releases, spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery, header_tests
from pyllamakv.verification.parallel_runs import RunTask, load_run, run_tasks
from pyllamakv.verification.verdict import Pair
from qa.entry import Entry, StressOptions, Tick, skipped_entry
from qa.slips import cache_slips

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant
    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.patching.definition import Port
    from pyllamakv.patching.series import Series
    from pyllamakv.scenarios.scenario import Scenario
    from pyllamakv.server.server_artifact import BuiltServer
    from pyllamakv.server.server_patches import ServerSources
    from pyllamakv.server.server_scenarios import ServerScenario
    from qa.slips.cache_slips import CacheSlip

SECTION = "slips"

#: The shipped slips.
FILE = Path(__file__).with_name("slips.toml")

#: Number of slips of a patch that run whatever the time limit is.
LEAST = 1

#: From this time limit in seconds, the slips of every built release are tested.
LONG = 900.0

#: Timeout of one call of a scenario in seconds; the slowest takes under one.
_CALL_TIMEOUT = 30.0

#: Bytes of address space of a worker: several times those of the largest scenario.
_MEMORY = 8 << 30

#: The server scenario that runs first, because the slips of the server are in the patch it proves.
_FIRST = ("server-overcommit",)

#: The entry of the slips in the cache managers.
MANAGERS: Final = "cache managers"

_KEYS = {"id", "patch", "kind", "releases", "by", "was", "now"}

#: Slips that are made from a port: each of its hunks is left out once.
LEFT_OUT: Final = "hunk left out"

#: Outcomes of a slip. Only the first four mean that it was caught.
HEADER_TEST: Final = "header test"
SCENARIO: Final = "scenario"
QUICK_TEST: Final = "quick test"
BUILD: Final = "build"
COMPILER: Final = "does not compile"
UNDETECTED: Final = "is not detected"


@dataclass(frozen=True)
class Slip:
    """A mistake in a patch: ``was``, which occurs once in its files, is replaced by ``now``.

    ``by`` is the scenario, or the group of header tests, that must detect it; empty: any.
    """

    id: str
    patch: str
    kind: str
    releases: tuple[str, ...]
    was: str
    now: str
    by: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.id}"

    def apply(self, files: Mapping[str, bytes]) -> tuple[str, bytes]:
        """Return the path and new content of the changed file.

        Raises HarnessError unless ``was`` occurs once. Line ends of the files stay unchanged.
        """
        was = self.was.encode()
        places = [(path, data.count(was)) for path, data in files.items() if was in data]
        if sum(n for _, n in places) != 1:
            found = ", ".join(f"{path} ({n})" for path, n in places) or "no file"
            msg = f"slip {self.id} of {self.patch}: expected its text once, found it in {found}"
            raise HarnessError(msg)
        path = places[0][0]
        return path, files[path].replace(was, self.now.encode())


AnySlip = TypeVar("AnySlip", "Slip", "CacheSlip")


@dataclass(frozen=True)
class SlipResult:
    """The outcome of a slip, the test that caught it, and that test's message."""

    outcome: str
    by: str = ""
    message: str = ""

    @property
    def caught(self) -> bool:
        """Return whether a test, or for a hunk left out the compiler, detected the slip."""
        return self.outcome in (HEADER_TEST, SCENARIO, QUICK_TEST, BUILD)


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
            part.string("by", ""),
        )
        for part in table.tables("slip", _KEYS)
    )
    names = Counter((release, slip.patch, slip.id) for slip in found for release in slip.releases)
    twice = next((name for name, n in names.items() if n > 1), None)
    if twice:
        msg = f"{path}: {' '.join(twice)} is defined twice"
        raise PatchFormatError(msg, str(path))
    return found


def left_out(port: Port, release: str) -> list[Slip]:
    """Return a slip for every hunk of a port that adds lines: the release's own lines stay.

    Without a hunk that only removes lines, code stays that nothing calls, which no test can see.
    """
    return [
        Slip(
            f"{file.path.rpartition('/')[2]}-{number}", port.id, LEFT_OUT, (release,),
            b"".join(hunk.new).decode(), b"".join(hunk.old).decode(),
        )
        for file in port.patch.files
        for number, hunk in enumerate(file.hunks, start=1)
        if hunk.added and hunk.old
    ]  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of the entries: releases with patches that have slips there, managers."""
    return (*_by_entry(load()), MANAGERS)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Test the slips of every patch and of the managers; an entry is ``0.3.9 full-defrag``.

    A short run tests the test release, and a long one all that are built; ``only`` builds the
    named ones. A slip is compiled again in each run, but results of its scenarios are cached.
    """
    shipped = series.load()
    wanted = {name: slips for name, slips in _by_entry(load()).items() if effort.wants(name)}
    found: list[Entry] = []
    if effort.wants(MANAGERS):
        found.append(_managers(effort.shared(2) if wanted else effort, tick))
    end = time.monotonic() + (effort.shared(2) if found else effort).seconds
    for release in dict.fromkeys(name.split()[0] for name in wanted):
        own = {name: slips for name, slips in wanted.items() if name.split()[0] == release}
        if not (effort.only or release == releases.TEST_RELEASE):
            built = variant.find(f"{release}+patched") is not None
            if effort.seconds < LONG or not built:
                why = "a short run" if built else f"{release} is not built"
                found += [skipped_entry(SECTION, name, why) for name in own]
                continue
        tick(f"{release}: preparing")
        server = {patch.id for patch in shipped.server}
        testers: dict[type[SlipTester | ServerSlipTester], SlipTester | ServerSlipTester] = {}
        for name, slips in own.items():
            kind = ServerSlipTester if name.split()[1] in server else SlipTester
            tester = testers.get(kind) or testers.setdefault(kind, kind(release, shipped))
            if isinstance(tester, SlipTester) and name == f"{releases.TEST_RELEASE} full-defrag":
                port = next(each for each in tester.source.ports if each.id == "full-defrag")
                slips += left_out(port, release)
            random.Random(effort.seed).shuffle(slips)
            found.append(entry_of(name, run(slips, tester, end, tick), effort.seed))
    return found


def _managers(effort: StressOptions, tick: Tick) -> Entry:
    """Test the slips of the cache managers."""
    slips = list(cache_slips.load())
    random.Random(effort.seed).shuffle(slips)
    tick(f"{MANAGERS}: their tests without a slip")
    tester = CacheManagerTester()
    try:
        end = time.monotonic() + effort.seconds
        return entry_of(MANAGERS, run(slips, tester, end, tick), effort.seed)
    finally:
        tester.close()


class CacheManagerTester(cache_slips.ManagersCopy):
    """Test slips in the cache managers."""

    def test(self, slip: CacheSlip) -> SlipResult:
        """Return the result of a slip: the first quick test that fails."""
        by, message = self.run(slip)
        if by == cache_slips.IMPORT:
            return SlipResult(COMPILER, message=message)
        return SlipResult(QUICK_TEST if by else UNDETECTED, by, message)


def _by_entry(slips: Iterable[Slip]) -> dict[str, list[Slip]]:
    """Return the slips by entry, the test release first, then in the order of the file."""
    found: dict[str, list[Slip]] = {}
    for slip in slips:
        for release in slip.releases:
            found.setdefault(f"{release} {slip.patch}", []).append(slip)
    first = [name for name in found if name.split()[0] == releases.TEST_RELEASE]
    return {name: found[name] for name in [*first, *found]}


def patched_files(patched: PatchedRelease, patch: str) -> dict[str, bytes]:
    """Return the files of the patched tree that a patch touches."""
    port = next((port for port in patched.ports if port.id == patch), None)
    if port is None:
        msg = f"{patch} does not apply to {patched.release}: correct the releases of its slips"
        raise HarnessError(msg)
    return _files(patched.tree, port.patch.paths)


class SlipTester:
    """Test slips of one release, whose patched variant is built if it is missing.

    If stock is not built, a run that a slip cannot start counts as one that stock cannot start
    either.
    """

    def __init__(self, name: str, shipped: Series) -> None:
        self.patched = build(f"{name}+patched")
        self.stock = variant.find(f"{name}+stock")
        self.release = spec_resolver.resolve(name)
        self.source = apply.apply(self.release, series=shipped)
        if self.patched.manifest.patched_tree != self.source.tree:
            msg = f"{self.patched.id} was built from other patches: run pyllamakv build {name}"
            raise HarnessError(msg)
        self._shipped = shipped
        self._caught: Counter[str] = Counter()

    def test(self, slip: Slip) -> SlipResult:
        """Return the result of a slip: header tests first, then quick scenarios."""
        path, data = slip.apply(patched_files(self.source, slip.patch))
        known = discovery.discover()
        if slip.by not in known:
            result = _header_tests(self.source.tree, path, data, slip.by)
            if result is not None:
                return result
        try:
            built = self._built(path, data)
        except CommandFailed as error:
            outcome = BUILD if slip.kind == LEFT_OUT else COMPILER
            return SlipResult(outcome, "the compiler", error.first_error)
        own = self._shipped.definition(slip.patch).scenarios
        try:
            return self._scenarios(built, [known[slip.by]] if slip.by else self._ordered(own))
        finally:
            shutil.rmtree(built.folder, ignore_errors=True)

    def _built(self, path: str, data: bytes) -> Variant:
        """Build the patched tree with other contents of one file."""
        tree = _with_file(self.source.tree, path, data)
        return build_patched(self.release, replace(self.source, tree=tree))

    def _scenarios(self, built: Variant, scenarios: Sequence[Scenario]) -> SlipResult:
        """Run quick scenarios until one fails that the patched library passes."""
        for scenario in scenarios:
            runs = run_tasks([_task(built, scenario, n) for n in range(len(scenario.few))],
                             opener=_open, timeout=_CALL_TIMEOUT)  # fmt: skip
            for task, run in runs.items():
                pair = Pair(
                    scenario.id, scenario.kind, task.setting.name,
                    self._stock(task) or run.outcome, run.outcome,
                )  # fmt: skip
                if pair.broken and self._passes(task):
                    self._caught[scenario.id] += 1
                    about = f"{task.setting.name}: {run.outcome.failure} {run.outcome.message}"
                    return SlipResult(SCENARIO, scenario.id, " ".join(about.split())[:300])
        return SlipResult(UNDETECTED)

    def _ordered(self, own: Sequence[str]) -> list[Scenario]:
        """Return the patch's own scenarios before all others; in both, frequent catchers first."""
        return sorted(
            discovery.discover().values(),
            key=lambda each: (each.id not in own, -self._caught[each.id], self._seconds(each)),
        )

    def _seconds(self, scenario: Scenario) -> float:
        """Return the time of a scenario with the original patches, if known."""
        tasks = [_task(self.patched, scenario, n) for n in range(len(scenario.few))]
        return sum(run.seconds for task in tasks if (run := load_run(task.key)))

    def _stock(self, task: RunTask) -> Any:
        """Return the outcome of stock in the setting of a run, if stock is built."""
        if self.stock is None:
            return None
        same = _on(self.stock, task)
        return run_tasks([same])[same].outcome

    def _passes(self, task: RunTask) -> bool:
        """Return whether the original patches pass a run; cached like any other run."""
        same = _on(self.patched, task)
        return run_tasks([same])[same].outcome.status == "pass"


class ServerSlipTester:
    """Test slips in patches of the server of one release, which is built if it is missing."""

    def __init__(self, name: str, shipped: Series) -> None:
        self.release = spec_resolver.resolve(name)
        self.server = build_server(f"{name}+patched")
        self.sources = server_patches.choose(self.release, None, series=shipped)
        self._passing: dict[str, bool] = {}

    def test(self, slip: Slip) -> SlipResult:
        """Return the result of a slip: header tests first, then server scenarios."""
        path, data = slip.apply(server_files(self.sources, slip.patch))
        if slip.by not in {each.id for each in SCENARIOS}:
            result = _header_tests(self.sources.tree, path, data, slip.by)
            if result is not None:
                return result
        tree = _with_file(self.sources.tree, path, data)
        wanted = variant.request(f"{self.release.name}+patched")
        name = f".slip-{os.getpid()}-{tree[:12]}"
        try:
            built = server_build.build_sources(
                wanted, self.server.variant, replace(self.sources, tree=tree), name=name
            )
        except CommandFailed as error:
            return SlipResult(COMPILER, message=error.first_error)
        try:
            return self._scenarios(built, slip.by)
        finally:
            shutil.rmtree(built.folder, ignore_errors=True)

    def _scenarios(self, built: BuiltServer, by: str) -> SlipResult:
        """Run the scenario ``by``, or all, until one fails that the patched server passes."""
        ordered = sorted(SCENARIOS, key=lambda each: each.id not in _FIRST)
        for scenario in [each for each in ordered if each.id == by] or ordered:
            outcome, _ = run_scenario(scenario, built)
            if outcome.status == "fail" and self._passes(scenario):
                about = f"{outcome.failure} {outcome.message}"
                return SlipResult(SCENARIO, scenario.id, " ".join(about.split())[:300])
        return SlipResult(UNDETECTED)

    def _passes(self, scenario: ServerScenario) -> bool:
        if scenario.id not in self._passing:
            outcome, _ = run_scenario(scenario, self.server)
            self._passing[scenario.id] = outcome.status == "pass"
        return self._passing[scenario.id]


def server_files(sources: ServerSources, patch: str) -> dict[str, bytes]:
    """Return the files of the tree of a server that a patch of the server touches."""
    if patch not in sources.paths:
        msg = f"{patch} is not applied to the server: correct the releases of its slips"
        raise HarnessError(msg)
    return _files(sources.tree, sources.paths[patch])


def _files(tree: str, paths: Iterable[str]) -> dict[str, bytes]:
    found = trees.StoreTree(open_store(), tree)
    entries = {path: found.entry(path) for path in paths}
    return {path: entry.data for path, entry in entries.items() if entry is not None}


def _header_tests(tree: str, path: str, data: bytes, group: str = "") -> SlipResult | None:
    """Run the tests of the headers that the slip's file affects, also with sanitizers.

    Return None if all pass. With a ``group``, only the tests of the file itself run, and only this
    group's failure detects the slip.
    """
    headers = [
        each
        for each in header_tests.HEADERS
        if path == each.path or (path in each.needs and not group)
    ]
    files = _files(tree, {name for header in headers for name in (header.path, *header.needs)})
    for sanitize in (False, True):
        original = header_tests.run_header_tests(files, sanitize=sanitize)
        passing = {result.path for result in original if not result.problem}
        for result in header_tests.run_header_tests({**files, path: data}, sanitize=sanitize):
            if result.path in passing and result.problem:
                if result.error:
                    return SlipResult(COMPILER, message=result.error)
                if not group or group in dict(result.failed):
                    return SlipResult(HEADER_TEST, result.path, result.problem)
    return SlipResult(UNDETECTED, message=f"by the group {group}") if group else None


def _with_file(tree: str, path: str, data: bytes) -> str:
    """Return a tree with other contents of one file."""
    store = open_store()
    draft = TreeOverlay(trees.StoreTree(store, tree))
    entry = draft.entry(path)
    assert entry is not None
    draft.changes[path] = DraftEntry(data, entry.mode)
    return trees.write(store, tree, draft)


def _task(built: Variant, scenario: Scenario, number: int) -> RunTask:
    digest = built.manifest.library_sha256
    return RunTask("patched", built.folder, digest, scenario, scenario.few[number])


def _on(built: Variant, task: RunTask) -> RunTask:
    return replace(task, library=built.folder, digest=built.manifest.library_sha256)


def _open(path: Path, environment: Mapping[str, str]) -> Any:
    """Open a library in a worker with bounded memory and a checked heap."""
    checked = {**checked_heap(), **environment}
    library = open_library(path, isolated=True, env=checked, timeout=_CALL_TIMEOUT)
    if sys.platform == "linux" and isinstance(library.native, Remote):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(library.native.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    return library


def checked_heap() -> dict[str, str]:
    """Return the environment in which glibc aborts when a block with an overrun is freed.

    glibc has that in a separate library since 2.34; elsewhere nothing is checked. Small overruns
    have no other effect.
    """
    library = ctypes.util.find_library("c_malloc_debug") if sys.platform == "linux" else None
    if library is None:
        return {}
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{before}" if before else library, "MALLOC_CHECK_": "3"}


def run(
    slips: Sequence[AnySlip], tester: Any, end: float, tick: Tick
) -> list[tuple[AnySlip, SlipResult]]:
    """Test slips until the deadline of the monotonic clock, at least `LEAST` of them.

    ``tester`` has a method ``test``, which returns the result of a slip.
    """
    found: list[tuple[AnySlip, SlipResult]] = []
    for slip in slips:
        if len(found) >= LEAST and time.monotonic() > end:
            break
        tick(f"{len(found)} of {len(slips)}: {slip}")
        found.append((slip, tester.test(slip)))
    return found


def entry_of(name: str, results: Sequence[tuple[AnySlip, SlipResult]], seed: int) -> Entry:
    """Return the row of an entry; a slip that no test detects is a defect."""
    count = Counter(result.outcome for _, result in results)
    named = (SCENARIO, QUICK_TEST)
    catchers = Counter(result.by for _, result in results if result.outcome in named)
    row = {
        "tried": str(len(results)),
        "caught": f"{sum(result.caught for _, result in results)} of {len(results)}",
        "by header tests": str(count[HEADER_TEST]),
        "by scenarios": str(count[SCENARIO]),
        "by quick tests": str(count[QUICK_TEST]),
        "by the compiler": str(count[BUILD]),
        "caught most": ", ".join(f"{by} {n}" for by, n in catchers.most_common(3)),
    }
    defects = tuple(
        f"{slip} {result.outcome} {result.message}".strip()
        for slip, result in results
        if not result.caught
    )
    by = {str(slip): result.by for slip, result in results}
    return Entry(SECTION, name, row, defects, seed, {**count, "by": by})
