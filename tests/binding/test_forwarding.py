"""Test that proxy and recorder get each operation of the Protocol without an edit."""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
import runtime_kit

from pyllamakv.binding import protocol, worker
from pyllamakv.binding.forwarding import forwards, operations
from pyllamakv.binding.local import Local
from pyllamakv.binding.protocol import Native
from pyllamakv.binding.remote import Remote
from pyllamakv.traces.recording_native import RecordingNative

NAMES = sorted(operations(Native))


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


class Small(Protocol):
    def add(self, left: int, right: int) -> int:
        """Add."""

    def forget(self, what: str) -> None:
        """Forget."""


class Asking:
    def _ask(self, *words: Any) -> Any:
        self.asked = words
        return words


class Wider(Native, Protocol):
    """A Protocol with one more operation."""

    def warm(self, context: int, depth: int) -> int:
        """Warm a context."""


def again(name: str) -> ModuleType:
    """Execute a module of the package again, beside the imported one."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_operations_come_from_every_base() -> None:
    """Operations of a base belong to a Protocol; attributes are not operations."""
    assert set(operations(Wider)) == {*NAMES, "warm"}
    assert not {"about", "environment"} & set(NAMES)
    assert {*NAMES, "many", "rpc_serve"} == worker.OPERATIONS


@pytest.mark.parametrize("name", NAMES)
def test_the_proxy_has_every_operation(name: str) -> None:
    """They have the parameters of the Protocol, which are those of the library."""
    method, declared = getattr(Remote, name), operations(Native)[name]
    assert parameters(method) == parameters(declared)
    assert method.__doc__
    assert (method.__name__, method.__qualname__) == (name, f"Remote.{name}")
    assert method.__module__ == Remote.__module__
    assert parameters(getattr(Local, name)) == parameters(declared)


@pytest.mark.parametrize("name", NAMES)
def test_operations_with_tuples_and_frees_are_not_generated(name: str) -> None:
    """Messages change tuples to lists, and a finaliser that frees must not wait for a call."""
    text = str(inspect.signature(operations(Native)[name]).return_annotation)
    code = getattr(Remote, name).__code__
    if "tuple" in text or name.endswith("_free"):
        assert not (code.co_filename.startswith("<") and "_ask" in code.co_names)


def test_the_recorder_has_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the parameters of the Protocol; others need no edit."""
    monkeypatch.setattr(protocol, "Native", Wider)
    wider = again("pyllamakv.traces.recording_native").RecordingNative

    with runtime_kit.context(tmp_path) as context:
        inner = context.native
        # The simulated library lacks operations that the runtime does not use.
        for name in [name for name in operations(Wider) if not hasattr(inner, name)]:
            monkeypatch.setattr(type(inner), name, operations(Wider)[name], raising=False)
        monkeypatch.setattr(type(inner), "warm", lambda self, context, depth: depth + 1)
        notes = type("Quiet", (), {"rows": [], "count": lambda self, look: None})()
        for kind, names in ((RecordingNative, NAMES), (wider, [*NAMES, "warm"])):
            tap = kind(context, notes)
            for name in names:
                declared = operations(Wider)[name]
                method = getattr(tap, name)
                if name in vars(kind):
                    assert parameters(method) == parameters(declared), name
                else:
                    assert method == getattr(inner, name), name
        assert tap.warm(context.handle, 3) == 4


def test_a_new_operation_needs_no_edit_of_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's source forwards an operation that the Protocol adds."""
    monkeypatch.setattr(protocol, "Native", Wider)
    kind = again("pyllamakv.binding.remote").Remote
    asked: list[Any] = []
    proxy = kind.__new__(kind)
    proxy._ask = lambda *words: asked.append(words) or 5
    assert proxy.warm(3, depth=4) == 5
    assert asked == [("warm", 3, 4)]
    assert not hasattr(Remote, "warm")


@pytest.mark.parametrize(
    "module", ["pyllamakv.binding.remote", "pyllamakv.traces.recording_native"]
)
def test_handwritten_method_without_an_operation_is_refused(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method or a note for an operation that does not exist fails the import."""
    monkeypatch.setattr(protocol, "Native", Small)
    with pytest.raises(TypeError, match="is no operation of Small"):
        again(module)


def test_generated_methods_have_the_declared_signatures() -> None:
    """They look like written ones, and discard the result of operations without one."""
    kind = forwards(Small, via="_ask")(type("Made", (Asking,), {}))
    made = kind()
    assert made.add(1, right=2) == ("add", 1, 2)
    assert made.forget("a") is None
    assert made.asked == ("forget", "a")
    assert str(inspect.signature(kind.add)) == str(inspect.signature(Small.add))
    assert (kind.add.__doc__, kind.add.__qualname__) == ("Add.", "Made.add")
    with pytest.raises(TypeError, match=r"Made\.add\(\) missing 1 required .* 'right'"):
        made.add(1)
    with pytest.raises(TypeError, match=r"Made\.add\(\) got an unexpected keyword argument 'x'"):
        made.add(1, x=2)


def test_tracebacks_show_generated_lines() -> None:
    """The traceback of a library's error has the line of the call."""

    def ask(self: object, *words: object) -> None:
        raise ValueError("no")

    made = forwards(Small, via="_ask")(type("Failing", (), {"_ask": ask}))()
    with pytest.raises(ValueError, match="no") as caught:
        made.add(1, 2)
    assert "return self._ask('add', left, right)" in "".join(
        traceback.format_exception(caught.value)
    )


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ({}, {"by_hand": ("add",)}, "Wrong: define add"),
        ({}, {"via": "_send"}, "Wrong: define _send"),
        ({}, {"by_hand": ("subtract",)}, "subtract is no operation of Small"),
        ({}, {"only": ("subtract",)}, "subtract is no operation of Small"),
        ({"add": lambda self, left, right: 0}, {}, "add would be replaced"),
    ],
)
def test_class_without_a_handwritten_operation_is_refused(
    members: dict, options: dict, message: str
) -> None:
    """A class that lacks a required method is not created."""
    with pytest.raises(TypeError, match=message):
        forwards(Small, **{"via": "_ask", **options})(type("Wrong", (Asking,), members))


def test_defaults_and_keywords_in_the_protocol_are_refused() -> None:
    """The wire would lose defaults and keywords."""

    class Optional(Protocol):
        def add(self, left: int, right: int = 0) -> int:
            """Add."""

    class Keyword(Protocol):
        def add(self, left: int, *, right: int) -> int:
            """Add."""

    for declared in (Optional, Keyword):
        with pytest.raises(TypeError, match="list add in by_hand"):
            forwards(declared, via="_ask")(type("Wrong", (Asking,), {}))
