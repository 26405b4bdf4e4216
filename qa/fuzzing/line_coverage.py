"""Count the lines of some modules that run for the first time.

A function whose lines have all run is no longer traced, so that the loop gets faster.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, Self


class LineCoverage:
    """Trace modules within a block; ``seen`` lines of ``total``."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.codes = [code for name in modules for code in _codes(importlib.import_module(name))]
        self._unseen = {
            code: {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
            for code in self.codes
        }
        self.total = sum(map(len, self._unseen.values()))
        self.seen = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        if self.seen < self.total:
            sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._step if self._unseen.get(frame.f_code) else None

    def _step(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            unseen = self._unseen[frame.f_code]
            if frame.f_lineno in unseen:
                unseen.discard(frame.f_lineno)
                self.seen += 1
        return self._step


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of every function that a module defines."""
    for value in vars(module).values():
        yield from _of(value, module.__name__)


def _of(value: Any, module: str) -> Iterator[CodeType]:
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _of(part, module)
    elif isinstance(value, classmethod | staticmethod):
        yield from _of(value.__func__, module)
    elif inspect.isclass(value) and value.__module__ == module:
        for part in vars(value).values():
            yield from _of(part, module)
    elif inspect.isfunction(value) and value.__module__ == module:
        yield from _nested(value.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    if not code.co_filename.startswith("<"):  # as what a dataclass writes for itself
        yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
