"""Carried states are drawn with a seed, and the tree of the mode is what is verified."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from upkeep_kit import sandbox

from pyllamakv.errors import HarnessError
from pyllamakv.patching import apply, series
from qa.upkeep import sample
from qa.upkeep.measurement import CARRY_FIRST, FORWARD, Measured, Measurement

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "2026-01-01T00:00:00Z", "2026-09-01T00:00:00Z"


def state(name: str, date: str, mode: str = CARRY_FIRST, patch: str = "carried 0.3.1") -> Measured:
    """Return a measured state with one patch."""
    return Measured(name, "rows", date, mode, {"fix": patch}, {})


def test_half_of_a_sample_is_after_july() -> None:
    """Strict and manual states are not drawn; the seed decides."""
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


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """Return a measurement of four releases, of which 0.3.2 is carried."""
    bench = sandbox(tmp_path, monkeypatch)
    return Measurement(bench.store, series.load(), lambda *_: None)


@pytest.mark.long
def test_the_carried_tree_is_verified(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check gets a series that makes exactly this tree; a second run verifies nothing."""
    questions = []

    def checked(question, *, progress):
        questions.append(question)
        (folder,) = question.patches
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
    assert sample.verify(chosen, measured, quiet) == [found] == sample.kept()
    assert len(questions) == 1
    assert sample.verify([], measured, quiet) == []


@pytest.mark.long
def test_a_broken_tree_is_named(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever failed, the carrying is at fault; another tree of the state is verified again."""
    made = SimpleNamespace(verdict="broken-build", exit_code=1, reason="error: x")
    monkeypatch.setattr(sample.check, "check", lambda *_, **__: SimpleNamespace(decision=made))
    chosen = sample.draw(measured.run(), 1, 1)
    (found,) = sample.verify(chosen, measured, lambda *_: None)
    assert (found.verdict, found.reason) == ("broken-carry", "error: x")
    monkeypatch.setattr(sample, "kept", lambda: [replace(found, tree="0" * 40, verdict="x")])
    assert sample.verify(chosen, measured, lambda *_: None) == [found]


@pytest.mark.long
def test_a_result_expires_with_its_tree(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ports of today make another tree, or the state is not chosen, or not fetched."""
    made = SimpleNamespace(verdict="needed", exit_code=0, reason="")
    monkeypatch.setattr(sample.check, "check", lambda *_, **__: SimpleNamespace(decision=made))
    chosen = sample.draw(measured.run(), 1, 1)
    (found,) = sample.verify(chosen, measured, lambda *_: None)
    old = [replace(found, mode=CARRY_FIRST, tree="0" * 40), replace(found, release="0.2.0")]
    monkeypatch.setattr(sample, "kept", lambda: [*old, found])
    assert sample.current(measured) == [found] == sample.current(measured, chosen)
    assert sample.current(measured, []) == []


@pytest.mark.long
def test_another_tree_is_never_verified(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of this program, not of the patch."""
    other = SimpleNamespace(tree="0" * 40)
    monkeypatch.setattr(sample.apply, "apply", lambda *_, **__: other)
    with pytest.raises(HarnessError, match="makes tree 0000"):
        sample.verify(sample.draw(measured.run(), 1, 1), measured, lambda *_: None)
