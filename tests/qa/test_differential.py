"""Test that earlier and present managers get equal calls, and differences are found."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit as kit

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.building import variant
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.errors import GitError, UsageError
from pyllamakv.home import checkout
from pyllamakv.runtime.sequence import Sequence
from pyllamakv.source import git_command
from qa import differential
from qa.differential import COMMIT, KINDS, LENGTH, WEIGHTS, Comparison, Row, Side
from qa.entry import StressOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.runtime.context import Context

OPTIONS = {"n_ctx": 256, "n_batch": 96, "n_ubatch": 32, "n_seq_max": 5}


@pytest.fixture(autouse=True)
def commit() -> None:
    """Skip in a clone without the commit of the earlier managers."""
    root = checkout()
    assert root is not None
    try:
        git_command.git(root, "rev-parse", "--verify", f"{COMMIT}:pyllamakv/cache")
    except GitError:
        pytest.skip(f"this clone has no commit {COMMIT}")


def compare(folder: Path, kind: str, seed: int, memory: MemoryType) -> Comparison:
    """Run a case on the simulated library."""

    def open_context() -> Context:
        native: dict[str, Any] = {"heals": True, "contiguous": False}
        if memory is not MemoryType.ATTENTION:
            native["partial"] = False
        made = kit.context(folder, native, **OPTIONS)
        object.__setattr__(made.info, "memory", memory)
        return made

    comparison = Comparison(open_context, kind, seed)
    comparison.run(LENGTH)
    comparison.close()
    return comparison


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", [MemoryType.ATTENTION, MemoryType.RECURRENT], ids=lambda memory: memory.name
)
@pytest.mark.parametrize("kind", KINDS)
def test_managers_behave_like_the_earlier_ones(
    tmp_path: Path, kind: str, memory: MemoryType
) -> None:
    """Tokens, logits, reuse, statistics, trees, checks and refusals are equal."""
    done: Counter[str] = Counter()
    reused = 0
    for seed in range(3):
        comparison = compare(tmp_path, kind, seed, memory)
        assert not comparison.defect, f"seed {seed}"
        done += comparison.done
        reused += comparison.reused
    assert reused > 100
    without = {"flush"} if kind != "prefix store" else set()
    without |= {"page_out", "page_in"} if kind != "paged prefix cache" else set()
    without |= {"pin", "unpin", "evict", "clear"} if kind == "slot cache" else set()
    # The state of such a memory cannot be copied to a part of its tokens.
    without |= {"pin", "page_in"} if memory is MemoryType.RECURRENT else set()
    assert set(WEIGHTS) - set(done) <= without | {"clear", "restart", "give_up", "unpin"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evict", "relieve"])
def test_different_eviction_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The present manager does nothing where the earlier one evicts."""
    monkeypatch.setattr(PrefixCache, name, lambda _: False)
    found = [compare(tmp_path, KINDS[0], seed, MemoryType.ATTENTION).defect for seed in range(4)]
    assert any(f"{name}: " in defect for defect in found)


@pytest.mark.slow
def test_lost_salt_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present manager finds nothing to pin, because the prompts of odd seeds have a salt."""
    pin = PrefixCache.pin

    def without(self: PrefixCache, name: str, tokens: Any, *, salt: str | None = None) -> None:
        pin(self, name, tokens)

    monkeypatch.setattr(PrefixCache, "pin", kit.ours(without))
    found = [compare(tmp_path, KINDS[0], seed, MemoryType.ATTENTION).defect for seed in range(6)]
    assert not any(found[::2])
    assert any(defect.startswith("pin: UsageError") for defect in found[1::2])


def test_different_logits_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, statistics and trees are equal."""
    logits = Sequence.logits
    count = [0]

    def other(self: Sequence) -> Any:
        count[0] += 1
        return logits(self) + (count[0] == 5)

    monkeypatch.setattr(Sequence, "logits", kit.ours(other))
    assert compare(tmp_path, KINDS[0], 0, MemoryType.ATTENTION).defect.endswith("values or logits")


@pytest.mark.parametrize(
    ("moved", "error", "equal"),
    [(False, 0, True), (False, 1e-6, False), (True, 1e-6, True), (True, 1e-3, False)],
)
def test_logits_may_be_rounded_differently_in_other_cells_only(
    tmp_path: Path, moved: bool, error: float, equal: bool
) -> None:
    """The order of a sum depends on the cells of its tokens."""
    ctx, logits = kit.context(tmp_path), np.arange(1, 4, dtype=np.float32)
    ctx.sequence().prefill([3, 4])
    first = Row(ctx, logits)
    if moved:
        ctx.sequence().prefill([5])
    assert (first == Row(ctx, logits + np.float32(error))) is equal


def test_untyped_exception_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its type and place; one of `close` is added to the defect before it."""

    def other(self: PrefixCache) -> None:
        raise KeyError("branch 7")

    for name in ("stats", "close"):
        monkeypatch.setattr(PrefixCache, name, kit.ours(other))
    defect = compare(tmp_path, KINDS[0], 0, MemoryType.ATTENTION).defect
    first, second = defect.split("; ")
    line = other.__code__.co_firstlineno + 1
    raised = f"KeyError in test_differential.py:{line} (other): 'branch 7'"
    assert (first, second) == (f"restart: {raised}", f"close: {raised}")


def test_restart_refused_by_both_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without managers, all further operations would be refused equally, and counted."""

    def refuse(self: Side, *_: object) -> str:
        raise UsageError("no store")

    monkeypatch.setattr(Side, "restart", refuse)
    found = compare(tmp_path, KINDS[0], 0, MemoryType.ATTENTION)
    assert found.defect == "restart: both raise UsageError, and have no manager to compare"
    assert not found.done
    assert found.refused == {"UsageError": 1}


def test_defect_is_reported_with_kind_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries before it are kept, and the section continues."""

    @contextlib.contextmanager
    def contexts(folder: Path, memory: str) -> Iterator[Any]:
        yield lambda: kit.context(tmp_path, {"heals": True, "contiguous": False}, **OPTIONS)

    def draw(self: Comparison) -> None:
        raise IndexError("no lease")

    monkeypatch.setattr(differential, "contexts", contexts)
    monkeypatch.setattr(Comparison, "_go_on", draw)
    effort = StressOptions(seconds=60.0, seed=3)
    entry = differential.compare("0.3.9 attention", tmp_path, "attention", effort, lambda _: None)
    (defect,) = entry.defects
    assert defect.startswith("prefix cache, seed 300000: go_on: its arguments: IndexError in ")
    assert entry.data["done"]["restart"] == 1


def test_a_release_that_is_not_built_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry names the command that builds it."""
    monkeypatch.setattr(variant, "find", lambda _: None)
    effort = StressOptions(only=("0.3.9 window",))
    (entry,) = differential.entries(effort, lambda _: None)
    assert not entry.ran
    assert "pyllamakv build 0.3.9" in entry.skip_reason


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("memory", differential.MEMORIES)
def test_managers_are_compared_on_real_memories(patched: Any, memory: str) -> None:
    """Each memory of the test release is compared."""
    effort = StressOptions(seconds=1.0, operations=4 * LENGTH)
    name = f"{patched.manifest.release} {memory}"
    entry = differential.compare(name, patched.folder, memory, effort, lambda _: None)
    assert entry.passed
    assert not entry.ran or entry.data["done"]["start"] > 5
