"""Select the memory of a KV cache, measure it, return it to the system, and store it in a file.

`Model.context` takes ``kv_backing``: "heap", as in llama.cpp; "mmap", memory that is committed page
by page when cells are written; a directory, for an unnamed temporary file in it; or a file. A file
may be kept: the next process can use the content written by `KV.flush`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Backing, Capability
from pyllamakv.content_digest import is_digest
from pyllamakv.errors import (
    KVFileDamaged,
    KVFileDirty,
    KVFileError,
    KVFileForeign,
    ModelUnverified,
    Unsupported,
    UsageError,
)
from pyllamakv.runtime import adapter, flushed_copy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllamakv.binding.protocol import (
        ContextHandle,
        ContextParams,
        ModelHandle,
        Native,
        RawCells,
    )
    from pyllamakv.runtime.adapter import AdapterScales
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.parts import ContextParts, ModelParts

LOG = logging.getLogger("pyllamakv.runtime")

KeepName = Literal["fresh"]

#: In the identity of a kept file: what precedes the digest of the adapters, and the digest of a
#: model without one.
_ADAPTERS, UNVERIFIED = " with adapters ", "unverified"


@dataclass(frozen=True, slots=True)
class BackingChoice:
    """A checked choice in the format of `ContextParams`; ``what`` is the user's value."""

    kind: Backing = Backing.HEAP
    path: str | None = None
    keep: int = 0
    huge: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory of K and V of one layer of one cache, in bytes of whole pages."""

    cache: int
    layer: int
    reserved: int
    committed: int


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The memory of a cache.

    ``reserved`` is address space, ``committed`` the resident part of it (None for a heap cache,
    where it is unknown), and ``file`` disk space, all in bytes. ``on_devices`` are bytes of K and V
    of layers on devices, which are not mapped. ``kept``: `KV.flush` has an effect. ``resumed``:
    cells were loaded from the file. ``generation`` counts flushes of the file.
    """

    kind: Backing
    reserved: int
    committed: int | None
    file: int = 0
    on_devices: int = 0
    kept: bool = False
    resumed: bool = False
    generation: int = 0
    layers: tuple[LayerMemory, ...] = ()


def choose(
    model: ModelParts,
    backing: str | os.PathLike[str],
    keep: bool | KeepName,
    huge: bool,
    adapters: AdapterScales = (),
    *,
    accept: bool = False,
) -> BackingChoice:
    """Return a checked choice, or raise UsageError, Unsupported or the errors of `_kept_for`."""
    huge = arguments.flag("kv_huge", huge)
    if isinstance(keep, str):
        arguments.choice("kv_keep", keep, ("fresh",))
    elif not isinstance(keep, bool | np.bool_):
        raise arguments.wrong_type("kv_keep", keep, "True, False or 'fresh'")
    if not isinstance(backing, str | os.PathLike):
        raise arguments.wrong_type("kv_backing", backing, "'heap', 'mmap' or a pathlib.Path")
    if not isinstance(backing, str):
        backing = arguments.path("kv_backing", backing)
    if isinstance(backing, str) and backing not in ("heap", "mmap"):
        msg = (
            f"kv_backing must be 'heap', 'mmap' or a path, not {arguments.shown(backing)}: pass a "
            f"file or "
            f"a directory as pathlib.Path({arguments.shown(backing)})"
        )
        raise UsageError(msg)
    if keep and isinstance(backing, str):
        msg = f"kv_backing {backing!r} ends with the process: pass a path to keep the cache"
        raise UsageError(msg)
    if backing == "heap":
        if huge:
            msg = "kv_huge needs mapped memory: pass kv_backing='mmap' or a path"
            raise UsageError(msg)
        return BackingChoice()
    if Capability.MAPPING not in model.native.about.capabilities:
        msg = (
            "this build keeps its cache on the heap only: kv_backing needs a variant with the "
            "patch mmap-kv, on Linux or macOS"
        )
        raise Unsupported(msg, "MAPPING")
    if backing == "mmap":
        return BackingChoice(Backing.ANONYMOUS, huge=huge)
    path = Path(backing).absolute()
    if keep and path.is_dir():
        msg = f"{path} is a directory; name a file in it to keep the cache"
        raise UsageError(msg)
    number = 0 if not keep else 2 if keep == "fresh" else 1
    kept_for = _kept_for(model, path, adapters, accept=accept) if keep else None
    return BackingChoice(Backing.FILE, str(path), number, huge, kept_for)


def _kept_for(model: ModelParts, path: Path, adapters: AdapterScales, *, accept: bool) -> str:
    """Return the identity that a kept file must have, or gets: digests of model and adapters.

    With ``accept``, it is that of the file, if its model or this one is unverified. The library
    refuses a file with another one. Raises ModelUnverified.
    """
    applied = adapter.digest(adapters)
    try:
        own = model.digest()
    except ModelUnverified:
        if not accept:
            raise
        own = UNVERIFIED
    here = f"{own}{_ADAPTERS}{applied}" if applied else own
    there = flushed_copy.kept_for(path) if accept else None
    if there is None:
        return here
    kept, _, with_adapters = there.partition(_ADAPTERS)
    verified = is_digest(kept) and is_digest(own)
    return here if verified or with_adapters != applied else there


