"""The benchmarks of cache managers and the soak: their work and their verdicts; never a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit

from pyllamakv.errors import HarnessError, NotBuilt
from qa.bench import manager_overhead, soak
from qa.bench.measure import Pairs
from qa.bench.workload import Round

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant


def test_no_two_rounds_have_a_beginning_in_common() -> None:
    """What a manager might reuse would not be the same work."""
    for work in (manager_overhead.ONE, manager_overhead.EIGHT):
        firsts = [p[0] for n in range(1, 32) for p in work.prompts(n)]
        assert len(set(firsts)) == len(firsts)
        assert all(len(p) == work.prompt and max(p) < 512 for p in work.prompts(7))
        assert work.n_ctx >= work.n_batch


def test_the_sides_do_the_same(tmp_path: Path) -> None:
    """By hand, on a lease and batched: the same last tokens, round after round."""
    model = kit.model(tmp_path)
    for work in (
        manager_overhead.ManagerWorkload("one", 1, 5, 6),
        manager_overhead.ManagerWorkload("three", 3, 5, 6),
    ):
        with ExitStack() as sides:
            plain = sides.enter_context(manager_overhead.by_hand(model, work))
            others = []
            for make in manager_overhead.MANAGERS.values():
                others.append(sides.enter_context(manager_overhead.batched(model, work, make)))
                if work.sequences == 1:
                    others.append(sides.enter_context(manager_overhead.leased(model, work, make)))
            for number in (1, 2, 3):
                expected = plain(number).result
                assert [each(number).result for each in others] == [expected] * len(others)


def test_verdicts() -> None:
    """The whole interval has to hold the limit; different work is refused."""
    good = manager_overhead.figure("x", manager_overhead.ONE, Pairs([1.04] * 30, [1.0] * 30), "m")
    assert good.met
    assert good.value.startswith("1.040 [1.040, 1.040]")
    assert not manager_overhead.figure(
        "x", manager_overhead.ONE, Pairs([1.06] * 30, [1.0] * 30), "m"
    ).met
    rounds: Any = (lambda n: Round(1.0, [1.0]), lambda n: Round(2.0, [float(n)]))
    with pytest.raises(HarnessError, match="different work"):
        manager_overhead.compare("x", *rounds, 3, lambda: None)
    assert set(manager_overhead.MANAGERS) == {"SlotCache", "PrefixCache"}


def test_what_is_not_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both groups name the command."""
    for module in (manager_overhead, soak):
        monkeypatch.setattr(module.variants, "find", lambda spec: None)
        with pytest.raises(NotBuilt, match=r"pyllamakv build 0\.3\.9"):
            module.figures(lambda: None)


def test_clients_depend_on_their_seed_alone(tmp_path: Path) -> None:
    """Two runs do the same, with prompts of every length asked for."""
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        ctx = kit.context(tmp_path / name, {"heals": True}, n_ctx=128)
        runs.append(soak.soak(ctx, 150, lengths=(2, 40)))
        runs[-1].seconds = 0
    assert runs[0] == runs[1]
    assert runs[0].clean
    assert runs[0].decodes >= 150
    assert runs[0].truncated
    assert runs[0].cache["shifts"]
    assert runs[0].cache["forks"]
    assert runs[0].batcher["cancelled"]
    assert soak.figure("best", runs[0], "x").met


def test_a_ghost_is_found(tmp_path: Path) -> None:
    """A library that leaves a token behind does not pass."""
    ctx = kit.context(tmp_path, {"heals": True}, n_ctx=128)
    real = ctx.native.seq_rm

    def leaky(context: int, seq: int, p0: int, p1: int) -> bool:
        return real(context, seq, p0 + 1 if p0 > 0 else p0, p1)

    ctx.native.seq_rm = leaky
    done = soak.soak(ctx, 60, lengths=(2, 40))
    assert done.ghosts
    assert not done.clean
    assert not soak.figure("best", done, "x").met
    assert soak.figure("best", done, "x", asked=False).met is None


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("policy", ["best", "longest"])
def test_a_soak_of_the_real_library_is_clean(
    patched: Variant, tiny_model: Path, policy: str
) -> None:
    """A sixteenth of the whole run's cells: no slot failure, no ghost, after any decode."""
    import pyllamakv as kv

    with (
        kv.open(patched.folder) as library,
        library.load_model(tiny_model) as model,
        model.context(n_ctx=512, n_batch=64, n_ubatch=16, n_seq_max=4, flash_attn=True) as ctx,
    ):
        done = soak.soak(ctx, 1200, lengths=(10, 131), policy=policy)
        assert done.clean, done
        assert done.truncated
        assert done.cache["shifts"]
        # A client that goes on with a slot of its own has nothing to fork from.
        assert done.cache["forks"] or policy == "longest"
        assert ctx.counters.defrags


@pytest.mark.native
def test_managers_are_measured(patched: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of the group, over shortened rounds of the real library."""
    monkeypatch.delenv("PYLLAMAKV_TEST_MODEL", raising=False)
    monkeypatch.setattr(
        manager_overhead, "ONE", manager_overhead.ManagerWorkload("1 sequence", 1, 8, 6)
    )
    monkeypatch.setattr(
        manager_overhead, "EIGHT", manager_overhead.ManagerWorkload("8 sequences", 8, 4, 6)
    )
    found = manager_overhead.figures(lambda: None, pairs=2)
    assert [figure.name for figure in found[:3]] == [
        "`SlotCache`, 1 sequence",
        "`Batcher` over `SlotCache`, 1 sequence",
        "`Batcher` over `SlotCache`, 8 sequences",
    ]
    assert len(found) == 6
