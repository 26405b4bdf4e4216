"""Test that carried states are drawn with a seed, and the tree of the mode is verified."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from patching_kit import code
from upkeep_kit import ONE, PATCHED, TWO, sandbox

from pyllamakv.errors import BuildError, FetchError, HarnessError, UsageError
from pyllamakv.home import home
from pyllamakv.patching import apply, series
from qa.upkeep import sample
from qa.upkeep.measurement import CARRY_FIRST, FORWARD, TODAY, Measured, Measurement

OLD, NEW = "2026-01-01T00:00:00Z", "2026-09-01T00:00:00Z"


def state(name: str, date: str, mode: str = CARRY_FIRST, patch: str = "carried 0.3.1") -> Measured:
    """Return a measured state with one patch."""
    return Measured(name, "rows", date, mode, {"fix": patch}, {})


def test_half_of_a_sample_is_after_july() -> None:
    """Strict and manual states are not drawn; the seed selects the others."""
    found = [state(f"old{n}", OLD) for n in range(20)] + [state(f"new{n}", NEW) for n in range(9)]
    found += [state("strict", NEW, patch="strict"), state("manual", NEW, patch="manual")]
    drawn = sample.draw(found, 12, 1)
    assert len({one.release for one in drawn}) == 12
    assert sum(one.date == NEW for one in drawn) == 6
    assert not {"strict", "manual"} & {one.release for one in drawn}
    assert drawn == sample.draw(found, 12, 1) != sample.draw(found, 12, 2)
    few = [each for each in found if each.date == OLD or each.release < "new3"]
    assert sum(one.date == NEW for one in sample.draw(few, 12, 1)) == 3
    assert len(sample.draw(few, 12, 1)) == 12
    assert len(sample.draw(found[18:], 12, 1)) == 11
    assert sample.draw(found, 0, 1) == []


def test_a_state_that_is_carried_forward_is_preferred() -> None:
    """Each state is drawn once, in the first mode that carries it."""
    found = [state("a", NEW), state("b", NEW), state("b", NEW, FORWARD)]
    assert [(one.release, one.mode) for one in sample.draw(found, 1, 1)] == [("b", FORWARD)]
    assert len(sample.draw(found, 9, 1)) == 2


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the network and the compiler; return the fetched and built releases."""
    made: list[str] = []

    def fetched(release, *, progress):
        assert not list(home().iterdir()), "releases of the data directory are not fetched again"
        made.append(f"fetch {release.name}")

    monkeypatch.setattr(sample.fetch, "fetch", fetched)
    monkeypatch.setattr(sample.variant, "request", lambda spec: spec)
    monkeypatch.setattr(sample.variant, "lookup", lambda spec: None)
    monkeypatch.setattr(sample, "build", lambda spec, **_: made.append(f"build {spec}"))
    patched = lambda release, tree, **_: made.append(f"build {release.name}")  # noqa: E731
    monkeypatch.setattr(sample, "build_patched", patched)
    return made


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """Return a measurement of four releases, of which 0.3.2 is carried."""
    bench = sandbox(tmp_path, monkeypatch)
    return Measurement(bench.store, series.load(), lambda *_: None)


