"""Generate the methods of a class that forwards the operations of a Protocol.

`remote.Remote` (the worker proxy) and the recorder of `traces` use it, so that an operation
of `protocol.Native` is written once. The parameters of a generated method have their real names,
which takes compiled source, as in `dataclasses`: a closure over ``*args`` would accept any call and
fail elsewhere, and `inspect.Signature.bind` costs more than the call itself.
"""

from __future__ import annotations

import inspect
import linecache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import FunctionType

_T = TypeVar("_T")


def operations(protocol: type) -> dict[str, FunctionType]:
    """Return the public methods that a Protocol and its bases declare, by name."""
    return {
        name: value
        for base in reversed(protocol.__mro__)
        if getattr(base, "_is_protocol", False)
        for name, value in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }


def forwards(
    protocol: type,
    *,
    via: str,
    by_hand: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator that generates a method for each operation of ``protocol``.

    A generated method has the Protocol's parameters and docstring, and returns ``self.via(name,
    *arguments)``; an operation annotated ``-> None`` drops the result. The class itself, or a base,
    defines the operations in ``by_hand`` and the method ``via``. ``only`` restricts generation to
    some operations (default: all that are not in ``by_hand``).

    The decorator raises TypeError if a name is no operation of ``protocol``, if a method that
    should be written by hand is missing, if the class defines a method that would be generated,
    or if an operation has parameters other than plain positional ones.
    """

    def complete(cls: type[_T]) -> type[_T]:
        known = operations(protocol)
        named = known if only is None else only
        for name in (*by_hand, *named):
            if name not in known:
                raise _wrong(cls, f"{name} is no operation of {protocol.__name__}")
        for name in (via, *by_hand):
            if not callable(getattr(cls, name, None)):
                raise _wrong(cls, f"define {name}, which is not generated")
        wanted = {name: known[name] for name in named if name not in by_hand}
        for name in wanted:
            if name in vars(cls):
                raise _wrong(cls, f"{name} would be replaced: list it in by_hand, or remove it")
        source = "\n".join(_source(cls, name, each, via) for name, each in wanted.items())
        file = f"<{protocol.__name__} forwarded by {cls.__module__}.{cls.__qualname__}.{via}>"
        made: dict[str, Any] = {"__name__": cls.__module__}
        exec(compile(source, file, "exec"), made)
        # Tracebacks show the generated lines.
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        for name, original in wanted.items():
            method = made[name]
            method.__qualname__ = f"{cls.__qualname__}.{name}"
            method.__doc__ = original.__doc__
            method.__annotations__ = dict(original.__annotations__)
            setattr(cls, name, method)
        return cls

    return complete


def _source(cls: type, name: str, operation: FunctionType, via: str) -> str:
    """Return the source of a method that forwards one operation."""
    signature = inspect.signature(operation)
    for each in signature.parameters.values():
        if each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not each.empty:
            message = f"parameter {each} of {name} has a default or is not plain positional"
            raise _wrong(cls, f"{message}; list {name} in by_hand")
    self, *parameters = signature.parameters
    arguments = "".join(f", {each}" for each in parameters)
    # Annotations are text in every module of the binding; their names need not exist at run time.
    returns = "" if signature.return_annotation in ("None", None) else "return "
    return f"def {name}({self}{arguments}):\n    {returns}{self}.{via}({name!r}{arguments})\n"


def _wrong(cls: type, what: str) -> TypeError:
    return TypeError(f"cannot generate the operations of {cls.__qualname__}: {what}")
