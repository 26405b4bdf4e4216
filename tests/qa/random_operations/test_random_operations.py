"""Test that the section plays all combinations, and that a planted fault becomes a trace."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.faulty_stages import (
    FarBroken,
    FarBrokenByPatches,
    FarVanishing,
    OnDying,
    OnKeeping,
    OnRefusing,
    OnSilent,
    OnSwapping,
    OnVanishing,
    Simulated,
    Unmapped,
    Unopened,
    Unquantized,
)
from fakes.simulated import SimulatedNative
from native_kit import built

from pyllamakv.building import variant
from pyllamakv.errors import NotBuilt, ScenarioFailed
from pyllamakv.home import home
from pyllamakv.traces import replay, trace
from pyllamakv.traces.script_session import ScriptSession as Stand
from qa import random_operations as trial
from qa.entry import StressOptions
from qa.random_operations import combination, operation_cases
from qa.random_operations.case_process import CaseProcess
from qa.random_operations.case_session import CaseSession
from qa.random_operations.combination import LENGTH, SHORT, VALUES, Combination, normalize, walk
from qa.random_operations.operation_cases import Operation
from qa.random_operations.operations import WEIGHTS
from qa.random_operations.task import CaseTask, Played

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant
    from qa.entry import Entry

PLAIN = Combination()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate data directory."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    return tmp_path


def try_out(folder: Path, make: type[Simulated], most: int = 3) -> tuple[Entry, list[str]]:
    """Return the entry of a run with that many cases, and its progress messages."""
    messages: list[str] = []
    effort = StressOptions(seconds=600.0, seed=3)
    return trial.run_cases("simulated", folder, effort, messages.append, make, most), messages


# Without a build...


@pytest.mark.slow
def test_run_continues_until_the_minimum_of_operations(folder: Path) -> None:
    """It continues after its time, unless no operation has any effect."""
    entry = trial.run_cases(
        "simulated", folder, StressOptions(0.0, operations=150), print, Simulated
    )
    assert 150 <= sum(entry.data["operations"].values()) < 350
    assert entry.passed


@pytest.mark.slow
def test_an_entry_may_operate_managers_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name starts with the release; every case has a manager, in each memory."""
    assert "0.3.9 managers" in trial.names()
    with pytest.raises(NotBuilt, match=r"pyllamakv build 0\.3\.36$"):
        trial.entries(StressOptions(only=("0.3.36", "0.3.36 managers")), print)
    entry = trial.run_cases(
        "simulated", folder, StressOptions(0.0, operations=200), print, Simulated, managers=True
    )
    assert entry.passed
    values = entry.data["values"]
    assert "none" not in values["manager"]
    assert len(values["manager"]) > 2
    found = {each.manager for each in itertools.islice(walk(1, managers=True), 40)}
    assert found == {each for each in VALUES["manager"] if each != "none"}


def test_all_values_occur_early_in_an_order_fixed_by_the_seed() -> None:
    """After as many combinations as the largest list has entries; a seed selects the order."""
    size = max(map(len, VALUES.values()))
    first = list(itertools.islice(walk(1), 4 * size))
    assert first == list(itertools.islice(walk(1), 4 * size))
    assert first != list(itertools.islice(walk(2), 4 * size))
    for name, values in VALUES.items():
        assert {getattr(each, name) for each in first} == set(values)
    assert len(set(first)) > 3 * size


def test_slow_combinations_play_shorter_cases() -> None:
    """With RPC, every row of a window's many layers is a message."""
    far = [each for each in itertools.islice(walk(1), 500) if each.device == "rpc"]
    assert {each.length for each in far if each.model == "sliding"} == {SHORT}
    assert {each.length for each in far if each.model != "sliding"} == {LENGTH}
    assert Combination(memory="window").length == LENGTH


