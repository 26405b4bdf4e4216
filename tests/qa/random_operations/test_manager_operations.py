"""Test random operations on all managers and memories, and that planted faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from fakes.simulated import SimulatedNative
from native_kit import built

import pyllamakv as kv
from pyllamakv.cache import directory_tier
from pyllamakv.cache.allocation import Allocator
from pyllamakv.cache.batcher import Batcher
from pyllamakv.cache.prefix_cache import PrefixCache
from pyllamakv.cache.slot_cache import SlotCache
from pyllamakv.errors import KVCacheFull, ScenarioFailed, Unsupported
from pyllamakv.runtime.sequence import Sequence
from pyllamakv.scenarios import synthetic_models
from qa.random_operations import manager_operations
from qa.random_operations.case_session import CaseSession
from qa.random_operations.combination import MANAGED, MODELS, VALUES, Combination, normalize
from qa.random_operations.manager_operations import ManagerOperations
from qa.random_operations.operation_cases import CaseRunner, generate_operations
from qa.random_operations.task import CaseTask, Played

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.runtime.context import Context

KINDS = tuple(dict.fromkeys(each for each in VALUES["manager"] if each != "none"))
OPTIONS = {"n_ctx": 256, "n_batch": 96, "n_ubatch": 32, "n_seq_max": 5}


def full() -> KVCacheFull:
    """Return a refusal."""
    return KVCacheFull("no cells", cells=256, used=0, largest_hole=None, wanted=9)


def run(folder: Path, kind: str, seeds: range) -> tuple[Played, ScenarioFailed | None]:
    """Run cases on the simulated library until one fails; return the counts and the failure."""
    total = Played()
    for seed in seeds:

        def opener() -> Context:
            native = {"heals": True, "contiguous": False}
            return kit.context(folder, native, **OPTIONS)

        works: list[Any] = []
        runner = CaseRunner(opener, manager=kind, seed=seed)
        failed = runner.play(generate_operations(seed, MANAGED, kind), works.append)
        total.add(Played.of(works[0], failed))
        if failed is not None:
            return total, failed
    return total, None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_manager_passes(tmp_path: Path, kind: str) -> None:
    """Each operation of the manager has an effect, and prompts reuse tokens."""
    total, failed = run(tmp_path, kind, range(1, 4))
    assert failed is None
    without = {"flush"} if kind != "prefix store" else set()
    without |= {"page"} if kind != "paged prefix cache" else set()
    without |= {"pin", "unpin"} if kind == "slot cache" else set()
    assert set(manager_operations.WEIGHTS) - set(total.done) <= {*without, "unpin", "give_up"}
    assert total.ended["reused"] > 50
    assert total.ended["parked"] > 0
    assert total.logits > 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_selects_the_options_of_a_manager(tmp_path: Path, kind: str) -> None:
    """A case can be repeated, and others have other options."""

    def options(seed: int) -> tuple[object, ...]:
        contexts = [kit.context(tmp_path, **OPTIONS) for _ in range(2)]
        work = ManagerOperations(*contexts, kind, seed)
        manager: Any = work._manager
        try:
            if isinstance(manager, SlotCache):
                return manager.policy, len(manager._slots)
            branches = manager.branches
            return manager.policy, branches.limit, branches.schedule
        finally:
            work.close()
            contexts[1].close()

    found = [options(seed) for seed in range(8)]
    assert found == [options(seed) for seed in range(8)]
    assert len(set(found)) > 2


def test_other_tokens_in_the_cache_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork with one token less than reported leads to other logits."""
    fork = Sequence.fork

    def short(self: Sequence, length: int | None = None) -> Sequence:
        found = fork(self, length)
        if len(found) > 2:
            found.ledger.tokens[1] = found.ledger.tokens[1] ^ 1
        return found

    monkeypatch.setattr(Sequence, "fork", short)
    _, failed = run(tmp_path, "prefix cache", range(1, 9))
    assert failed is not None


def test_wrong_logits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored state has other values than the saved one."""
    load = SimulatedNative.state_load

    def other(self: Any, context: int, seq: int, state: bytes) -> int:
        done = load(self, context, seq, state)
        for cell in self._get(context).cache.of(seq):
            cell.token += 1
        return done

    monkeypatch.setattr(SimulatedNative, "state_load", other)
    for kind in ("paged prefix cache", "prefix store"):
        _, failed = run(tmp_path, kind, range(1, 9))
        assert failed is not None
        assert failed.failure == "data"
        assert "differ by" in str(failed) or "below the best" in str(failed)


def test_flushed_tokens_that_are_lost_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted flush writes nothing."""
    monkeypatch.setattr(directory_tier.DirectoryTier, "write", lambda *_: 0)
    _, failed = run(tmp_path, "prefix store", range(1, 9))
    assert failed is not None
    assert failed.failure == "lost"
    assert "flushed tokens were reused" in str(failed)


def test_an_inconsistent_manager_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check fails."""

    def check(_: Any) -> None:
        raise AssertionError("two owners")

    monkeypatch.setattr(PrefixCache, "check", check)
    _, failed = run(tmp_path, "prefix cache", range(1, 2))
    assert "two owners" in str(failed)


def test_a_lease_with_other_tokens_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eviction removes a token of a lease."""
    evict = Allocator.evict

    def greedy(cache: Allocator, node: Any, *given: Any, **named: Any) -> Any:
        for lease in cache.leases[:1]:
            if len(lease.sequence) > 1:
                lease.sequence.trim(len(lease.sequence) - 1)
        return evict(cache, node, *given, **named)

    monkeypatch.setattr(Allocator, "evict", kit.ours(greedy))
    _, failed = run(tmp_path, "prefix cache", range(1, 30))
    assert any(what in str(failed) for what in ("a lease of", "the manager is inconsistent"))


