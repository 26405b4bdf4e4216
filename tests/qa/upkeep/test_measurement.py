"""Test the measurement of fetched states: several modes, and manual work is no success."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox
from upkeep_kit import FOUR, ONE, TWO, sandbox

from pyllamakv.patching import series
from qa.upkeep import measurement
from qa.upkeep.measurement import CARRY_FIRST, FORWARD, LEAVE_ONE_OUT, TODAY, Measurement

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return four releases, of which two have ports."""
    return sandbox(tmp_path, monkeypatch)


def measured(bench: SeriesSandbox) -> Measurement:
    """Return a measurement of the sandbox."""
    return Measurement(bench.store, series.load(), lambda *_: None)


@pytest.mark.slow
def test_upkeep_modes_differ_in_the_kept_ports(bench: SeriesSandbox) -> None:
    """The modes differ in the ports that are kept."""
    found = {(one.release, one.mode): one.patches.get("fix") for one in measured(bench).run()}
    assert found == {
        ("0.3.1", TODAY): "strict",
        ("0.3.1", LEAVE_ONE_OUT): "carried 0.3.3",
        ("0.3.1", FORWARD): "manual",
        ("0.3.1", CARRY_FIRST): "manual",
        ("0.3.2", TODAY): "carried 0.3.1",
        ("0.3.2", LEAVE_ONE_OUT): "carried 0.3.1",
        ("0.3.2", FORWARD): "carried 0.3.1",
        ("0.3.2", CARRY_FIRST): "carried 0.3.1",
        ("0.3.3", TODAY): "strict",
        ("0.3.3", LEAVE_ONE_OUT): "strict",
        ("0.3.3", FORWARD): "manual",
        ("0.3.3", CARRY_FIRST): "manual",
        ("0.3.4", TODAY): "strict",
        ("0.3.4", LEAVE_ONE_OUT): "strict",
        ("0.3.4", FORWARD): "strict",
        ("0.3.4", CARRY_FIRST): "strict",
    }


@pytest.mark.slow
def test_a_port_is_as_old_as_the_oldest_state_that_it_fits(bench: SeriesSandbox) -> None:
    """Its name may be that of a newer release; forward, it is merged from the older one."""
    bench.add_release("b50", FOUR | {"src/b.cpp": b"int d;\n"}, "2026-08-02")
    found = measured(bench)
    fits = found.fits()
    (patch,) = found.whole
    names = {port.base: [release.name for release in fits[port.digest]] for port in patch.ports}
    assert names == {"0.3.1": ["0.3.1"], "0.3.3": ["b50", "0.3.3", "0.3.4"]}
    release = bench.releases["0.3.3"]
    (unseen,) = found.unseen(release, FORWARD, fits)
    assert [port.base for port in unseen.ports] == ["0.3.1", "b50"]
    assert found.measure(release, FORWARD, fits).strict


@pytest.mark.slow
def test_carry_first_mode_prefers_a_carried_port(bench: SeriesSandbox) -> None:
    """A port that fits strictly is not used if another can be carried."""
    further = {"src/a.cpp": ONE["src/a.cpp"].replace(b"second_7();", b"second_7(a);")}
    bench.add_release("b50", ONE | further, "2026-08-02")
    release = bench.add_release("b60", ONE | further | {"src/b.cpp": b"int c;\n"}, "2026-08-03")
    ports = {
        base: (files, files | {"src/a.cpp": files["src/a.cpp"].replace(b"second_9();", call)})
        for base, files, call in (("0.3.1", ONE, b"one();"), ("b50", ONE | further, b"two();"))
    }
    bench.add_patch("more", ports, marker=("src/a.cpp", "first_8"))
    found = Measurement(bench.store, series.load(bench.folder), lambda *_: None)
    states = {
        mode: found.measure(release, mode, found.fits()).patches["more"]
        for mode in (FORWARD, CARRY_FIRST)
    }
    assert states == {FORWARD: "strict", CARRY_FIRST: "carried 0.3.1"}


