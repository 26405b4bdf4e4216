"""Test adapters with a simulated library: requirements of a change, and their identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import adapter_kit
import pytest
from adapter_kit import AdapterFile
from fakes.simulated import ALL

import pyllamakv as kv
from pyllamakv.binding.protocol import Capability
from pyllamakv.cache.directory_tier import identity
from pyllamakv.errors import Closed, Unsupported, UsageError
from pyllamakv.runtime.adapter import digest, identify

if TYPE_CHECKING:
    from pathlib import Path


def test_adapters_are_set_and_removed(tmp_path: Path) -> None:
    """A context lists those in use; setting the same ones again changes nothing."""
    model = adapter_kit.simulated_model(tmp_path)
    one = model.load_adapter(AdapterFile().write(tmp_path / "one.gguf"))
    context = model.context(64, adapters={one: 0.5})
    assert context.adapters == {one: 0.5}
    with context.sequence() as sequence:
        sequence.prefill([5, 6, 7])
        logits = context.logits()
        context.set_adapters({one: 0.5})
        assert not logits.stale
        with pytest.raises(UsageError, match=r"sequences \[0\]"):
            context.set_adapters({})
        assert context.adapters == {one: 0.5}
    context.set_adapters({one: 0})
    assert context.adapters == {}
    assert logits.stale
    assert "one.gguf" in repr(one)


@pytest.mark.parametrize(
    "wrong",
    [None, [], {"one": 1.0}, {"adapter": "1"}, {"adapter": float("nan")}, {"adapter": 1e9}],
    ids=str,
)
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: Any) -> None:
    """They are refused by type and by range."""
    model = adapter_kit.simulated_model(tmp_path)
    one = model.load_adapter(AdapterFile().write(tmp_path / "one.gguf"))
    if isinstance(wrong, dict):
        wrong = {one if key == "adapter" else key: value for key, value in wrong.items()}
    with pytest.raises(UsageError):
        model.context(64).set_adapters(wrong)


def test_a_closed_adapter_is_refused(tmp_path: Path) -> None:
    """An adapter is closed with its model at the latest."""
    model = adapter_kit.simulated_model(tmp_path)
    one, two = (model.load_adapter(AdapterFile().write(tmp_path / "a.gguf")) for _ in range(2))
    one.close()
    one.close()
    with pytest.raises(Closed):
        model.context(64, adapters={one: 1.0})
    model.close()
    assert two.closed
    assert model.native.freed.count("adapter") == 2  # type: ignore[attr-defined]


def test_the_identity_has_content_and_scale(tmp_path: Path) -> None:
    """Names and order do not matter; scales are compared as 32-bit floats."""
    model = adapter_kit.simulated_model(tmp_path)
    files = [AdapterFile(seed=seed) for seed in (1, 1, 2)]
    one, same, other = (
        model.load_adapter(each.write(tmp_path / f"{n}.gguf")) for n, each in enumerate(files)
    )
    again = model.load_adapter(one.path)
    assert identify(()) == digest(()) == ""
    assert digest(((one, 1.0),)) == digest(((same, 1.0),))
    assert identify(((one, 1.0),)) == identify(((again, 1.0),)) != identify(((same, 1.0),))
    for name in (identify, digest):
        assert name(((one, 1.0), (other, 2.0))) == name(((other, 2.0), (one, 1.0)))
        assert len({name(((each, s),)) for each in (one, other) for s in (1.0, 2.0)}) == 4
    context = model.context(64, adapters={one: 0.1})
    context.set_adapters({again: 0.1})
    assert list(context.adapters) == [one]
    assert list(context.adapters.values()) != [0.1]


def test_prefix_store_identity_depends_on_adapters(tmp_path: Path) -> None:
    """Prefix stores of other adapters are not used."""
    model = adapter_kit.simulated_model(tmp_path)
    one = model.load_adapter(AdapterFile().write(tmp_path / "one.gguf"))
    plain, other = model.context(64), model.context(64, adapters={one: 1.0})
    assert identity(plain) != identity(other)


def test_a_refused_change_keeps_the_former_adapters(tmp_path: Path) -> None:
    """The graph may be too small for the adapters, or the release may have none."""
    model = adapter_kit.simulated_model(tmp_path)
    path = AdapterFile().write(tmp_path / "one.gguf")
    many = [model.load_adapter(path) for _ in range(3)]
    context = model.context(64, adapters={many[0]: 1.0})
    with pytest.raises(Unsupported, match="no room"):
        context.set_adapters(dict.fromkeys(many, 1.0))
    assert context.adapters == {many[0]: 1.0}
    with pytest.raises(Unsupported, match="no room"):
        model.context(64, adapters=dict.fromkeys(many, 1.0))
    assert model.native.freed.count("context") == 1  # type: ignore[attr-defined]
    old = adapter_kit.simulated_model(tmp_path, capabilities=ALL & ~Capability.ADAPTERS)
    with pytest.raises(Unsupported, match="ADAPTERS"):
        old.load_adapter(path)


@pytest.mark.slow
def test_a_recording_has_no_adapters(tmp_path: Path) -> None:
    """A replay would compute other logits."""
    model = adapter_kit.simulated_model(tmp_path)
    one = model.load_adapter(AdapterFile().write(tmp_path / "one.gguf"))
    context = model.context(64, adapters={one: 1.0})
    with pytest.raises(Unsupported, match="trace"), kv.record(context, tmp_path / "trace"):
        pass
    context.set_adapters({})
    with kv.record(context, tmp_path / "trace"), pytest.raises(Unsupported, match="trace"):
        context.set_adapters({one: 1.0})
    assert context.adapters == {}
