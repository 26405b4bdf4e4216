"""Test that keys rotated by another distance than their positions are found, bit by bit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit
from fakes.simulated import SimulatedNative
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import DecodeStatus
from pyllamakv.errors import ScenarioFailed
from pyllamakv.runtime import state_parser
from pyllamakv.scenarios import synthetic_models
from qa.random_operations import operation_cases
from qa.random_operations.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.building.variant import Variant


def test_wrong_rotation_of_a_shift_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the simulated library do not depend on its rows."""

    def update(native: Any, context: int) -> None:
        cache = native._get(context).cache
        turned = np.flatnonzero(cache.shift)
        cache.rows[-1, turned[turned >= 16]] += 1
        cache.shift[:] = 0

    monkeypatch.setattr(SimulatedNative, "update", update)
    model = runtime_kit.model(tmp_path, heals=True)
    ground = operation_cases.CaseRunner(
        lambda: model.context(n_ctx=64, n_batch=32, n_ubatch=8, n_seq_max=4)
    )
    found = (ground.play(operation_cases.generate_operations(seed, 30)) for seed in range(20))
    failed = next(each for each in found if each is not None)
    assert failed.failure == "data"
    assert "a shift changed" in str(failed)


@pytest.fixture(params=["q8_0", "q4_0", "f16"])
def work(patched: Variant, request: pytest.FixtureRequest) -> Iterator[Operations]:
    """Play on the test release with the given type of keys."""
    with kv.open(patched.folder, isolated=True) as library:
        yield opened(library, type_k=request.param)


def opened(library: Any, **options: Any) -> Operations:
    """Return a player on a context that has two sequences with a gap in the first."""
    model = library.load_model(synthetic_models.model("grouped"))
    context = partial(model.context, n_ctx=256, n_batch=96, n_ubatch=32, n_seq_max=3)
    work = Operations(context(**options), context(**options))
    work.subject.decode({1: 5})
    work.subject.decode({0: 40})
    work.subject.remove(0, 1, 4)
    return work


@pytest.mark.native
def test_pending_shifts_are_applied_in_one_rotation(work: Operations) -> None:
    """Shifts are added up and applied as one rotation, like in the twin; removed ones are not."""
    subject, turning = work.subject, work.proof.turning
    turning.begin(watching=True)
    subject.shift(0, 4, -1, 9)
    turning.begin(watching=True)
    subject.shift(0, 13, -1, -12)
    subject.remove(0, 9, 12)
    subject.fork(0, 2, 20)
    turning.begin(watching=True)
    subject.divide(0, 20, -1, 1)
    turning.settle()
    assert turning.waits and not turning.proved
    subject.decode({1: 1})
    turning.settle()
    assert not turning.waits and turning.proved == 2
    work.do("verify", 0)


@pytest.mark.native
def test_two_rotations_round_differently_from_one(work: Operations) -> None:
    """The test detects this as well: positions are right, keys differ by rounding."""
    subject, turning = work.subject, work.proof.turning
    turning.begin(watching=True)
    for first, by in ((4, 9), (13, -12)):
        subject.native.seq_add(subject.context, 0, first, -1, by)
        subject.native.update(subject.context)
    subject.ledger.shift(0, 4, -1, -3)
    with pytest.raises(ScenarioFailed, match=r"a shift changed .* K rows") as caught:
        turning.settle()
    assert caught.value.failure == "data"


@pytest.mark.native
def test_the_reference_judges_keys_that_were_shifted(work: Operations) -> None:
    """Damage to a sequence is visible in its logits after a shift, also with quantized keys."""
    subject = work.subject
    work.proof.turning.begin(watching=True)
    subject.shift(0, 4, -1, -3)
    subject.update()
    work.do("verify", 0)
    state = bytearray(subject.native.state_save(subject.context, 0))
    keys = state_parser.parse(bytes(state)).sections[0].layers[0].k.tobytes()
    place = state.find(keys)
    state[place : place + len(keys)] = keys[len(keys) // 2 :] + keys[: len(keys) // 2]
    assert subject.native.state_load(subject.context, 0, bytes(state))
    with pytest.raises(ScenarioFailed, match="differ from the reference"):
        work.proof.check_logits()


@pytest.mark.native
def test_reference_rotates_as_often_as_the_subject(work: Operations) -> None:
    """A failed decode rotates keys too, so both must round equally often."""
    subject = work.subject
    for by in (-1, 1) * 8:
        work.proof.turning.begin(watching=False)
        subject.shift(0, 4, -1, by)
        subject.cancel_after(3)
        assert subject.decode({1: 40}, expect=None) == DecodeStatus.ABORTED
        subject.cancel_after(-1)
        work.proof.turning.settle()
    work.proof.check_logits()
    assert work.proof.reference.worst < 0.05


@pytest.mark.native
@pytest.mark.parametrize("spec", ["0.3.9+patched", "0.3.14+patched", "0.3.36+patched"])
@pytest.mark.regression(
    "`Sequence.divide` rotated keys in the wrong direction between 0.3.14 and 0.3.36, and later "
    "decodes were wrong",
    by="random_operations",
    of="llama.cpp",
)
def test_divided_positions_rotate_keys_in_the_right_direction(spec: str) -> None:
    """Unpatched llama.cpp rotates them in the other direction if cells are a class."""
    with kv.open(built(spec).folder, isolated=True) as library:
        work = opened(library)
        for by in (2, 3):
            work.proof.turning.begin(watching=True)
            for pos in work.subject.sequences[0].positions:
                if pos % by:
                    work.subject.remove(0, pos, pos + 1)
            work.subject.divide(0, 0, -1, by)
            assert work.proof.pending
            work.subject.update()
            work.proof.turning.settle()
        assert work.proof.turning.proved == 4
        work.do("verify", 0)
