"""What fuzzing reports of its runs, stores between them, and leaves behind."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qa import fuzzing
from qa.entry import Entry, StressOptions
from qa.faults import process_kill
from qa.fuzzing import corpus_store, fuzz_result, target_process
from qa.fuzzing.fuzz_loop import FuzzFinding, FuzzLoop
from qa.fuzzing.target import Target

pytestmark = pytest.mark.usefixtures("fuzz_targets")

#: What entries of documents that were written earlier do not have.
OLDER_LACK = ("accepted", "refused", "unit", "seeds")


def test_a_platform_without_clang_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What cannot be tried is named, and is neither a success nor a defect."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (entry,) = fuzzing.entries(StressOptions(seconds=2, only=(fuzzing.HEADER,)), lambda _: None)
    assert entry.skip_reason.startswith("skipped: found no clang") and not entry.ran


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_what_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """No process goes on, and none is begun, after Ctrl-C and after SIGTERM."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    began: list[str] = []
    main, before = threading.main_thread().ident, signal.getsignal(signal.SIGTERM)
    assert main is not None

    def fuzz(_target: str, *words: Any, **more: Any) -> fuzz_result.FuzzResult:
        return target_process.fuzz("fuzz_kit:silent", *words, **more)

    def tick(about: str) -> None:
        began.append(about)
        if len(began) == 1:
            signal.pthread_kill(main, number)

    monkeypatch.setattr(fuzzing, "fuzz", fuzz)
    others = process_kill.children()
    # What runs in the background of a shell ignores Ctrl-C, and the tests may.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fuzzing.entries(
                StressOptions(seconds=9000, only=("lock", "wire", "series"), jobs=2), tick
            )
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert process_kill.children() == others
    assert not any(about.startswith("wire") for about in began)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_the_section_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An entry reports the number of inputs; a finding is a defect, and its input is saved."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    (entry,) = fuzzing.entries(StressOptions(seconds=1, seed=5, only=("lock",)), lambda _: None)
    assert entry.passed and entry.seed == 5
    assert set(entry.row) == {
        "inputs", "accepted", "CPU seconds", "per CPU second", "reached", "corpus", "seed",
    }  # fmt: skip
    made = target_process.fuzz("fuzz_kit:key_error", 20, folder=tmp_path / "files", most=1)
    bad = fuzz_result.entry("planted", made, 1)
    assert not bad.passed and "KeyError" in bad.defects[0]
    (saved,) = (tmp_path / "fuzzing" / "planted").iterdir()
    assert saved.read_bytes().startswith(b"PLK")


@pytest.mark.slow
def test_a_run_begins_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What reached something new is saved in the home, and tried by the next run."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    begun: list[list[bytes]] = []
    true = target_process.fuzz

    def fuzz(*words: Any, kept: Iterable[Path], **more: Any) -> fuzz_result.FuzzResult:
        begun.append([path.read_bytes() for path in kept])
        return true(*words, kept=kept, **more)

    monkeypatch.setattr(fuzzing, "fuzz", fuzz)
    for seed in (1, 2):
        fuzzing.entries(StressOptions(seconds=3, seed=seed, only=("lock",)), lambda _: None)
    first, second = begun
    assert len(second) > len(first) == len(fuzzing.kept("lock"))
    assert set(first) < set(second)
    assert {each.read_bytes() for each in corpus_store.saved("lock")} >= set(second) - set(first)


def test_saved_inputs_have_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So many files of so many bytes, the smaller ones, each once."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(corpus_store, "FILES", 4)
    monkeypatch.setattr(corpus_store, "BYTES", 100)

    def saved(name: str, *inputs: bytes) -> list[int]:
        for number, data in enumerate(inputs):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{number}").write_bytes(data)
        corpus_store.save("lock", tmp_path / name)
        return sorted(path.stat().st_size for path in corpus_store.saved("lock"))

    assert saved("one", b"a" * 40, b"b" * 40, b"c" * 50, b"a" * 40) == [40, 40]
    assert saved("two", b"d" * 5, b"a" * 40) == [5, 40, 40]
    assert saved("three", *(bytes([n]) * n for n in range(1, 9))) == [1, 2, 3, 4]
    assert saved("none") == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", [False, True])