@pytest.mark.slow
def test_the_carried_tree_is_verified(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    """The check gets a series with exactly this tree; a second run verifies nothing."""
    questions = []

    def checked(question, *, progress):
        questions.append(question)
        folder = Path(question.patches)
        (patch,) = series.load(folder)
        assert (patch.id, patch.scenarios) == ("fix", ("some-scenario",))
        release = next(each for each in measured.states if each.name == question.release)
        made = apply.apply(release, [str(folder)], store=measured.store)
        assert b"first_7(a);" in measured.store.read(made.tree, "src/a.cpp")
        assert b"fix(a);" in measured.store.read(made.tree, "src/a.cpp")
        return SimpleNamespace(
            decision=SimpleNamespace(verdict="needed", exit_code=0, reason="stock fails")
        )

    monkeypatch.setattr(sample.check, "check", checked)
    chosen = sample.draw(measured.run(), 1, 1)
    assert [(one.release, one.mode) for one in chosen] == [("0.3.2", FORWARD)]
    quiet = lambda *_: None  # noqa: E731
    (found,) = sample.verify(chosen, measured, quiet)
    assert (found.release, found.mode, found.verdict) == ("0.3.2", FORWARD, "needed")
    assert found.carried == {"fix": "0.3.1"}
    assert tuple(sorted(found.seconds)) == tuple(sorted(sample.STEPS))
    assert steps == ["fetch 0.3.2", "build 0.3.2+stock", "build 0.3.2"]
    assert sample.verify(chosen, measured, quiet) == [found] == sample.kept()
    assert len(questions) == 1
    assert sample.verify([], measured, quiet) == []


@pytest.mark.slow
def test_a_step_that_was_not_made_has_no_duration(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network nothing is fetched; an existing or failed build has no duration."""
    made = SimpleNamespace(verdict="needed", exit_code=0, reason="")
    monkeypatch.setattr(sample.check, "check", lambda *_, **__: SimpleNamespace(decision=made))

    def refused(*_args: object, **_options: object) -> None:
        raise FetchError("no network")

    def failed(*_args: object, **_options: object) -> None:
        raise BuildError("error: x")

    monkeypatch.setattr(sample.fetch, "fetch", refused)
    monkeypatch.setattr(sample, "build_patched", failed)
    chosen = sample.named(measured.run(), ["0.3.2"])
    (found,) = sample.verify(chosen, measured, lambda *_: None)
    assert set(found.seconds) == {"carry", "verify"}
    monkeypatch.setattr(sample, "kept", list)
    monkeypatch.setattr(sample.variant, "lookup", lambda spec: spec)
    monkeypatch.setattr(sample, "build", failed)
    (found,) = sample.verify(chosen, measured, lambda *_: None)
    assert set(found.seconds) == {"carry", "verify"}


def test_a_named_state_is_carried() -> None:
    """Forward is preferred; a state that is strict or unknown is refused."""
    found = [state("b", NEW), state("b", NEW, FORWARD), state("a", NEW), state("c", NEW, "today")]
    chosen = sample.named(found, ["a", "b"])
    assert [(one.release, one.mode) for one in chosen] == [("a", CARRY_FIRST), ("b", FORWARD)]
    for name in ("c", "d"):
        with pytest.raises(UsageError, match=f"{name} is no fetched state that is carried"):
            sample.named(found, [name])


@pytest.mark.slow
def test_a_broken_tree_is_named(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any failure is attributed to the carry; another tree of the state is verified again."""
    made = SimpleNamespace(verdict="broken-build", exit_code=1, reason="error: x")
    monkeypatch.setattr(sample.check, "check", lambda *_, **__: SimpleNamespace(decision=made))
    chosen = sample.draw(measured.run(), 1, 1)
    (found,) = sample.verify(chosen, measured, lambda *_: None)
    assert (found.verdict, found.reason) == ("broken-carry", "error: x")
    monkeypatch.setattr(sample, "kept", lambda: [replace(found, tree="0" * 40, verdict="x")])
    (again,) = sample.verify(chosen, measured, lambda *_: None)
    assert replace(again, seconds={}) == replace(found, seconds={})


@pytest.mark.slow
def test_what_a_carried_tree_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port for the state has another hunk, and another line in the hunk of both ports."""
    bench = sandbox(tmp_path, monkeypatch)
    guarded = TWO | {
        "src/a.cpp": code("first", "fix(a);", "guard(a);").replace(b"first_7();", b"first_7(a);")
        + code("second", "guard(b);")
    }
    ports = {"0.3.1": (ONE, PATCHED), "0.3.2": (TWO, guarded)}
    shutil.rmtree(bench.folder / "fix")
    bench.order.clear()
    bench.add_patch("fix", ports, marker=("src/a.cpp", "first_8"))
    measurement = Measurement(bench.store, series.load(), lambda *_: None)
    fits, release = measurement.fits(), bench.releases["0.3.2"]
    made = [measurement.apply(release, mode, fits).ports for mode in (CARRY_FIRST, TODAY)]
    assert [[port.carried_from for port in ports] for ports in made] == [["0.3.1"], [""]]
    assert sample.lacking(*made) == {"fix": ["second", "first"]}
    assert sample.lacking(made[0], made[0]) == {} == sample.lacking(made[1], made[0])


@pytest.mark.slow
def test_a_result_expires_with_its_tree(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expires if the present ports make another tree, or the state is not chosen or fetched."""
    made = SimpleNamespace(verdict="needed", exit_code=0, reason="")
    monkeypatch.setattr(sample.check, "check", lambda *_, **__: SimpleNamespace(decision=made))
    chosen = sample.draw(measured.run(), 1, 1)
    (found,) = sample.verify(chosen, measured, lambda *_: None)
    old = [replace(found, mode=CARRY_FIRST, tree="0" * 40), replace(found, release="0.2.0")]
    monkeypatch.setattr(sample, "kept", lambda: [*old, found])
    assert sample.current(measured) == [found] == sample.current(measured, chosen)
    assert sample.current(measured, []) == []


@pytest.mark.slow
def test_another_tree_is_never_verified(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of this program, not of the patch."""
    other = SimpleNamespace(tree="0" * 40)
    monkeypatch.setattr(sample.apply, "apply", lambda *_, **__: other)
    with pytest.raises(HarnessError, match="makes tree 0000"):
        sample.verify(sample.draw(measured.run(), 1, 1), measured, lambda *_: None)