def test_meaningless_combinations_are_skipped() -> None:
    """A device has no mapped memory, a state no cells, and only cells have no guard."""
    far = normalize(Combination(device="rpc", backing="kept", mover="host"))
    assert (far.backing, far.mover) == ("heap", "auto")
    states = normalize(Combination(memory="recurrent", cache="flash q8_0", guard="off"))
    assert states == Combination(memory="recurrent", cache="plain f16")
    assert normalize(PLAIN) == PLAIN
    assert (str(PLAIN), str(far)) == ("as usual", "device rpc")


def test_guard_off_is_tried_only_with_rollback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.3.10, an aborted decode keeps micro-batches, which the guard rolls back."""
    tried: dict[str, Any] = {}
    monkeypatch.setattr(
        trial, "run_cases", lambda name, *_, undoes, **__: tried.update({name: undoes})
    )
    ways = {"guard": True, "patched": True, "memory": False, "prefix": False, "none": False}
    for back in ways:
        manifest = SimpleNamespace(probes={"rollback": back}, patches=(), capabilities=())
        found = SimpleNamespace(folder=folder, manifest=manifest)
        monkeypatch.setattr(variant, "find", lambda _, found=found: found)
        monkeypatch.setattr(trial, "_can", lambda _: ())
        trial.entries(StressOptions(only=(back,)), print)
    assert tried == ways
    assert normalize(Combination(guard="off")) == Combination(guard="off")
    assert normalize(Combination(guard="off"), undoes=False) == PLAIN
    dealt = zip(walk(1), walk(1, undoes=False), range(40), strict=False)
    assert all(replace(one, guard="on") == other for one, other, _ in dealt)


@pytest.mark.slow
def test_device_without_a_feature_is_no_failure(folder: Path) -> None:
    """If the first batch fails, the feature is absent; if only a schedule fails, it is a defect."""
    entry, _ = try_out(folder, FarBroken)
    assert entry.data["absent"]
    assert all("rpc" in each for each in entry.data["absent"])
    assert "nothing was tested" in entry.defects[0]
    entry, _ = try_out(folder, FarVanishing)
    assert not entry.data["absent"]
    assert entry.defects


@pytest.mark.slow
def test_device_missing_only_on_patched_is_a_defect(folder: Path) -> None:
    """Stock is compared if it is built; otherwise only a known release may lack it."""

    def lost(name: str, make: type[Simulated], built: bool) -> list[str]:
        stock: Any = SimpleNamespace(folder=folder / "stock") if built else None
        made = trial.run_cases(
            name, folder, StressOptions(600.0, seed=3), print, make, 2, stock=stock
        )
        assert made.row["absent"] == "2"
        return [each for each in made.defects if "at the first batch" in each]

    assert "which stock computes" in lost("x", FarBrokenByPatches, True)[0]
    assert not lost("x", FarBroken, True)
    assert "to compare: pyllamakv build x+stock" in lost("x", FarBroken, False)[0]
    assert not lost("0.3.5", FarBroken, False)


@pytest.mark.slow
def test_a_cache_that_only_patches_lose_is_a_defect(folder: Path) -> None:
    """It must be absent on stock as well; a backing may be one that it cannot have."""

    def lost(make: type[Simulated], stock: Any) -> list[str]:
        made = trial.run_cases(
            "x", folder, StressOptions(600.0, seed=3), print, make, 12, stock=stock
        )
        return [each for each in made.defects if "but stock can" in each]

    stock = SimpleNamespace(folder=folder / "stock")
    defects = lost(Unquantized, stock)
    assert defects and all("cache flash q8_0" in each for each in defects)
    assert all("no such keys here" in each for each in defects)
    assert lost(Unquantized, SimpleNamespace(folder=folder)) == lost(Unquantized, None) == []
    assert lost(Unmapped, stock) == []


@pytest.mark.slow
def test_a_backing_that_a_build_promises_must_have_been_played(folder: Path) -> None:
    """A backing that was lost reports "absent", like one that never existed."""

    def lost(*can: str) -> list[str]:
        effort = StressOptions(600.0, seed=3)
        made = trial.run_cases("x", folder, effort, print, Unmapped, 48, can=can)
        return sorted(each.split()[0] for each in made.defects)

    assert lost() == []
    assert lost("mmap", "file", "kept", "rpc") == ["file", "kept", "mmap"]


@pytest.mark.native
def test_supported_backings_are_those_of_the_build(patched: Variant, stock: Variant) -> None:
    """Mapped caches come with their patch, and streams with the release."""
    assert trial._can(patched) == ("mmap", "file", "kept", "rpc")
    assert trial._can(stock) == ("rpc",)


@pytest.mark.native
def test_streams_are_drawn_where_the_release_has_them() -> None:
    """The library reports it: the manifest has no capabilities of a release."""
    assert trial._can(built("0.3.36+stock")) == ("separate", "windows", "rpc")


@pytest.mark.slow
def test_a_right_library_passes(folder: Path) -> None:
    """The entry reports the number of operations and the combinations."""
    entry, messages = try_out(folder, Simulated)
    assert entry.passed, entry.defects
    assert int(entry.row["operations"].replace(",", "")) == sum(entry.data["operations"].values())
    assert entry.data["operations"]["decode"] > 5
    assert entry.data["ended"]["no-slot"]
    assert entry.data["pairs"] > 36
    assert int(entry.row["logits compared"]) > 0
    assert int(entry.row["K and V compared"]) > 0
    assert set(entry.data["values"]) == set(asdict(PLAIN))
    assert any("operations" in each for each in messages)
    assert not (folder / "random_operations").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "word"),
    [
        (OnVanishing, "lost", "defrag:"),
        (OnSwapping, "data", "defrag:"),
        (OnKeeping, "lost", "clear:"),
        (OnRefusing, "claim", "no-slot"),
    ],
)
def test_a_fault_is_found_and_its_trace_replays_to_it(
    folder: Path, make: type[Simulated], kind: str, word: str
) -> None:
    """A failure is reported with its shortest case, and its trace fails at the same place."""
    entry, _ = try_out(folder, make, 2)
    assert not entry.passed
    defect = next(each for each in entry.defects if word in each)
    assert defect.startswith(f"{kind} with ")
    name = defect.split("its trace is ")[1].split(" in the data directory")[0]
    head, lines = trace.read(home() / name)
    assert head.complete
    assert lines[-1].op == "verify"
    assert len(lines) < 60
    found = divergences(make.native, head, lines)
    assert found
    if make is OnRefusing:
        assert "status was ok, now no-slot" in str(found[0])
        assert not divergences(SimulatedNative, head, lines, strict=False)


def divergences(
    native: type[SimulatedNative], head: Any, lines: Any, *, strict: bool = True
) -> list:
    """Return where a trace diverges on a simulated library."""
    stand = Stand(native(heals=True), file=home() / "models" / "x.gguf")
    try:
        return replay.replay(head, lines, stand, strict=strict)[1]
    finally:
        stand.close()


@pytest.mark.slow
def test_crash_is_a_finding_and_the_run_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt of the minimization has its own process, and other schedules follow."""
    monkeypatch.setitem(VALUES, "manager", ("none",))  # type: ignore[arg-type]
    monkeypatch.setattr(combination, "LENGTH", 12)
    entry, _ = try_out(folder, OnDying, 3)
    (defect,) = entry.defects
    assert defect.startswith("crash with ")
    assert "the process of the library ended with signal 9, after 1 operations (defrag:" in defect
    assert defect.endswith("in the data directory")
    assert int(entry.row["schedules"]) == 3