def test_what_does_harm_is_not_saved(timer: None, tmp_path: Path, bad: bool) -> None:
    """A finding has a place of its own: it would be found at once by every later run."""
    kept: list[bytes] = []

    def run(data: bytes) -> list[int]:
        if bad and len(data) % 2:
            raise ValueError(len(data))
        return [len(data)]

    loop = FuzzLoop(Target(run, (b"seed",), ()), keep=kept.append)
    loop.run(time.monotonic() + 0.3)
    assert kept and any(len(data) % 2 for data in kept) is not bad


def test_runs_of_other_seeds_add_up() -> None:
    """Inputs and seconds are sums, coverage of the same code is the best, and findings stay."""
    first = fuzz_result.entry("lock", fuzz_result.FuzzResult(1000, 2.0, 2.0, 30, 110, 9, 2048), 5)
    second = fuzz_result.entry("lock", fuzz_result.FuzzResult(3000, 2.0, 1.5, 20, 110, 7, 1024), 8)
    first = replace(first, defects=("it died",)).dated("one")
    both = fuzz_result.added(first, second.dated("two"))
    assert both.row == {
        "inputs": "4,000", "accepted": "", "CPU seconds": "4", "per CPU second": "1,143",
        "reached": "30 lines", "corpus": "9 inputs, 2 KB", "seed": "5, 8",
    }  # fmt: skip
    assert both.defects == ("it died",) and fuzz_result.seeds(both) == [5, 8]
    assert both.measured.endswith(f"`two` and 1 earlier runs since {first.measured[:10]}")
    other = fuzz_result.entry("lock", fuzz_result.FuzzResult(10, 1.0, 1.0, 20, 120, 7, 1024), 9)
    third = fuzz_result.added(both, other.dated("three"))
    assert third.row["reached"] == "20 lines" and third.row["seed"] == "5, 8, 9"
    assert f"and 2 earlier runs since {first.measured[:10]}" in third.measured
    old = replace(first, data={k: v for k, v in first.data.items() if k not in OLDER_LACK})
    new = fuzz_result.entry(
        "lock", fuzz_result.FuzzResult(100, 1.0, 1.0, accepted=5, refused=15), 9
    )
    assert fuzz_result.added(old, new).row["accepted"] == "25 %"
    assert fuzz_result.added(new, replace(new, seed=10)).data["refused"] == 30
    nothing = Entry("fuzzing", "lock", {"reached": "not tried"})
    assert fuzz_result.added(third, nothing) == third and fuzz_result.added(nothing, third) == third


def test_a_finding_stays_until_its_input_was_tried_again(tmp_path: Path, monkeypatch) -> None:
    """A piece of a run mends nothing by not coming by."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    faulty = fuzz_result.FuzzResult(10, 1.0, 1.0, 20, 110, 7, 1024)
    faulty.add(FuzzFinding("Hung: more than 10 s", "", b"slow"))
    faulty.add(FuzzFinding("KeyError: 'a'", "lock.py:3", b"odd"))
    first = fuzz_result.entry("lock", faulty, 1)
    mended, odd = (hashlib.sha256(data).hexdigest()[:12] for data in (b"slow", b"odd"))
    assert {path.name for path in fuzz_result.known("lock")} == {mended, odd}
    (tmp_path / "fuzzing" / "lock" / odd).unlink()  # another machine's, say
    second = fuzz_result.entry("lock", fuzz_result.FuzzResult(10, 1.0, 1.0, 20, 110, 7, 1024), 2)
    both = fuzz_result.added(first, second.dated("two"))
    assert len(first.defects) == 2
    assert both.defects == tuple(said for said in first.defects if odd in said)
