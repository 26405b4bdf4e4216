"""Test the argument checks: accepted values, and errors that name the argument and the value."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runtime_kit as kit
from native_kit import built

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import ContextParams, ModelParams, SamplerParams
from pyllamakv.cache.context_cache import ContextCache
from pyllamakv.errors import ArgumentTypeError, KvError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_python_and_numpy_become_int(value: Any) -> None:
    """An int or a numpy integer becomes an int."""
    found = arguments.integer("n", value, 0, 5)
    assert (found, type(found)) == (3, int)
    assert arguments.whole_or_none("n", None) is None


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float32(2), NAN, "2", b"2", None, [2]])
def test_bool_or_float_as_integer_raises_a_type_error(value: Any) -> None:
    """Neither a bool nor a float is accepted, not even 2.0; it is a TypeError and UsageError."""
    with pytest.raises(TypeError, match="n must be a whole number from 0 to 5, not") as caught:
        arguments.integer("n", value, 0, 5)
    assert isinstance(caught.value, UsageError)
    if value is not None:
        with pytest.raises(ArgumentTypeError, match="or None"):
            arguments.whole_or_none("n", value, 0, 5)


def test_limits_are_included() -> None:
    """Check the limits of a range, and a number that cannot be printed."""
    assert [arguments.integer("n", n, 1, 3) for n in (1, 3)] == [1, 3]
    for n in (0, 4, -(10**30), 10**5000):
        with pytest.raises(UsageError, match="from 1 to 3") as caught:
            arguments.integer("n", n, 1, 3)
        assert not isinstance(caught.value, TypeError)


def test_infinite_and_nan_floats_are_refused() -> None:
    """Check floats, and that a bool is not one."""
    assert arguments.number("x", 1) == 1.0
    assert arguments.number("x", np.float32(0.5)) == 0.5
    for wrong in (NAN, INF, -INF, 1e300, 10**400):
        with pytest.raises(UsageError, match="a finite number"):
            arguments.number("x", wrong)
    for kind in (True, "1", None, 1j):
        with pytest.raises(ArgumentTypeError):
            arguments.number("x", kind)


def test_flags_accept_only_documented_values() -> None:
    """Exactly two, or three, documented values are accepted."""
    assert arguments.flag("f", np.True_) is True
    for wrong in (1, 0, None, "on"):
        with pytest.raises(ArgumentTypeError, match="True or False"):
            arguments.flag("f", wrong)
    right = {True: True, False: False, None: None, "auto": None, "on": True, "off": False}
    assert {each: arguments.flash_attn(each) for each in right} == right
    for wrong in (0, 1, 2, -5, 10**6, np.int64(3), 1.0, "yes", b"on", ""):
        with pytest.raises(UsageError, match="flash_attn must be True"):
            arguments.flash_attn(wrong)


def test_text_with_nul_or_surrogates_is_refused() -> None:
    """C would read up to a NUL; a lone surrogate has no UTF-8 encoding."""
    assert arguments.c_text("t", "\u00e4\U0001f600") == "\u00e4\U0001f600"
    assert arguments.c_text("t", "") == ""
    for wrong in ("a\0b", "\ud800"):
        with pytest.raises(UsageError, match="NUL"):
            arguments.c_text("t", wrong)
    with pytest.raises(ArgumentTypeError):
        arguments.c_text("t", b"bytes")


def test_invalid_paths_and_endless_items_are_refused(tmp_path: Path) -> None:
    """Check paths that are text, and lists that are finite."""
    assert arguments.path("p", tmp_path) == arguments.path("p", str(tmp_path)) == tmp_path
    for wrong in ("", "a\0b", b"bytes", 3, None):
        with pytest.raises(UsageError, match="p must be"):
            arguments.path("p", wrong)
    assert arguments.items("i", (n for n in (1, 2)), "numbers") == [1, 2]
    for wrong in ("text", b"bytes", {1: 2}, 5, range(2**62), range(2**70)):
        with pytest.raises(UsageError, match="i must be numbers"):
            arguments.items("i", wrong, "numbers")


class _Sulky:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_shown_value_has_a_limited_length() -> None:
    """A message is short for any value."""
    long = ("x" * 10**6, b"x" * 10**6, 10**5000, -(10**5000), [0] * 10**6, np.zeros(10**6))
    for value in (*long, range(2**70), _Sulky(), dict.fromkeys(range(1000))):
        assert len(arguments.shown(value)) <= 80


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((ContextParams, {"flash_attn": wrong}) for wrong in (2, 3, -2, 10**6, np.int64(3), 1)),
        *((ContextParams, {name: 1.0}) for name in ("n_ctx", "n_batch", "type_k", "defrag_plan")),
        *((ContextParams, {name: -1}) for name in ("n_ctx", "n_threads", "type_v", "kv_keep")),
        *((ContextParams, {name: 1}) for name in ("kv_unified", "guard", "kv_huge", "embeddings")),
        *((ContextParams, {name: 2**31}) for name in ("n_seq_max", "n_ubatch", "kv_backing")),
        *((ContextParams, {"defrag_thold": wrong}) for wrong in (NAN, INF, "0", None)),
        *((ContextParams, {name: "a\0b"}) for name in ("kv_path", "kv_model")),
        *((ModelParams, {"n_gpu_layers": wrong}) for wrong in (-1, 2**31, 1.0, True, None)),
        *((ModelParams, {name: 1}) for name in ("use_mmap", "use_mlock", "vocab_only")),
        *((ModelParams, {name: b"a"}) for name in ("rpc_servers", "devices")),
        *((SamplerParams, {"seed": wrong}) for wrong in (-1, 2**32 - 1, 1.5)),
        *((SamplerParams, {"temperature": wrong}) for wrong in (-1.0, NAN, INF, 1e300, "1")),
        *((SamplerParams, {name: 1.1}) for name in ("top_p", "min_p", "top_k")),
        *((SamplerParams, {"penalty_last_n": wrong}) for wrong in (-1, 2**31 - 1, 1.0)),
        *((SamplerParams, {"penalty_repeat": wrong}) for wrong in (0.0, -1.0, NAN, 1e30)),
        *((SamplerParams, {name: NAN}) for name in ("typical_p", "dry_base", "mirostat_tau")),
        *((SamplerParams, {"mirostat": wrong}) for wrong in (-1, 3, True)),
        *((SamplerParams, {"mirostat": 1}), (SamplerParams, {"adaptive_target": 0.5})),
        *((SamplerParams, {"logit_bias": wrong}) for wrong in ({1: NAN}, {1: INF}, {-1: 0}, 5)),
        *((SamplerParams, {"logit_bias": wrong}) for wrong in ([(1, 2, 3)], [1], {"a": 1})),
        *((SamplerParams, {"dry_breakers": wrong}) for wrong in ("a", [""], ["a\0"], ["\x1f"])),
        *((SamplerParams, {"samplers": wrong}) for wrong in ("top_k", ["top-k"], [1])),
        *((SamplerParams, {"samplers": [], name: 0.5}) for name in ("min_p", "typical_p", "top_p")),
        (SamplerParams, {"grammar": "a\0"}),
    ],
)
def test_records_check_every_field(kind: Callable[..., Any], words: dict[str, Any]) -> None:
    """Check types and ranges; the message names the field."""
    with pytest.raises(UsageError, match=next(iter(words))):
        kind(**words)


def test_numpy_values_become_those_of_python() -> None:
    """C and workers get plain values."""
    params = ContextParams(n_ctx=np.int64(64), kv_unified=np.True_, flash_attn="on")
    assert (type(params.n_ctx), params.kv_unified, params.flash_attn) == (int, True, True)
    assert type(SamplerParams(temperature=np.float32(1)).temperature) is float


def test_formerly_accepted_invalid_arguments_are_refused(tmp_path: Path) -> None:
    """Each of these changed a state, or was interpreted as another value."""
    ctx = kit.context(tmp_path)
    a, b = ctx.sequence(), ctx.sequence()
    a.prefill([1, 2, 3])
    b.prefill([1, 2])
    for wrong in (
        lambda: ctx.step_all([a, b], b"ab"),
        lambda: ctx.step_all([a, b], [1, True]),
        lambda: a.step(True),
        lambda: ctx.step_all(5, [1]),
        lambda: a.remove(1, NAN),
        lambda: a.trim(1.5),
        lambda: a.shift(0, None, 2.0),
        lambda: ctx.model.piece(1.0),
        lambda: ctx.model.context(flash_attn=2),
        lambda: ctx.sequence(True),
        lambda: a.feed([1, True]),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError, match=r"the bytes that Sequence\.save"):
        a.restore("path")
    assert (a.tokens, b.tokens) == ([1, 2, 3], [1, 2])
    a.close()
    b.close()
    cache = ContextCache(ctx)
    cache.start_forward([1, 2, 3], [0, 1, 2], [0, 0, 0])
    for wrong in (
        lambda: cache.remove(0, 1, NAN),
        lambda: cache.copy_prefix(0, 1, 2.5),
        lambda: cache.length(0.0),
        lambda: cache.start_forward([1], [3.0], [0]),
    ):
        with pytest.raises(TypeError):
            wrong()
    assert [cache.length(n) for n in range(2)] == [3, 0]


#: Parameters that only C checks, because the record in Python has been changed: each ended the
#: process, or took 8 GiB.
NATIVE = """
import sys
import pyllamakv as kv
from pyllamakv.binding.protocol import ContextParams, ModelParams, SamplerParams
from pyllamakv.scenarios import synthetic_models
native = kv.open(sys.argv[1]).native
model = native.model_load(str(synthetic_models.tiny()), ModelParams())
def changed(record, name, value):
    object.__setattr__(record, name, value)
    return record
