"""Say in types what a loaded library can do, whether it lives in this process or in a worker.

`Native` mirrors ``native/plk.h`` with Python's types: handles are opaque integers, structs are the
frozen dataclasses below, arrays are numpy arrays, a refused call raises a class of
`pyllamakv.errors`. `local.Local` speaks to the C functions, `remote.Remote` to a worker that has
a `Local` of its own; the classes of `pyllamakv.runtime` run over either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NewType, Protocol

from pyllamakv.binding import records
from pyllamakv.binding.decoder import Decoder
from pyllamakv.binding.mapped import Mapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

ModelHandle = NewType("ModelHandle", int)
ContextHandle = NewType("ContextHandle", int)
SamplerHandle = NewType("SamplerHandle", int)


class Status(IntEnum):
    """Tell how a decode ended, as ``llama_decode`` numbers it."""

    OK = 0
    NO_SLOT = 1
    ABORTED = 2


class Capability(IntFlag):
    """Name what a build can do at all (``PLK_CAP_*``)."""

    DEFRAG = 1
    CELLS = 2
    COUNTERS = 4
    STATES = 8
    STREAMS = 16
    SWA = 32
    SAMPLER = 64
    KV_UNIFIED = 128
    FLASH_AUTO = 256
    SWA_FULL = 512
    ROLLBACK = 1024
    DEFRAG_OPTIONS = 2048
    MAPPING = 4096


class Memory(IntEnum):
    """Name the kind of memory behind a context (``PLK_MEMORY_*``)."""

    NONE = 0
    ATTENTION = 1
    SWA = 2
    RECURRENT = 3
    HYBRID = 4
    OTHER = 5

    @property
    def keeps_states(self) -> bool:
        """Tell whether it keeps a state per sequence, of which no part can be taken away."""
        return self in (Memory.RECURRENT, Memory.HYBRID)


@dataclass(frozen=True, slots=True)
class ModelParams:
    """Hold what a model is loaded with."""

    n_gpu_layers: int = 0
    use_mmap: bool = True
    use_mlock: bool = False
    check_tensors: bool = True
    vocab_only: bool = False
    rpc_servers: str | None = None
    devices: str | None = None

    def __post_init__(self) -> None:
        records.check_model(self)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describe a loaded model; token ids are -1 where the vocabulary has none."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_embd_k_gqa: int
    n_embd_v_gqa: int
    has_vocab: bool
    token_bos: int
    token_eos: int
    token_eot: int
    token_nl: int
    add_bos: bool
    is_recurrent: bool
    n_params: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ContextParams:
    """Hold what a context is made with; ``flash_attn`` None lets llama.cpp decide.

    llama.cpp takes cache types, ``swa_full``, ``embeddings`` and threads as given, or makes no
    context; it may change the sizes, flash attention and ``kv_unified``: `ContextInfo` has what it
    made. ``type_k`` and ``type_v`` are ggml type numbers. ``guard`` False adds no check and no
    rollback of ours to what the library does. ``kv_backing`` is a `Backing`; ``kv_keep`` 1 goes on
    with what the file at ``kv_path`` holds, 2 begins anew, and ``kv_model`` is what it must have
    been for.
    """

    n_ctx: int = 512
    n_batch: int = 512
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 1
    n_threads_batch: int = 1
    flash_attn: bool | None = False
    type_k: int = 1
    type_v: int = 1
    kv_unified: bool = True
    swa_full: bool = False
    offload_kqv: bool = True
    embeddings: bool = False
    defrag_thold: float = -1.0
    guard: bool = True
    defrag_plan: int = 0
    defrag_mover: int = 0
    defrag_threads: int = 0
    kv_backing: int = 0
    kv_path: str | None = None
    kv_keep: int = 0
    kv_huge: bool = False
    kv_model: str | None = None

    def __post_init__(self) -> None:
        records.check_context(self)


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """Describe a context as it was made, not as it was asked for; None where the build cannot tell.

    ``n_streams`` is the number of streams of each cache: with 1 all sequences share the cells, with
    more each has cells of its own. It is 0 where the memory has no cells, -1 where it is unknown.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    memory: Memory
    n_caches: int
    can_shift: bool
    can_remove_partly: bool | None
    contiguous_slots: bool | None
    defrag: bool
    flash_attn: bool | None
    v_transposed: bool | None
    n_swa: int = 0
    n_streams: int = -1


@dataclass(frozen=True, slots=True)
class Buffer:
    """Name a buffer that a new context allocated: ``kind`` is KV, RS, compute or output.

    ``bytes`` are as exact as the library's log, which rounds to 0.01 MiB.
    """

    device: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class CellsInfo:
    """Describe one stream of one cache; ``used``, ``head`` and ``host`` are -1 where unknown.

    ``host`` is 1 when K and V lie in host memory, 0 when they lie on a device.
    """

    stream: int
    swa: bool
    n_cells: int
    used: int
    head: int
    has_shift: bool
    n_layer: int
    type_k: int
    type_v: int
    v_transposed: bool
    host: int
    bytes_k: int
    bytes_v: int


