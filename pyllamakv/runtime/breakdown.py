"""Report the memory of a context: model, K, V, states, compute and output.

The sizes of weights, K and V are exact. The others come from the log of the library, rounded to
0.01 MiB, or from a formula; each number states its source.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from pyllamakv.runtime.sampler import context_lock

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import Buffer, ContextInfo
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.snapshot import Snapshot

#: Maximum rounding error of a buffer size in the log: half of 0.01 MiB, and a little more.
ROUNDING = 2**20 // 180


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The bytes of one purpose, whether they are exact, and their source."""

    bytes: int
    exact: bool
    known_by: str


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Memory by purpose, in bytes.

    ``model`` are weights, which contexts share. ``states`` are those of recurrent layers.
    ``output`` is the buffer for logits of all tokens of a batch, its maximum.
    """

    model: MemoryShare
    k: MemoryShare
    v: MemoryShare
    states: MemoryShare
    compute: MemoryShare
    output: MemoryShare

    @property
    def total(self) -> int:
        """Return the sum in bytes."""
        return sum(share.bytes for _, share in self)

    def __iter__(self) -> Any:
        return ((each.name, getattr(self, each.name)) for each in fields(self))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return {**asdict(self), "total": self.total}

    def __str__(self) -> str:
        lines = [
            f"{name:8}{share.bytes:>15,}  {'exact' if share.exact else 'estimated'}: "
            f"{share.known_by}"
            for name, share in self
        ]
        return "\n".join([*lines, f"{'total':8}{self.total:>15,}"])


def memory_breakdown(context: Context) -> MemoryBreakdown:
    """Return the memory of a context and its model by purpose."""
    with context_lock(context) as handle:
        buffers = context.native.buffers(handle)
        seen = context.kv.try_snapshot()
    k, v, states = _kept(buffers, seen, keeps_states=context.info.memory.keeps_states)
    return MemoryBreakdown(
        model=MemoryShare(context.model.info.n_bytes, exact=True, known_by="the model's tensors"),
        k=k,
        v=v,
        states=states,
        compute=_logged(buffers, "compute") or _mask(context.info, context.partitions),
        output=_output(context.info, context.n_vocab),
    )


def _kept(
    buffers: list[Buffer], seen: Snapshot | None, *, keeps_states: bool
) -> tuple[MemoryShare, ...]:
    """Return K, V and states: counted from the cells, and the rest by the log."""
    infos = [each.info for each in seen.streams] if seen is not None else []
    k, v = (
        MemoryShare(sum(getattr(info, name) for info in infos), exact=True, known_by="counted")
        for name in ("bytes_k", "bytes_v")
    )
    caches = [each for each in buffers if each.kind == "KV"]
    # Beyond the cells: states, which some releases call KV, or the keys of an indexer.
    beyond = sum(each.bytes for each in caches) - k.bytes - v.bytes
    if beyond <= ROUNDING * len(caches):
        beyond = 0
    if keeps_states:
        known_by = "the library's log" if buffers else "not reported by the library"
        return k, v, _logged(buffers, "RS") or MemoryShare(beyond, exact=False, known_by=known_by)
    if beyond:
        known_by = "counted, and the library's log" if k.bytes else "the library's log, with V"
        k = MemoryShare(k.bytes + beyond, exact=False, known_by=known_by)
    states = MemoryShare(0, exact=True, known_by="this memory has none")
    return k, v, states


def _logged(buffers: list[Buffer], *kinds: str) -> MemoryShare | None:
    found = [each.bytes for each in buffers if each.kind in kinds]
    return MemoryShare(sum(found), exact=False, known_by="the library's log") if found else None


def _mask(info: ContextInfo, partitions: int) -> MemoryShare:
    lower = 4 * (info.n_ctx // partitions) * info.n_ubatch
    return MemoryShare(
        lower, exact=False, known_by="at least the mask; the library does not report more"
    )


def _output(info: ContextInfo, n_vocab: int) -> MemoryShare:
    rows = max(info.n_batch, info.n_seq_max)
    known_by = f"{rows} rows of {n_vocab} numbers"
    return MemoryShare(4 * rows * n_vocab, exact=False, known_by=known_by)
