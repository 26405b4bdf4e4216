"""Test the benchmark of threads: the default is compared with the best number, and it ends."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pyllamakv.errors import WorkerDied
from qa.bench import busy_machine


def test_the_default_is_compared_with_the_best() -> None:
    """Medians are compared; a number that exceeded the timeout counts as the slowest."""
    good = busy_machine.figure("0.3.9", 1, {None: [3.0, 0.3, 0.4], 1: [0.4, 0.2], 2: [60.0]})
    assert good.met and good.value.startswith("1.00 x: default 0.40 s, n_threads=1 0.40 s")
    assert good.value.endswith("n_threads=2 over 60.00 s")
    assert "beside 1 busy process:" in good.name
    bad = busy_machine.figure("0.3.9", 0, {None: [0.9], 1: [0.4]})
    assert not bad.met and "alone" in bad.name


def test_rounds_alternate_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that exceeded the timeout is not measured again."""
    calls: list[int | None] = []

    def generate(_model: object, number: int | None) -> float:
        calls.append(number)
        return busy_machine.PATIENCE if number == 2 else 1.0

    monkeypatch.setattr(busy_machine, "generate", generate)
    monkeypatch.setattr(busy_machine, "usable_cpus", lambda: 2)
    model: Any = None
    found = busy_machine.measure(model, lambda: None)
    assert calls == [None, 1, 2, None, 1, None, 1]
    assert found == {None: [1.0] * 3, 1: [1.0] * 3, 2: [busy_machine.PATIENCE]}


def test_busy_processes_end_and_the_variable_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error."""
    monkeypatch.setenv("PYLLAMAKV_THREADS", "1")
    started: list[Any] = []
    popen = busy_machine.subprocess.Popen

    def start(words: list[str]) -> Any:
        started.append(popen(words))
        return started[-1]

    def fail() -> None:
        with busy_machine.processes(2), busy_machine._no_fixed_number():
            assert "PYLLAMAKV_THREADS" not in os.environ
            raise ZeroDivisionError

    monkeypatch.setattr(busy_machine.subprocess, "Popen", start)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.environ["PYLLAMAKV_THREADS"] == "1"
    assert len(started) == 2 and all(each.poll() is not None for each in started)


def test_a_library_that_ends_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other releases are still measured."""

    def compare(spec: str, _tick: object) -> list[str]:
        if spec == "b2":
            raise WorkerDied("signal 4")
        return [spec]

    monkeypatch.setattr(busy_machine, "compare", compare)
    dead, *others = reversed(busy_machine.figures(lambda: None, ("b1", "b2")))
    assert "not measured: signal 4" in dead.value and others == ["b1"]
