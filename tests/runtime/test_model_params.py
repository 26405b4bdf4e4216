"""Test that invalid options of a context are refused with a reason, before C gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import runtime_kit as kit
from fakes.simulated import ALL
from fakes.tiny_gguf import write_gguf

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import KvError, NotEnoughMemory, Unsupported, UsageError
from pyllamakv.runtime import decoder as decoder_module
from pyllamakv.runtime import model as model_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_ctx": -5}, "n_ctx"),
        ({"n_ctx": 2**31}, "n_ctx"),
        ({"n_ctx": 1.5}, "n_ctx"),
        ({"n_batch": 0}, "n_batch"),
        ({"n_ubatch": True}, "n_ubatch"),
        ({"n_seq_max": 0}, "n_seq_max"),
        ({"n_threads": 0}, "n_threads"),
        ({"n_threads_batch": -1}, "n_threads_batch"),
        ({"type_k": "f17"}, "f17"),
        ({"type_k": "q6_k"}, "K cache cannot be"),
        ({"type_v": "q8_0"}, "needs flash attention"),
        ({"guard": "maybe"}, "guard must be"),
        ({"guard": "off"}, "isolated=True"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Check the refusal of each option."""
    with pytest.raises(UsageError, match=message):
        kit.model(tmp_path).context(**options)


def test_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    """Check q8_0 for a model whose K rows are not made of blocks of 32."""
    import dataclasses

    model = kit.model(tmp_path)
    model.info = dataclasses.replace(model.info, n_embd_k_gqa=48)
    with pytest.raises(UsageError, match="48 values"):
        model.context(type_k="q8_0", flash_attn=True)


def test_missing_context_capabilities_raise_unsupported(tmp_path: Path) -> None:
    """Check automatic flash attention and streams of their own."""
    model = kit.model(tmp_path)
    with pytest.raises(Unsupported, match="flash attention"):
        model.context(flash_attn=None)
    with pytest.raises(Unsupported, match="kv_unified"):
        model.context(kv_unified=False, n_seq_max=2)
    more = ALL | Capability.FLASH_AUTO | Capability.KV_UNIFIED
    able = kit.model(tmp_path, capabilities=more)
    assert able.context(flash_attn=None, kv_unified=False, n_seq_max=2).params.flash_attn is None


def test_too_large_contexts_allocate_nothing(tmp_path: Path) -> None:
    """Check that the library is not called."""
    model = kit.model(tmp_path)
    with pytest.raises(NotEnoughMemory):
        model.context(n_ctx=2**31 - 1, type_k="f32", type_v="f32")


def test_a_refusal_of_the_library_leaves_the_model_usable(tmp_path: Path) -> None:
    """Check that after a failure the next context works."""
    model = kit.model(tmp_path)
    with pytest.raises(KvError):
        model.context(n_ctx=13)
    assert model.context(n_ctx=16).info.n_ctx == 16


def test_context_parameters_keep_the_given_numbers(tmp_path: Path) -> None:
    """Check defaults that depend on others."""
    params = kit.model(tmp_path).context(n_ctx=64, n_batch=16, n_threads=3, type_k="q8_0").params
    assert (params.n_ubatch, params.n_threads_batch, params.type_k) == (16, 3, 8)


@pytest.mark.parametrize(
    ("threads", "isolated", "named", "expected"),
    [
        (True, False, "", 3),
        (False, False, "", 1),
        (False, True, "", 3),
        (True, False, "2", 2),
        (False, False, "5", 5),
    ],
)
def test_default_threads_are_the_usable_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: bool,
    isolated: bool,
    named: str,
    expected: int,
) -> None:
    """All usable CPUs, or 1 if contexts in one process share a counter; the variable overrides."""
    monkeypatch.setattr(model_module, "usable_cpus", lambda: 3)
    monkeypatch.setenv("PYLLAMAKV_THREADS", named)
    capabilities = ALL | Capability.THREADS if threads else ALL
    library = kit.library(isolated=isolated, capabilities=capabilities)
    model = library.load_model(write_gguf(tmp_path / "tiny.gguf"))
    context = model.context(16)
    assert context.params.n_threads == context.params.n_threads_batch == expected
    assert context.info.n_threads == expected
    assert model.context(16, n_threads=4).info.n_threads == 4
    context.set_threads(6, 7)
    assert (context.info.n_threads, context.info.n_threads_batch) == (6, 7)


@pytest.mark.parametrize("named", ["0", "-1", "513", "two", "1.5"])
def test_a_wrong_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """The error has the limits; a number in the call needs no variable."""
    monkeypatch.setenv("PYLLAMAKV_THREADS", named)
    model = kit.model(tmp_path)
    with pytest.raises(UsageError, match="PYLLAMAKV_THREADS must be a number from 1 to 512"):
        model.context(16)
    assert model.context(16, n_threads=1).info.n_threads == 1


def test_the_default_threads_follow_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are chosen again at most four times a second, by each kind of decode."""
    now, free = [0.0], [2]
    monkeypatch.delenv("PYLLAMAKV_THREADS", raising=False)
    monkeypatch.setattr(model_module, "usable_cpus", lambda: 3)
    monkeypatch.setattr(decoder_module, "monotonic", lambda: now[0])
    monkeypatch.setattr(decoder_module, "free_cpus", lambda most: min(most, free[0]))
    library = kit.library(capabilities=ALL | Capability.THREADS)
    model = library.load_model(write_gguf(tmp_path / "tiny.gguf"))
    context = model.context(64, n_seq_max=2)
    assert (context.params.n_threads, context.info.n_threads) == (3, 3)
    a, b = context.sequence(), context.sequence()
    sampler = model.sampler()
    for wanted, decode in (
        (2, lambda: a.prefill([5, 6])),
        (1, lambda: a.step(7)),
        (3, lambda: context.step_all([a, b], [8, 9])),
        (1, lambda: context.advance([a], [8], 1, sampler)),
    ):
        free[0] = wanted
        before = context.info.n_threads
        now[0] += 0.2
        if wanted != 2:  # the first choice is due at once
            decode()
            assert context.info.n_threads == before
        now[0] += 0.2
        decode()
        info = context.info
        assert info.n_threads == info.n_threads_batch == wanted
    context.set_threads(3)
    fixed = [context, model.context(16, n_threads=3), model.context(16, n_threads_batch=3)]
    monkeypatch.setenv("PYLLAMAKV_THREADS", "3")
    fixed.append(model.context(16))
    free[0] = 1
    for each in fixed:
        now[0] += 1
        each.sequence() if each is not context else a.prefill([5])
        assert each.info.n_threads == 3
