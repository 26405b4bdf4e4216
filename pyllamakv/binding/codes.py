"""Translate the status codes of ``plk.h`` into exceptions: the one place that does."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal

from pyllamakv.errors import (
    AdapterError,
    ContextError,
    GrammarError,
    KvError,
    KVFileBusy,
    KVFileDamaged,
    KVFileDirty,
    KVFileError,
    KVFileForeign,
    KVFileFull,
    ModelError,
    NativeError,
    NotEnoughMemory,
    NoTokenAllowed,
    PartialRemovalRefused,
    StateError,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.binding.protocol import Capability

Doing = Literal["library", "model", "context", "decode", "sequence", "cache", "state", "sampler"]


class Code(IntEnum):
    """Number the failures as ``plk.h`` does (``PLK_E*``)."""

    EINVAL = -1001
    EUNSUPPORTED = -1002
    EEXCEPTION = -1003
    EMEMORY = -1004
    EMODEL = -1005
    ECONTEXT = -1006
    EREFUSED = -1007
    ESTATE = -1008
    ESPACE = -1009
    EBUSY = -1010
    EDIRTY = -1011
    EFOREIGN = -1012
    EDAMAGED = -1013
    EGRAMMAR = -1014
    ENOTOKEN = -1015
    EADAPTER = -1016


#: Codes up from this value come from llama.cpp, lower ones from the shim.
OWN: Final = -1000

_MEANS: Final = {
    Code.EINVAL: "an argument was refused",
    Code.EUNSUPPORTED: "this library cannot do that",
    Code.EEXCEPTION: "llama.cpp threw an exception",
    Code.EMEMORY: "an allocation failed",
    Code.EMODEL: "the model file cannot be loaded",
    Code.ECONTEXT: "the context cannot be made",
    Code.EREFUSED: "the memory refused",
    Code.ESTATE: "the state cannot be read or written",
    Code.ESPACE: "there is no room for the file of the cache",
    Code.EBUSY: "the file of the cache is in use",
    Code.EDIRTY: "the file of the cache was left unfinished",
    Code.EFOREIGN: "the file is not one of this cache",
    Code.EDAMAGED: "the file of the cache is damaged",
    Code.EGRAMMAR: "the grammar does not parse",
    Code.ENOTOKEN: "no token is allowed as the next one",
    Code.EADAPTER: "the adapter cannot be loaded",
}

#: The place that the shim writes before the message about a grammar.
_PLACE: Final = re.compile(r"line (\d+), column (\d+): ")

#: What llama.cpp and ggml log about a failed allocation.
_ALLOCATION: Final = re.compile(
    r"(failed|unable) to allocate|insufficient memory|out of memory|bad_alloc", re.IGNORECASE
)

_FILE: Final[dict[int, tuple[type[KVFileError], str]]] = {
    Code.ESPACE: (KVFileFull, "free space, or choose another directory or a smaller n_ctx"),
    Code.EBUSY: (KVFileBusy, "close the other context first, or choose another file"),
    Code.EDIRTY: (KVFileDirty, "evaluate again with kv_keep='fresh', which forgets its content"),
    Code.EFOREIGN: (KVFileForeign, "choose another file, or forget a cache by kv_keep='fresh'"),
    Code.EDAMAGED: (KVFileDamaged, "evaluate again with kv_keep='fresh', which forgets it"),
}

#: Failed decodes are not listed: only the runtime knows whether the sequences kept their tokens.
_DOING: Final[dict[str, type[NativeError]]] = {
    "model": ModelError,
    "context": ContextError,
    "state": StateError,
}


def error(
    code: int,
    what: str,
    text: str = "",
    *,
    doing: Doing = "library",
    log: Sequence[str] = (),
    capability: Capability | None = None,
) -> KvError:
    """Return the exception for a negative code of one call.

    ``what`` describes the call, ``text`` is the library's last error, and ``doing`` is the object
    in use, which selects among the classes of one code.
    """
    means = _MEANS.get(code, f"llama.cpp returned {code}")  # type: ignore[call-overload]
    message = f"{what}: {means}" + (f": {text}" if text else "")
    if code == Code.EUNSUPPORTED:
        return Unsupported(
            message, (capability.name or "").lower() if capability else "", reason=text
        )
    if code == Code.EGRAMMAR:
        place = _PLACE.match(text)
        line, column = map(int, place.groups()) if place else (0, 0)
        return GrammarError(f"{means}: {text}", line=line, column=column)
    if code == Code.ENOTOKEN:
        return NoTokenAllowed(f"{message}; relax the grammar, the schema or the logit biases")
    if code == Code.EREFUSED and doing in {"sequence", "cache"}:
        return PartialRemovalRefused(message)
    allocation = any(map(_ALLOCATION.search, (text, *log)))
    if doing == "context" and (
        code == Code.EMEMORY or (allocation and code in (Code.ECONTEXT, Code.EEXCEPTION))
    ):
        small = NotEnoughMemory(f"{message}; make n_ctx or n_seq_max smaller")
        small.code, small.log = code, tuple(log)
        return small
    if code in _FILE:
        of_file, hint = _FILE[code]
        return of_file(f"{message}; {hint}", code=code, log=log)
    kind = {
        Code.EMODEL: ModelError,
        Code.ECONTEXT: ContextError,
        Code.ESTATE: StateError,
        Code.EADAPTER: AdapterError,
    }.get(code) or _DOING.get(doing, NativeError)  # type: ignore[call-overload]
    return kind(message, code=code, log=log)
