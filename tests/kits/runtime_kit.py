"""Helpers for tests of the runtime without a build: a simulated library, a model, contexts."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest
from fakes.simulated import SimulatedNative
from fakes.tiny_gguf import write_gguf

from pyllamakv.open_variant import OpenLibrary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.model import Model


@dataclass
class Held:
    """A fake opened library."""

    native: object
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Opener:
    """Open a simulated library for each call, and keep a list of them."""

    make: Any
    opened: list[Held] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, path: Path, environment: dict[str, str]) -> Held:
        self.environments.append(environment)
        made = self.make(path) if getattr(self.make, "by_path", False) else self.make()
        self.opened.append(Held(made))
        return self.opened[-1]


def library(*, isolated: bool = False, **options: Any) -> OpenLibrary:
    """Return an opened library that is simulated."""
    return OpenLibrary(SimulatedNative(**options), Path("simulated"), None, isolated=isolated)


def model(folder: Path, **options: Any) -> Model:
    """Return a model of a simulated library."""
    return library(**options).load_model(write_gguf(folder / "tiny.gguf"))


def context(folder: Path, native: dict[str, Any] | None = None, **options: Any) -> Context:
    """Return a context, by default of 64 cells and 4 sequences."""
    wanted = {"n_ctx": 64, "n_batch": 32, "n_ubatch": 8, "n_seq_max": 4, **options}
    return model(folder, **(native or {})).context(**wanted)


def ours(function: FunctionType) -> FunctionType:
    """Return a function whose frames count as the package's: it replaces a part of it."""
    names = {**function.__globals__, "__name__": "pyllamakv.replaced"}
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextmanager
def interrupted(owner: Any, names: Iterable[str], number: int) -> Iterator[list[str]]:
    """Send a signal when the call of this number returns; count the calls of methods from 1.

    Its handler is that of Ctrl-C. The signal is another one, as SIGTERM, which Python does not
    handle in a way of its own. Yields the names of the calls so far.
    """
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            calls.append(name)
            if len(calls) == number:
                signal.raise_signal(signal.SIGUSR1)
            return result

        return call

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(owner, name, wrap(name, getattr(owner, name)))
            yield calls
    finally:
        signal.signal(signal.SIGUSR1, before)