for value in (2, -2, 10**6):
    try:
        native.context_new(model, changed(ContextParams(n_ctx=64), "flash_attn", value))
    except kv.KvError as error:
        assert "flash_attn" in str(error), error
    else:
        raise SystemExit(f"flash_attn {value} was accepted")
try:
    native.sampler_new(model, changed(SamplerParams(), "penalty_last_n", 2**31 - 1))
except kv.KvError as error:
    assert "penalty_last_n" in str(error), error
else:
    raise SystemExit("penalty_last_n was accepted")
many = native.context_new(model, ContextParams(n_ctx=64, n_batch=8, n_ubatch=8, n_seq_max=40))
assert native.decode(many, [1], [0], None, (0,), None) == 0
print("completed")
"""


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("kind", ["stock", "patched"])
@pytest.mark.parametrize("release", ["0.3.9", "0.3.16", "0.3.36"])
def test_arguments_beyond_python_checks_do_not_end_the_process(release: str, kind: str) -> None:
    """Check values that pass Python's checks, and more sequences than a batch has tokens."""
    built(f"{release}+{kind}")
    done = subprocess.run(
        [sys.executable, "-c", NATIVE, f"{release}+{kind}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "completed\n", done.stderr[-500:]


def test_type_errors_of_arguments_are_kv_errors() -> None:
    """A handler for KvError catches errors of type as well."""
    assert issubclass(ArgumentTypeError, KvError)
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(ArgumentTypeError, ValueError)
