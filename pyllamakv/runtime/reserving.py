"""Make a context allocate everything that it will ever need, so that it fails now or never.

llama.cpp allocates the cache and the graph of the largest micro-batch over the whole cache when a
context is made. What it leaves for later is done here once: the rows of logits for a batch that
wants all of them, a batch that is spread over all sequences, the graph that turns keys, and the
work space of each. A batch is cancelled as soon as it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.binding.protocol import Memory
from pyllamakv.errors import (
    Cancelled,
    DecodeError,
    NotEnoughMemory,
    WorkerDied,
)
from pyllamakv.runtime.batch import Batch
from pyllamakv.runtime.breakdown import memory_breakdown

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context


#: A level that no record has.
_SILENT = 5


def reserve(context: Context) -> None:
    """Allocate the rest of the worst case in an empty context, and leave it empty.

    Raises NotEnoughMemory when there is too little. Everything that was in the cache is gone.
    """
    try:
        with context.turn:
            _warm(context)
            for batch in _largest(context):
                _allocate(context, batch)
    except (DecodeError, MemoryError, WorkerDied) as error:
        needed = memory_breakdown(context).total if not isinstance(error, WorkerDied) else 0
        msg = (
            f"there is too little memory for batches of {context.info.n_batch} tokens and "
            f"{context.info.n_ctx} cells: {error}; lower n_ctx, n_batch or n_ubatch"
        )
        raise NotEnoughMemory(msg, needed=needed) from error


def _warm(context: Context) -> None:
    """Decode one token, and turn its key: the graph for that runs over the whole cache."""
    context.clear()
    context.decode(Batch.of([0], [0], 0))
    info = context.info
    if info.can_shift and info.memory in (Memory.ATTENTION, Memory.SWA):
        context.native.seq_add(context.handle, 0, -1, -1, 1)
        context.native.update(context.handle)
    context.clear()


def _largest(context: Context) -> list[Batch]:
    n, lanes = context.info.n_batch, context.info.n_seq_max
    if not context.params.kv_unified:
        n = min(n, context.info.n_ctx // lanes)
    found = [Batch.of(np.zeros(n, np.int32), np.arange(n), 0, np.ones(n))]
    if 1 < lanes <= n:
        each = n // lanes
        ids, places = np.divmod(np.arange(each * lanes), each)
        found.append(Batch.of(np.zeros(len(ids), np.int32), places, ids, np.ones(len(ids))))
    return found


def _allocate(context: Context, batch: Batch) -> None:
    # A decode allocates before it computes. States are computed all the same: in some releases a
    # cancelled one ends the process with the decode that follows.
    native = context.native
    if context.info.memory not in (Memory.RECURRENT, Memory.HYBRID):
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
