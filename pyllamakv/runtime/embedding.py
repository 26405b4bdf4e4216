"""Compute embeddings of texts.

llama.cpp pools the tokens of each micro-batch alone: all tokens of a sequence must be in one
micro-batch. It splits batches of several sequences unless they share the cells.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.binding.codes import Code
from pyllamakv.binding.protocol import Capability, Pooling
from pyllamakv.errors import NativeError, PromptTooLong, StaleLogits, Unsupported, UsageError
from pyllamakv.runtime.batch import Feed, as_int32, pools_together
from pyllamakv.runtime.logits import Embedding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.parts import ContextParts, ModelParts

#: The names of `Pooling`; None is that of the model file, or "none".
PoolingName = Literal["none", "mean", "cls", "last", "rank"]


def checked_pooling(model: ModelParts, embeddings: bool, pooling: str | None) -> Pooling:
    """Return the pooling to request. Raises UsageError, or Unsupported for "rank"."""
    if pooling is None:
        chosen = Pooling.MODEL
    else:
        chosen = Pooling[arguments.choice("pooling", pooling, get_args(PoolingName)).upper()]
    if not arguments.flag("embeddings", embeddings):
        if pooling is not None:
            raise UsageError("pooling needs embeddings: pass embeddings=True")
        return chosen
    named = model.file.meta.get(f"{model.file.architecture}.pooling_type")
    if chosen is Pooling.RANK or (chosen is Pooling.MODEL and named == Pooling.RANK):
        model.native.about.require(Capability.RANK, "pool by a classification head")
        _need_head(model)
    return Pooling.MEAN if chosen is Pooling.MODEL and named == Pooling.MEAN else chosen


def even_ubatch(n_ubatch: int, n_seq_max: int) -> int:
    """Return the largest micro-batch of at most ``n_ubatch`` tokens with which means are computed.

    llama.cpp reserves memory with a graph of all sequences. It rounds the tokens up to a multiple
    of their number, but not the rows that it averages, and then ends the process. Raises
    UsageError if the micro-batch has fewer tokens than there are sequences.
    """
    if n_ubatch < n_seq_max:
        msg = (
            f"pooling='mean' needs a token of each sequence in a micro-batch: n_seq_max is "
            f"{n_seq_max}, and n_ubatch, n_batch or n_ctx is {n_ubatch}; increase it"
        )
        raise UsageError(msg)
    return n_ubatch - n_ubatch % n_seq_max


def _need_head(model: ModelParts) -> None:
    """Raise Unsupported unless the model has the tensors without which llama.cpp asserts."""
    head, biases = {"cls.weight", "cls.bias"}, {"cls.output.weight", "cls.output.bias"}
    has = model.file.tensors.keys()
    # Releases that do not report the number of outputs need the biases.
    old = head <= has and (biases <= has or not biases & has)
    new = model.info.n_cls_out > 0 and ("cls.weight" in has or "cls.output.weight" in has)
    if not old and not new:
        msg = f"pooling='rank' needs a classification head, which {model.path.name} does not have"
        raise Unsupported(msg, "RANK")


def read(context: ContextParts, index: int) -> Embedding:
    """Return the view of an embedding; ``index`` is as in `Native.embeddings`."""
    with context.read_lock as handle:
        if not context.outputs.n:
            raise StaleLogits("there are no embeddings: no decode yet, or the last decode failed")
        try:
            row = context.native.embeddings(handle, index)
        except NativeError as error:
            if error.code != Code.EINVAL:
                raise
            raise UsageError(f"{error}; the last batch had {context.outputs.n} tokens") from error
        return Embedding(context.lock, context.outputs, row)


def embed(context: Context, inputs: Any, normalize: bool) -> NDArray[np.float32]:
    """Return the pooled embeddings of texts or tokens; `Context.embed` describes it."""
    if context.info.pooling <= Pooling.NONE:
        msg = (
            "this context pools no embeddings: create it with embeddings=True and pooling='mean', "
            "or decode and read ctx.embedding(index) of each token"
        )
        raise UsageError(msg)
    normalize = arguments.flag("normalize", normalize)
    model, info = context.model, context.info
    prompts: list[NDArray[np.int32]] = []
    for each in arguments.items("inputs", inputs, "an iterable of texts or of tokens"):
        tokens = as_int32(model.tokenize(each) if isinstance(each, str) else each, "tokens")
        most = min(info.n_ubatch, info.n_batch, info.n_ctx // context.partitions)
        if not len(tokens):
            raise UsageError(f"input {len(prompts)} has no tokens")
        if len(tokens) > most:
            msg = (
                f"input {len(prompts)} has {len(tokens)} tokens, and this context pools at most "
                f"{most}: create it with a larger n_ctx, n_batch and n_ubatch"
            )
            raise PromptTooLong(msg, needed=len(tokens), available=most)
        prompts.append(tokens)
    rows: list[NDArray[np.float32]] = []
    while len(rows) < len(prompts):
        rows += _embed_batch(context, prompts[len(rows) :])
    found = np.stack(rows) if rows else np.empty((0, model.info.n_embd_out), np.float32)
    if normalize:
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return found


def _embed_batch(
    context: Context, prompts: Iterable[NDArray[np.int32]]
) -> list[NDArray[np.float32]]:
    """Return the embeddings of as many prompts as a micro-batch has room for, at least one."""
    room = min(context.info.n_ubatch, context.info.n_batch)
    snapshot = context.kv.try_snapshot()
    if snapshot is not None and snapshot.streams:
        room = min(room, max(1, snapshot.stats.free))
    most = max(1, len(context.vacant)) if pools_together(context.info) else 1
    with ExitStack() as stack:
        feeds: list[Feed] = []
        for tokens in prompts:
            if feeds and (len(tokens) > room or len(feeds) == most):
                break
            sequence = stack.enter_context(context.sequence())
            feeds.append(sequence.feed(tokens, "all"))
            room -= len(tokens)
        with context.lock:
            context.decode(feeds)
            return [read(context, each.sequence.id).copy() for each in feeds]