@pytest.mark.slow
def test_missing_trace_is_not_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ended before it recorded anything."""
    monkeypatch.setattr(combination, "LENGTH", 4)
    entry, _ = try_out(folder, Unopened, 1)
    assert entry.defects[-1].endswith("; it has no trace")


@pytest.mark.slow
def test_a_hang_is_a_finding(folder: Path) -> None:
    """The waiting caller gets an error, and the next case has a new process."""
    hanging, fine = (Operation("defrag", 1),), (Operation("decode", 1),)
    with CaseProcess(folder, {}, OnSilent, patience=4.0) as hand:
        failed = hand.play(CaseTask(PLAIN, hanging)).failed
        assert failed is not None
        assert failed.failure == "hang"
        played = hand.play(CaseTask(PLAIN, fine))
    assert played.failed is None
    assert played.done == {"decode": 1, "verify": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("times", "hangs"), [(1, 0), (2, 1)])
def test_only_a_repeated_hang_is_a_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, times: int, hangs: int
) -> None:
    """A machine that was suspended is no finding."""
    silent = ScenarioFailed("nothing", failure="hang", evidence={"done": 0, "proven": 0})
    left = [Played(failed=silent)] * times

    class Sleepy(CaseProcess):
        def play(self, task: CaseTask) -> Played:
            return left.pop() if left else super().play(task)

    monkeypatch.setattr(trial, "CaseProcess", Sleepy)
    monkeypatch.setattr(trial, "_find", lambda hand, task, failed, tally: found.append(failed))
    found: list[ScenarioFailed] = []
    try_out(folder, Simulated, 1)
    assert [each.failure for each in found] == ["hang"] * hangs


@pytest.mark.slow
def test_failed_open_is_a_finding(folder: Path) -> None:
    """If nothing can be opened, the case has failed, with the reason."""
    with CaseProcess(folder, {"LLAMA_SET_ROWS": "1"}) as hand:
        failed = hand.play(CaseTask(PLAIN, ())).failed
    assert failed is not None
    assert "LoadError" in str(failed)


def test_missing_build_is_reported_before_the_first_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the command that builds it."""
    monkeypatch.setattr(variant, "find", lambda _: None)
    with pytest.raises(NotBuilt, match=r"pyllamakv build 0\.3\.9 && pyllamakv build 0\.3\.36"):
        trial.entries(StressOptions(only=("0.3.9", "0.3.36")), print)


