"""Test calls on every kind of memory: a call that ends its process is a defect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from native_kit import TEST_RELEASE, built, swept_releases

from pyllamakv.building import variant
from qa import native_calls
from qa.entry import StressOptions

NUMBERS = (
    '{"memories": 9, "calls": 1234, "accepted": 4, "refused": 1230, "assertions": 1, "signals": 1}'
)


def test_a_call_that_ends_a_process_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry has the counts; a failing kit is a defect too; a build is required."""
    kit = tmp_path / "tests" / "kits" / "memory_sweep_kit.py"
    kit.parent.mkdir(parents=True)
    kit.write_text(f"print('! tiny, plain: load: SIGSEGV')\nprint('= ' + {NUMBERS!r})\n")
    monkeypatch.setattr(native_calls, "ROOT", tmp_path)
    monkeypatch.setattr(variant, "find", lambda _: object())
    effort, messages = StressOptions(only=("0.3.9+patched",)), []
    (entry,) = native_calls.entries(effort, messages.append)
    assert entry.defects == ("tiny, plain: load: SIGSEGV",)
    assert (entry.row["calls"], entry.data["signals"]) == ("1,234", 1)
    assert messages == ["0.3.9+patched: calls on every kind of memory"]
    kit.write_text("raise SystemExit('no library')")
    (entry,) = native_calls.entries(effort, messages.append)
    assert entry.defects == ("the calls ended: no library\n",)
    monkeypatch.setattr(variant, "find", lambda _: None)
    (entry,) = native_calls.entries(effort, messages.append)
    assert not entry.ran


def test_a_longer_run_makes_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute makes one call in 2,000, an hour one in 33."""
    asked: list[Any] = []
    monkeypatch.setattr(
        native_calls, "make_calls", lambda name, parts, *_: asked.append((name, parts))
    )
    for seconds in (60.0, 3600.0):
        native_calls.entries(StressOptions(seconds=seconds), lambda _: None)
    assert asked == [
        ("0.3.9+stock", 2000), ("0.3.9+patched", 2000), ("0.3.9+stock", 33), ("0.3.9+patched", 33),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("kind", ["stock", "patched"])
@pytest.mark.parametrize("release", swept_releases())
def test_no_call_on_a_memory_ends_the_process(release: str, kind: str) -> None:
    """A part of the calls is made: the same ones each time, others on stock than on patched."""
    built(f"{release}+{kind}")
    first = 0 if kind == "stock" else native_calls.PARTS // 2
    entry = native_calls.make_calls(f"{release}+{kind}", native_calls.PARTS, first, lambda _: None)
    assert entry.passed, "\n".join(entry.defects[:40])
    numbers = entry.data
    assert numbers["signals"] == 0
    assert numbers["memories"] >= 4
    assert numbers["accepted"] > 0 < numbers["refused"]
    if release == TEST_RELEASE:
        assert numbers["assertions"] == 0