@pytest.mark.slow
def test_changes_of_hooks_are_counted(bench: SeriesSandbox) -> None:
    """The lines of the newest port appear with 0.3.3."""
    (hook,) = measured(bench).hooks()
    assert (hook.patch, hook.file, hook.number) == ("fix", "src/a.cpp", 1)
    assert (hook.function, hook.present, hook.states, hook.changes) == ("first", 2, 4, 1)


@pytest.mark.slow
def test_hooks_are_counted_again_for_the_ports_of_a_newer_state(bench: SeriesSandbox) -> None:
    """The newer state has other ports: an older one of one patch, and none of another."""
    bench.add_patch("more", {"0.3.4": (FOUR, FOUR | {"src/b.cpp": b"int c;\nint d;\n"})},
                    marker=("src/a.cpp", "first_8"))  # fmt: skip
    assert {hook.patch for hook in measured(bench).hooks()} == {"fix", "more"}
    bench.add_release("0.3.5", {"src/a.cpp": ONE["src/a.cpp"]}, "2026-08-05")
    (hook,) = measured(bench).hooks()
    assert (hook.patch, hook.present, hook.states, hook.changes) == ("fix", 2, 5, 2)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["since", "until", "requires", "port"])
def test_a_changed_definition_is_measured_again(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """They are its bounds, its requirements, and those of its ports."""
    calls = []
    plain = Measurement._measured
    monkeypatch.setattr(Measurement, "_measured", lambda *all_: calls.append(all_) or plain(*all_))
    found = measured(bench)
    release, fits = bench.releases["0.3.2"], found.fits()
    for _ in range(2):
        found.measure(release, TODAY, fits)
    (patch,) = found.whole
    if field == "port":
        patch = replace(patch, ports=tuple(replace(port, requires=("x",)) for port in patch.ports))
    else:
        patch = replace(patch, **{field: ("x",) if field == "requires" else "0.3.1"})
    found.whole = replace(found.whole, definitions=(patch,))
    found.measure(release, TODAY, fits)
    assert len(calls) == 2


@pytest.mark.slow
def test_a_blocked_patch_needs_manual_work(bench: SeriesSandbox) -> None:
    """The patch that it requires is not applied."""
    bench.add_patch("more", {"0.3.1": (ONE, ONE | {"src/b.cpp": b"int d;\n"})}, requires=("fix",),
                    marker=("src/a.cpp", "first_8"))  # fmt: skip
    found = Measurement(bench.store, series.load(bench.folder), lambda *_: None)
    one = found.measure(bench.releases["0.3.3"], FORWARD, found.fits())
    assert one.patches == {"fix": "manual", "more": "manual"}
    assert "requires fix" in one.reasons["more"]
    assert not one.good


@pytest.mark.slow
def test_a_carried_tree_is_compared_with_the_ports_of_today(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For that state, a person wrote the same lines."""
    bench.add_patch("other", {"0.3.1": (ONE, ONE | {"src/b.cpp": b"int d;\n"}),
                              "0.3.4": (FOUR, FOUR | {"src/b.cpp": b"int d;\n"})},
                    marker=("src/a.cpp", "first_8"))  # fmt: skip
    found = Measurement(bench.store, series.load(bench.folder), lambda *_: None)
    fits = found.fits()
    assert found.measure(bench.releases["0.3.1"], TODAY, fits).equal
    assert not found.measure(bench.releases["0.3.2"], TODAY, fits).equal


@pytest.mark.slow
def test_an_interrupted_measurement_continues(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored results are read."""
    count = 0
    plain = Measurement._measured

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(Measurement, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(bench).run()
    assert len(measured(bench).run()) == 16
    assert count == 17
    again = measured(bench)
    again.run()
    again.forget()
    measured(bench).run()
    assert count == 17
    other = measured(bench)
    other.forget()
    measured(bench).run()
    assert count == 33


def test_equal_trees_count_once(bench: SeriesSandbox) -> None:
    """Two indexes may have the same state of llama.cpp."""
    bench.add_release("b100", TWO, "2026-08-02")
    assert [release.name for release in measurement.states(bench.store)].count("b100") == 0