# On real builds...


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("memory", ["attention", "window", "recurrent"])
def test_every_operation_is_done(patched: Variant, memory: str) -> None:
    """Each runs twice on a kept cache; only those that a memory lacks are omitted."""
    names = [each for name in WEIGHTS for each in ("decode", name)]
    operations = tuple(Operation(name, 7 * n) for n in (1, 2) for name in names)
    combination = normalize(Combination(memory=memory, backing="kept"))
    with CaseSession(patched.folder) as stage:
        played = stage.play(CaseTask(combination, operations))
    assert played.failed is None, played.failed
    lacks = set(WEIGHTS) - set(played.done)
    states = {"cut", "thin", "trim", "slide", "shift", "divide", "brim", "boundaries", "defrag"}
    assert lacks == (states | {"release", "reopen"} if memory == "recurrent" else set())


@pytest.mark.slow
@pytest.mark.native
def test_random_operations_pass_on_the_test_release(patched: Variant) -> None:
    """The test release is used without any option, and passes."""
    effort = StressOptions(seconds=10.0, only=("0.3.9",))
    (entry,) = trial.entries(effort, lambda _: None)
    assert entry.passed, entry.defects
    assert entry.name == "0.3.9"
    assert entry.data["operations"]["decode"]


@pytest.mark.slow
@pytest.mark.native
def test_stock_fails_and_the_trace_replays(stock: Variant, folder: Path) -> None:
    """The defect of stock is found, and replayed in a worker on the same build."""
    operations = next(
        each
        for each in (operation_cases.generate_operations(seed, 60) for seed in range(20))
        if {"thin", "brim"} <= {one.name for one in each}
    )
    with CaseSession(stock.folder) as stage:
        failed = stage.play(CaseTask(PLAIN, operations)).failed
        assert failed is not None
        path = folder / "stock.jsonl"
        again = stage.play(CaseTask(PLAIN, operations, trace=path)).failed
    assert again is not None
    assert str(again) == str(failed)
    head, lines = trace.read(path)
    done = replay.replay_on_variant(str(stock.folder), head, lines)
    assert done.failed
    assert "status" in str(done.divergences[0])
