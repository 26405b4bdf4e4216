"""Let a context allocate all memory that it can need, so that it fails now or never.

At its creation, llama.cpp allocates the cache and the graph of the largest micro-batch over the
whole cache. The other allocations are made here: logits for all tokens of a batch, a batch that is
spread over all sequences, and the graph that rotates keys. Each batch is cancelled as soon as its
computation starts. The buffer for multiplying V without flash attention would need a decode over a
full cache; its size is checked against the available memory instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import MemoryType
from pyllamakv.errors import Cancelled, DecodeError, NotEnoughMemory, WorkerDied
from pyllamakv.runtime import memory_estimate
from pyllamakv.runtime.batch import Batch

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ContextInfo
    from pyllamakv.runtime.context import Context

#: A log level that no record has.
_SILENT = 5

#: Bytes of the small allocations of a batch.
SLACK = 8 << 20


def reserve(context: Context, *, fill_cache: bool = False) -> None:
    """Allocate the rest of the worst case in an empty context, and leave it empty.

    ``fill_cache`` fills the whole cache once with real decodes, which takes its time. Raises
    NotEnoughMemory when there is too little. Everything that was in the cache is gone.
    """
    try:
        with context.lock:
            _warm(context)
            for batch in _largest(_piece(context.info, context.partitions), context.info.n_seq_max):
                _allocate(context, batch)
            if fill_cache:
                _fill(context)
    except (DecodeError, MemoryError, WorkerDied) as error:
        raise _too_little(context.info, str(error)) from error
    needed = work_bytes(context.info, context.model.info.n_head) + SLACK
    available = None
    if context.model.on_host:
        pid = memory_estimate.worker_pid(context.model)
        available = memory_estimate.available_bytes(pid)
    if available is not None and available < needed:
        msg = f"{needed} bytes of work space are needed and {available} are available"
        raise _too_little(context.info, msg, needed=needed, available=available)


def work_bytes(info: ContextInfo, n_head: int) -> int:
    """Return the bytes that a micro-batch over the whole cache needs beyond the graph's buffers.

    Without flash attention, weights of attention become 16 bits wide before they meet the values.
    """
    if info.flash_attn or info.memory in (MemoryType.NONE, MemoryType.RECURRENT):
        return 0
    return 2 * info.n_ctx * info.n_ubatch * max(n_head, 1)


def _too_little(
    info: ContextInfo, why: str, *, needed: int = 0, available: int = 0
) -> NotEnoughMemory:
    msg = (
        f"not enough memory for batches of {info.n_batch} tokens and "
        f"{info.n_ctx} cells: {why}; lower n_ctx, n_batch or n_ubatch"
    )
    return NotEnoughMemory(msg, needed=needed, available=available)


def _warm(context: Context) -> None:
    """Decode one token, and turn its key: the graph for that runs over the whole cache."""
    context.clear()
    context.decode(Batch.of([0], [0], 0))
    info = context.info
    if info.can_shift and info.memory in (MemoryType.ATTENTION, MemoryType.SWA):
        context.native.seq_add(context.handle, 0, -1, -1, 1)
        context.native.update(context.handle)
    context.clear()


def _largest(n: int, n_seqs: int) -> list[Batch]:
    """Return batches of up to ``n`` tokens, of one sequence and of all."""
    found = [Batch.of(np.zeros(n, np.int32), np.arange(n), 0, np.ones(n, np.int8))]
    if 1 < n_seqs <= n:
        each = n // n_seqs
        ids, places = np.divmod(np.arange(each * n_seqs), each)
        found.append(
            Batch.of(np.zeros(len(ids), np.int32), places, ids, np.ones(len(ids), np.int8))
        )
    return found


def _piece(info: ContextInfo, partitions: int) -> int:
    return min(info.n_batch, info.n_ctx // partitions)


def _allocate(context: Context, batch: Batch) -> None:
    # A decode allocates before it computes, so it is cancelled at once. With states, it is not
    # cancelled: in some releases, the next decode would end the process.
    native = context.native
    if not context.info.memory.keeps_states:
        native.cancel_after(context.handle, 0)
    level = native.log_level(_SILENT)  # it would complain of what is meant
    try:
        context.decode(batch)
    except Cancelled:
        pass
    finally:
        native.log_level(level)
        native.cancel_after(context.handle, -1)
        context.clear()


def _fill(context: Context) -> None:
    share = context.info.n_ctx // context.partitions
    piece = _piece(context.info, context.partitions)
    for stream in range(context.partitions):
        for start in range(0, share, piece):
            n = min(piece, share - start)
            context.decode(
                Batch.of(
                    np.zeros(n, np.int32), np.arange(start, start + n), stream, np.ones(n, np.int8)
                )
            )
    context.clear()