def test_a_generation_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batcher that does not park ends a generation when no cell is free."""
    submit = Batcher.submit

    def failing(self: Batcher, *words: Any, **options: Any) -> Any:
        one = submit(self, *words, **options)
        one.end("failed", full())
        return one

    monkeypatch.setattr(Batcher, "submit", failing)
    _, failed = run(tmp_path, "slot cache", range(1, 5))
    assert "ended with failed" in str(failed)


def test_a_token_that_is_not_the_best_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits must confirm every chosen token."""
    sample = SimulatedNative.sample_all
    monkeypatch.setattr(SimulatedNative, "sample_all", lambda *words: [7 for _ in sample(*words)])
    monkeypatch.setattr(SimulatedNative, "sample", lambda *_: 7)
    _, failed = run(tmp_path, "prefix cache", range(1, 5))
    assert "below the best" in str(failed)


def test_a_refusal_without_a_reason_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that fits alone must not be refused while nothing is leased."""

    def refuse(*_: Any, **__: Any) -> None:
        raise full()

    monkeypatch.setattr(PrefixCache, "acquire", refuse)
    _, failed = run(tmp_path, "prefix cache", range(1, 2))
    assert "nothing else is leased" in str(failed)


def test_unsupported_error_on_attention_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only releases that cannot save a partial state may refuse one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Unsupported("a state begins")

    monkeypatch.setattr(PrefixCache, "acquire", refuse)
    _, failed = run(tmp_path, "prefix cache", range(1, 2))
    assert failed is not None
    assert "a state begins" in str(failed)


@pytest.mark.native
@pytest.mark.parametrize(
    ("release", "limits"),
    [
        ("0.3.9+patched", ["begins a recurrent state with what a removed", "mixes up the states"]),
        ("0.3.36+patched", []),
    ],
)
def test_only_the_limits_of_the_release_may_refuse_a_state(
    release: str, limits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reason is a failure, and so is a limit that an empty context does not have."""
    with (
        kv.open(built(release).folder) as library,
        library.load_model(synthetic_models.model("recurrent")) as model,
        model.context(**OPTIONS) as other,
    ):
        work = ManagerOperations(model.context(**OPTIONS), other, "slot cache")
        assert len(work.limits) == len(limits)
        assert all(any(known in found for found in work.limits) for known in limits)
        prefixes = ManagerOperations(model.context(**OPTIONS), other, "prefix cache")
        assert not prefixes.limits
        prefixes.close()
        reasons = ["a state begins", *work.limits]

        def refuse(*_: Any, **__: Any) -> None:
            raise Unsupported("refused", reason=reasons[0])

        work.do("start", 1)
        with monkeypatch.context() as patch:
            patch.setattr(SlotCache, "acquire", refuse)
            with pytest.raises(Unsupported):
                work.do("start", 2)
            if work.limits:
                reasons.pop(0)
                work.do("start", 3)
                assert work.ended["refused"] == 1
                work.context.clear()
                with pytest.raises(Unsupported):
                    work.do("start", 4)
        work.close()


def test_managers_run_in_host_memory() -> None:
    """A combination with a manager has no other backing or device."""
    drawn = Combination(manager="slot cache", backing="kept", device="rpc", guard="off")
    assert normalize(drawn) == Combination(manager="slot cache")
    assert drawn.length == MANAGED
    assert drawn.plain.manager == "none"


def test_windows_beside_states_are_for_managers_only() -> None:
    """The cells of both are compared with the reference for each kind alone."""
    drawn = Combination(memory="hybrid window", manager="prefix cache")
    assert normalize(drawn).memory == "hybrid window"
    assert normalize(Combination(memory="hybrid window")).memory == "hybrid"


@pytest.fixture(params=["0.3.9+patched", "b11549+patched"])
def session(request: pytest.FixtureRequest) -> Iterator[CaseSession]:
    """Open a release."""
    with CaseSession(built(request.param).folder) as opened:
        yield opened


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["plain f16", "flash f16"])
@pytest.mark.parametrize("streams", ["shared", "separate"])
@pytest.mark.parametrize("memory", MODELS)
def test_every_memory_passes(session: CaseSession, memory: str, streams: str, cache: str) -> None:
    """A memory that the real library lacks is absent."""
    for kind in KINDS:
        combination = Combination(memory=memory, manager=kind, cache=cache, streams=streams)
        played = session.play(CaseTask(combination, generate_operations(3, MANAGED, kind)))
        assert played.failed is None
        assert played.absent or played.logits > 5


@pytest.mark.native
def test_no_file_is_left() -> None:
    """Closing removes the store and the pages."""
    with (
        kv.open(built("0.3.9+patched").folder) as library,
        library.load_model(synthetic_models.tiny()) as model,
        model.context(**OPTIONS) as other,
    ):
        work = ManagerOperations(model.context(**OPTIONS), other, "prefix store")
        folder = Path(work._files.name)
        work.do("start", 1)
        work.close()
        assert not folder.exists()
