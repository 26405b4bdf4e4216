"""Say how a context came to be what it is when its recording begins: its parameters, its tokens.

A context that has tokens already is described by what decodes them again. Sequences then share what
they share, but cells lie one after the other, whatever holes there are.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import UsageError
from pyllamakv.record import batches, trace
from pyllamakv.runtime import ggml_types as types
from pyllamakv.scenarios import cell_samples

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ContextParams
    from pyllamakv.runtime.context import Context

#: What contexts are mostly made with, and so left out of a trace.
_USUAL = {
    "swa_full": False, "offload_kqv": True, "embeddings": False, "defrag_thold": -1.0,
    "defrag_plan": 0, "defrag_mover": 0, "defrag_threads": 0,
}  # fmt: skip

#: Where the cache lies changes nothing that comes of it, and a replay must not take anyone's file.
_PLACE = {"kv_backing", "kv_path", "kv_keep", "kv_huge", "kv_model"}


def words(params: ContextParams, model: str) -> dict[str, Any]:
    """Return the line that makes a context like this one."""
    asked = {k: v for k, v in asdict(params).items() if k not in _PLACE}
    found = {k: v for k, v in asked.items() if k not in _USUAL or v != _USUAL[k]}
    for name in ("type_k", "type_v"):
        found[name] = types.number_type(found[name]).name
    return {"op": "context", "model": model, **found}


def rows(context: Context, model: str) -> list[dict[str, Any]]:
    """Return the first rows of a trace: the context, and what brings it to where it is.

    Raises UsageError where the cache holds what no ledger knows.
    """
    result: dict[str, Any] = {"n_ctx": context.info.n_ctx, "at": 0}
    found = [{**words(context.params, model), "result": result}]
    cells: dict[tuple[int, ...], tuple[int, int, list[int]]] = {}
    for number, ledger in enumerate(context.ledgers):
        for token, pos, mark in zip(ledger.tokens, ledger.positions, ledger.marks, strict=True):
            # No stream has a cell of another one, whatever the marks say.
            key = (mark, number, pos) if context.streams else (mark,)
            cells.setdefault(key, (token, pos, []))[2].append(number)
    look = cell_samples.look(context.native, context.handle, context.info)
    if look is not None and not context.streams and look.counts["used"] != len(cells):
        msg = (
            f"the context has {look.counts['used']} used cells, of which its sequences know "
            f"{len(cells)}: clear it, or record it from its beginning"
        )
        raise UsageError(msg)
    if look is not None and not cells:
        result |= trace.seen("context", None, look, label="context")
    # Marks grow with every token that is decoded.
    order = [cells[mark] for mark in sorted(cells)]
    size = context.info.n_batch
    for start in range(0, len(order), size):
        part = order[start : start + size]
        tokens, places = [each[0] for each in part], [each[1] for each in part]
        seq = [each[2] if len(each[2]) > 1 else each[2][0] for each in part]
        used = {} if look is None else {"used": start + len(part)}
        batch = batches.spell(tokens, places, seq)
        found.append({"op": "batch", **batch, "result": {"status": 0, **used, "at": 0}})
    return found
