"""Bases for objects that own a resource: used in a `with` statement, and never copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pyllamakv.errors import ArgumentTypeError

if TYPE_CHECKING:
    from types import TracebackType


class NotCopied:
    """Refuse `copy`, `deepcopy` and `pickle`: a copy would use what the original closes."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Any:
        msg = (
            f"a {type(self).__name__} cannot be copied or pickled, because it owns native memory, "
            "files or threads: use the object itself, or create another one"
        )
        raise ArgumentTypeError(msg)


class PublicDir:
    """Omit from `dir`, and so from completion, the names for other modules of the package."""

    __slots__ = ()
    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._internal]


class ClosedOnExit(NotCopied, PublicDir, ABC):
    """Call `close()` at the end of a `with` block. Subclasses define `close()`."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
