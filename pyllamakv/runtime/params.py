"""Turn the options of `Model.context` into checked parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from pyllamakv.binding import arguments
from pyllamakv.binding.protocol import Capability, ContextParams
from pyllamakv.errors import Unsupported, UsageError
from pyllamakv.runtime.ggml_types import cache_type

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ModelInfo
    from pyllamakv.runtime.backing import Choice

#: Numbers in plk.h are places here.
Plan = Literal["fewest", "ordered"]
Mover = Literal["auto", "host", "gather", "graph", "staged"]
#: True and "on", False and "off", None and "auto" are the same.
FlashAttn = bool | Literal["auto", "on", "off"] | None


def context_params(
    info: ModelInfo,
    capabilities: Capability,
    *,
    n_ctx: int,
    n_batch: int,
    n_ubatch: int,
    n_seq_max: int,
    n_threads: int,
    n_threads_batch: int | None,
    flash_attn: FlashAttn,
    type_k: str | int,
    type_v: str | int,
    kv_unified: bool,
    swa_full: bool,
    offload_kqv: bool,
    embeddings: bool,
    defrag_thold: float,
    defrag_plan: Plan,
    defrag_mover: Mover,
    defrag_threads: int | None,
    guard: bool,
    backing: Choice,
) -> ContextParams:
    """Return the parameters, or raise UsageError or Unsupported naming the one at fault."""
    n_ctx, n_batch = _count("n_ctx", n_ctx), _count("n_batch", n_batch)
    n_ubatch, n_seq_max = _count("n_ubatch", n_ubatch), _count("n_seq_max", n_seq_max)
    n_threads = _count("n_threads", n_threads)
    if n_threads_batch is not None:
        n_threads_batch = _count("n_threads_batch", n_threads_batch)
    flash_attn = arguments.flash_attn(flash_attn)
    kv_unified = arguments.flag("kv_unified", kv_unified)
    kind_k, kind_v = cache_type(type_k, "K"), cache_type(type_v, "V")
    if not info.is_recurrent:
        kind_k.row_bytes(info.n_embd_k_gqa)
        kind_v.row_bytes(info.n_embd_v_gqa)
    if kind_v.quantized and flash_attn is False:
        msg = (
            f"a V cache of {kind_v.name} needs flash attention, because V is stored by columns "
            "without it; give flash_attn=True or type_v='f16'"
        )
        raise UsageError(msg)
    if flash_attn is None and Capability.FLASH_AUTO not in capabilities:
        msg = "this build cannot decide about flash attention by itself; give True or False"
        raise Unsupported(msg, "FLASH_AUTO")
    if not kv_unified and n_seq_max > 1 and Capability.KV_UNIFIED not in capabilities:
        msg = "all sequences share the cells in this build; give kv_unified=True"
        raise Unsupported(msg, "KV_UNIFIED")
    plan = _place("defrag_plan", defrag_plan, get_args(Plan))
    mover = _place("defrag_mover", defrag_mover, get_args(Mover))
    if defrag_threads is not None:
        defrag_threads = _count("defrag_threads", defrag_threads)
    if Capability.DEFRAG_OPTIONS not in capabilities and (plan or mover or defrag_threads):
        msg = (
            "this build moves cells in its own way only: defrag_plan, defrag_mover and "
            "defrag_threads need a patched variant (full-defrag or compaction)"
        )
        raise Unsupported(msg, "DEFRAG_OPTIONS")
    return ContextParams(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=min(n_ubatch, n_batch),
        n_seq_max=n_seq_max,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch or n_threads,
        flash_attn=flash_attn,
        type_k=kind_k.number,
        type_v=kind_v.number,
        kv_unified=kv_unified,
        swa_full=swa_full,
        offload_kqv=offload_kqv,
        embeddings=embeddings,
        defrag_thold=defrag_thold,
        guard=guard,
        defrag_plan=plan,
        defrag_mover=mover,
        defrag_threads=defrag_threads or 0,
        kv_backing=int(backing.kind),
        kv_path=backing.path,
        kv_keep=backing.keep,
        kv_huge=backing.huge,
        kv_model=backing.model,
    )


def _place(name: str, value: str, known: tuple[str, ...]) -> int:
    return known.index(arguments.choice(name, value, known))


def _count(name: str, value: int) -> int:
    return arguments.whole(name, value, 1, arguments.INT32)