@dataclass(frozen=True, slots=True)
class RawCells:
    """Hold the cells of one stream.

    ``pos`` (n,) int32, -1 where free; ``shift`` (n,) int32, the pending shift that ``pos`` already
    contains; ``seqs`` (n, words) uint64, a bit per sequence.
    """

    info: CellsInfo
    pos: NDArray[np.int32]
    shift: NDArray[np.int32]
    seqs: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RawDefrag:
    """Report one defragmentation; -1 where the build cannot tell."""

    passes: int
    moves: int
    cells: int
    bytes: int
    graphs: int
    ns: int
    plan_ns: int = -1
    scratch_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Counters:
    """Count what a context did since it was made (the patch ``kv-counters``).

    ``ns`` of defragmentations, ``plan_ns`` of them to find out what moves where; ``scratch_bytes``
    is no sum, but the most that one defragmentation needed beside the cache.
    """

    slot_searches: int = 0
    slot_failures: int = 0
    decode_retries: int = 0
    defrags: int = 0
    moves: int = 0
    cells_moved: int = 0
    bytes_moved: int = 0
    graphs: int = 0
    ns: int = 0
    plan_ns: int = 0
    scratch_bytes: int = 0

    def __sub__(self, other: Counters) -> Counters:
        """Return what was counted since ``other``; ``scratch_bytes`` stays the most of all time."""
        since = {name: getattr(self, name) - getattr(other, name) for name in self.__slots__}
        return Counters(**{**since, "scratch_bytes": self.scratch_bytes})


@dataclass(frozen=True, slots=True)
class Device:
    """Describe a device; bytes of memory are 0 where the backend does not say."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int

    @property
    def kv(self) -> str:
        """Say where K and V of the layers that go to it lie: "device", or "host" memory."""
        return "device" if self.kind == "gpu" else "host"


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """Hold what a sampler is made with; temperature 0 is greedy; `records` has the ranges."""

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_last_n: int = 0
    penalty_repeat: float = 1.0

    def __post_init__(self) -> None:
        records.check_sampler(self)


@dataclass(frozen=True, slots=True)
class About:
    """Say what a loaded library is: ABI number, variant, capabilities, shim candidates."""

    abi: int
    variant: str
    capabilities: Capability
    probes: dict[str, str | None] = field(default_factory=dict)


class Native(Decoder, Mapped, Protocol):
    """Speak to one loaded library. One thread at a time per context, but for `cancel`."""

    about: About
    #: The variables that its process has besides those of this one.
    environment: Mapping[str, str]

    def close(self) -> None:
        """Give the library back; every handle is invalid afterwards."""

    def logs(self) -> list[tuple[int, str]]:
        """Drain the log: (level, line) with level 1 debug, 2 info, 3 warning, 4 error."""

    def log_level(self, lowest: int) -> int:
        """Keep only records of this level and above from now on; return the level before."""

    def devices(self) -> list[Device]:
        """List the devices."""

    # models
    def model_load(self, path: str, params: ModelParams) -> ModelHandle:
        """Load a model or raise `ModelError`."""

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after what lives on it."""

    def model_info(self, model: ModelHandle) -> ModelInfo:
        """Describe a model."""

    def model_meta(self, model: ModelHandle, key: str) -> str | None:
        """Return a value of the model file's metadata, or None."""

    def tokenize(
        self, model: ModelHandle, text: bytes, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the tokens of a text."""

    def token_piece(self, model: ModelHandle, token: int, special: bool) -> bytes:
        """Return the bytes of a token."""

    def token_is_eog(self, model: ModelHandle, token: int) -> bool:
        """Tell whether a token ends a generation."""

    # contexts
    def context_new(self, model: ModelHandle, params: ContextParams) -> ContextHandle:
        """Make a context or raise `ContextError`."""

    def context_free(self, context: ContextHandle) -> None:
        """Free a context."""

    def context_info(self, context: ContextHandle) -> ContextInfo:
        """Describe a context as it was made."""

    def buffers(self, context: ContextHandle) -> list[Buffer]:
        """Return what the library said that it allocated for a context; empty where it did not."""

    def threads(self, context: ContextHandle, n_threads: int, n_threads_batch: int) -> None:
        """Set how many threads compute from now on."""

    # sequences: p0 < 0 from the start, p1 < 0 to the end, seq < 0 every sequence
    def clear(self, context: ContextHandle, data: bool) -> None:
        """Remove every sequence; ``data`` clears the K and V bytes as well."""

    def seq_rm(self, context: ContextHandle, seq: int, p0: int, p1: int) -> bool:
        """Remove positions; False when the memory refuses a partial removal."""

    def seq_cp(self, context: ContextHandle, src: int, dst: int, p0: int, p1: int) -> None:
        """Let another sequence share the cells of positions."""

    def seq_keep(self, context: ContextHandle, seq: int) -> None:
        """Remove every other sequence."""

    def seq_add(self, context: ContextHandle, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions by ``delta``."""

    def seq_div(self, context: ContextHandle, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions."""

    def seq_pos_min(self, context: ContextHandle, seq: int) -> int:
        """Return the smallest position of a sequence, -1 when it is empty."""

    def seq_pos_max(self, context: ContextHandle, seq: int) -> int:
        """Return the largest position of a sequence, -1 when it is empty."""

    # the cache
    def defrag(self, context: ContextHandle) -> RawDefrag:
        """Defragment or raise `Unsupported`."""

    def update(self, context: ContextHandle) -> None:
        """Apply what is pending: shifts and stream copies."""

    def cells(self, context: ContextHandle, cache: int) -> RawCells:
        """Read the cells of one stream of one cache, or raise `Unsupported`."""

    def counters(self, context: ContextHandle) -> Counters:
        """Read the counters or raise `Unsupported`."""

    # states
    def state_save(self, context: ContextHandle, seq: int) -> bytes:
        """Return the state of a sequence."""

    def state_load(self, context: ContextHandle, seq: int, state: bytes) -> int:
        """Restore a sequence; return the bytes read, 0 when the library refused."""
