"""Check the fields of the records that models, contexts and samplers are made with.

Each check replaces the fields of a frozen record by what `arguments` returns for them. Raises
ArgumentTypeError for a wrong type and UsageError for a value that is out of range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

#: The limits of the whole numbers of `ContextParams`: lowest, highest, and the names.
_CONTEXT: Final = (
    (0, arguments.INT32, "n_ctx n_ubatch type_k type_v defrag_threads"),
    (1, arguments.INT32, "n_batch n_seq_max n_threads n_threads_batch"),
    (0, 1, "defrag_plan"),
    (0, 4, "defrag_mover"),
    (0, 3, "kv_backing"),
    (0, 2, "kv_keep"),
)
#: The limits of `SamplerParams`. A sampler allocates the room for ``penalty_last_n`` tokens when it
#: is made. Off are ``top_k`` 0 and -1, ``top_p`` 1, ``min_p`` 0, the penalties 0 and 1.
_SAMPLER: Final = (
    (0, 2**32 - 1, "seed"),
    (-1, arguments.INT32, "top_k"),
    (0, 1 << 20, "penalty_last_n"),
)
_SAMPLER_NUMBERS: Final = (
    (0.0, arguments.FLOAT32, "temperature"),
    (0.0, 1.0, "top_p"),
    (0.0, 1.0, "min_p"),
    (1e-6, 1e6, "penalty_repeat"),
)


def check_model(record: Any) -> None:
    """Check `ModelParams`."""
    _check(record, arguments.flag, "use_mmap use_mlock check_tensors vocab_only")
    _check(record, arguments.c_text_or_none, "rpc_servers devices")
    _check(record, arguments.whole, "n_gpu_layers")
    if not 0 <= record.n_gpu_layers <= arguments.INT32:
        msg = (
            f"n_gpu_layers must be 0 or more, not {arguments.shown(record.n_gpu_layers)}: a number "
            "beyond those of the model, as 999, puts all of them on the device"
        )
        raise UsageError(msg)


def check_context(record: Any) -> None:
    """Check `ContextParams`; what the model and the build add to it, `Model.context` checks."""
    _put(record, "flash_attn", arguments.flash_attn(record.flash_attn))
    for low, high, names in _CONTEXT:
        _check(record, arguments.whole, names, low, high)
    _check(record, arguments.flag, "kv_unified swa_full offload_kqv embeddings guard kv_huge")
    _check(record, arguments.number, "defrag_thold")
    _check(record, arguments.c_text_or_none, "kv_path kv_model")


def check_sampler(record: Any) -> None:
    """Check `SamplerParams`."""
    for low, high, names in _SAMPLER:
        _check(record, arguments.whole, names, low, high)
    for least, most, names in _SAMPLER_NUMBERS:
        _check(record, arguments.number, names, least, most)


def _check(record: Any, check: Callable[..., object], names: str, *limits: float) -> None:
    for name in names.split():
        _put(record, name, check(name, getattr(record, name), *limits))


def _put(record: Any, name: str, value: object) -> None:
    # The record is frozen: its own constructor is what calls this.
    object.__setattr__(record, name, value)