def read(native: Native, handle: ContextHandle) -> KVMemory:
    """Return the memory of the cache. The caller holds the context's lock."""
    # The environment may have selected another backing.
    try:
        raw = native.mapping(handle)
    except Unsupported:
        cells = [raw.info for raw in _cells(native, handle)]
        return KVMemory(Backing.HEAP, sum(each.bytes_k + each.bytes_v for each in cells), None)
    info = raw.info
    sums: dict[tuple[int, int], list[int]] = {}
    for cache, layer, _is_v, reserved, committed in raw.rows.tolist():
        of = sums.setdefault((cache, layer), [0, 0])
        of[0] += reserved
        of[1] += committed
    return KVMemory(
        kind=info.kind,
        reserved=info.bytes_reserved,
        committed=info.bytes_committed,
        file=info.bytes_file,
        on_devices=info.bytes_elsewhere,
        kept=info.kept,
        resumed=info.resumed,
        generation=info.generation,
        layers=tuple(LayerMemory(*where, *sizes) for where, sizes in sorted(sums.items())),
    )


class KVFile:
    """Keep the cache of one context in its file; outlives the context until that is freed."""

    def __init__(self, native: Native, ledgers: tuple[Ledger, ...], path: str | None) -> None:
        self._native = native
        self._ledgers = ledgers
        self._path = path
        #: False if `close` must not change the file.
        self.flushes = True

    def flush(self, handle: ContextHandle) -> None:
        """Write everything to the file. No other thread may use the context meanwhile."""
        # Pending operations may move cells, and the written tokens must match the cells.
        self._native.update(handle)
        parts = [_tokens(raw, self._ledgers) for raw in _cells(self._native, handle)]
        self._native.mapping_flush(handle, np.concatenate(parts))
        if self._path is not None:
            flushed_copy.write(self._path)

    def free(self, handle: ContextHandle) -> None:
        """Flush and free the context, also if the flush fails."""
        try:
            if self.flushes:
                self.flush(handle)
        finally:
            self._native.context_free(handle)


def new_context(native: Native, model: ModelHandle, params: ContextParams) -> ContextHandle:
    """Create a context. The file of a killed process is restored to its last flush first.

    Raises KVFileForeign, also with the advice for a file of an unverified model.
    """
    try:
        return native.context_new(model, params)
    except KVFileForeign as error:
        # The library has one error for another format, model, build and shape.
        kept = flushed_copy.kept_for(params.kv_path or "")
        verified = kept is None or is_digest(kept.partition(_ADAPTERS)[0])
        if verified or "kept for another model" not in str(error):
            raise
        msg = (
            f"{error}; the model of the file is unverified: if it is this one, pass "
            "accept_unverified_model=True"
        )
        raise KVFileForeign(msg) from error
    except KVFileDirty:
        if params.kv_path is None or not flushed_copy.restore(params.kv_path):
            raise
        return native.context_new(model, params)


def resume(context: ContextParts) -> None:
    """Fill the ledgers from a cache file, and make sure that its flush has a copy.

    Raises KVFileForeign if it has no tokens, and KVFileDamaged if cells or tokens belong to no
    sequence.
    """
    native, handle, path = context.native, context.handle, context.params.kv_path
    assert path is not None, "a kept cache has a file"
    if not native.mapping(handle).info.resumed:
        flushed_copy.remove(path)
        return
    try:
        flushed_copy.write(path)
    except KVFileError as error:
        # A full disk is no reason to refuse a cache that is complete.
        LOG.warning("%s", error)
    tokens = native.mapping_tokens(handle)
    at = 0
    for raw in _cells(native, handle):
        here = tokens[at : at + len(raw.pos)]
        at += len(raw.pos)
        if raw.info.swa:
            continue  # a window has a part of what the other cache has
        mark = context.new_marks(len(raw.pos))
        owned = np.zeros(len(raw.pos), bool)
        for number, ledger in enumerate(context.ledgers):
            cells = np.flatnonzero(_has(raw, number))
            owned[cells] = True
            if not len(cells):
                continue
            if (here[cells] < 0).any():
                leave(context)
                msg = f"{context.params.kv_path} has no tokens: choose another file"
                raise KVFileForeign(msg)
            cells = cells[np.argsort(raw.pos[cells], kind="stable")]
            ledger.extend(here[cells].tolist(), raw.pos[cells].tolist(), (mark + cells).tolist())
        used = raw.pos >= 0
        if (used & ~owned).any() or (here[used] >= context.n_vocab).any():
            leave(context)
            msg = (
                f"{context.params.kv_path} is damaged: it has cells without a sequence, or tokens "
                f"outside "
                "of the vocabulary; evaluate again with kv_keep='fresh', which discards it"
            )
            raise KVFileDamaged(msg)


def leave(context: ContextParts) -> None:
    """Close a context without changing its file."""
    if context.kv_file:
        context.kv_file.flushes = False
    context.close()


def _cells(native: Native, handle: ContextHandle) -> list[RawCells]:
    return [native.cells(handle, cache) for cache in range(native.context_info(handle).n_caches)]


def _has(raw: RawCells, number: int) -> NDArray[np.bool_]:
    bit = np.uint64(1 << (number % 64))
    found: NDArray[np.bool_] = ((raw.seqs[:, number // 64] & bit) != 0) & (raw.pos >= 0)
    return found


def _tokens(raw: RawCells, ledgers: tuple[Ledger, ...]) -> NDArray[np.int32]:
    """Return the token of each cell (n,) int32, -1 if no ledger has it."""
    tokens = np.full(len(raw.pos), -1, np.int32)
    for number, ledger in enumerate(ledgers):
        if not len(ledger):
            continue
        cells = np.flatnonzero(_has(raw, number))
        positions = np.array(ledger.positions, np.int32)
        places = np.minimum(np.searchsorted(positions, raw.pos[cells]), len(positions) - 1)
        known = positions[places] == raw.pos[cells]
        tokens[cells[known]] = np.array(ledger.tokens, np.int32)[places[known]]
    return tokens
