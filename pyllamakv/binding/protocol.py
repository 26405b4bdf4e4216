"""The interface of a loaded library, in this process or in a worker.

`Native` mirrors ``native/plk.h`` with Python's types: handles are opaque integers, structs are the
frozen dataclasses below, arrays are numpy arrays, a refused call raises a class of
`pyllamakv.errors`. `local.Local` calls the C functions, and `remote.Remote` a worker that has its
own `Local`; the classes of `pyllamakv.runtime` use either.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Final, NewType, Protocol

from pyllamakv.binding import arguments
from pyllamakv.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

ModelHandle = NewType("ModelHandle", int)
ContextHandle = NewType("ContextHandle", int)
SamplerHandle = NewType("SamplerHandle", int)
AdapterHandle = NewType("AdapterHandle", int)

#: Limits of the integers of `ContextParams`: minimum, maximum, and names.
_CONTEXT: Final = (
    (0, arguments.INT32, "n_ctx n_ubatch type_k type_v defrag_threads"),
    (1, arguments.INT32, "n_batch n_seq_max n_threads n_threads_batch"),
    (0, 2, "defrag_plan"),
    (0, 4, "defrag_mover"),
    (0, 3, "kv_backing"),
    (0, 2, "kv_keep"),
    (-1, 4, "pooling"),
)
#: The largest seed of a sampler.
_MAX_SEED: Final = 2**32 - 2
#: Limits of `SamplerParams`. A new sampler allocates memory for the last n tokens.
_SAMPLER: Final = (
    (-1, arguments.INT32, "top_k"),
    (0, 1 << 20, "penalty_last_n dry_penalty_last_n"),
    (1, 1 << 20, "dry_allowed_length"),
    (0, 2, "mirostat"),
)
_SAMPLER_NUMBERS: Final = (
    (0.0, arguments.FLOAT32, "temperature"),
    (0.0, 1.0, "top_p min_p typical_p xtc_probability xtc_threshold adaptive_target"),
    (1e-6, 1e6, "penalty_repeat"),
    (-1e6, 1e6, "penalty_freq penalty_present"),
    (0.0, 1e6, "top_n_sigma dry_multiplier dynatemp_range dynatemp_exponent"),
    (1.0, 1e6, "dry_base"),
    (0.0, 100.0, "mirostat_tau mirostat_eta"),
    (0.0, 0.99, "adaptive_decay"),
)
#: Names for `SamplerParams.samplers`, in the default order.
SAMPLERS: Final = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip


def _check(record: Any, check: Callable[..., object], names: str, *limits: float) -> None:
    for name in names.split():
        _put(record, name, check(name, getattr(record, name), *limits))


def _put(record: Any, name: str, value: object) -> None:
    # The record is frozen, but its constructor may change it.
    object.__setattr__(record, name, value)


class DecodeStatus(IntEnum):
    """The result of ``llama_decode``."""

    OK = 0
    #: The batch found no cells, and was undone where the memory can go back.
    NO_SLOT = 1
    #: `Context.cancel` ended the decode.
    ABORTED = 2


class Capability(IntFlag):
    """The capabilities of a build (``PLK_CAP_*``).

    Those without a text are samplers of `SamplerParams` with the same name.
    """

    #: The library moves cells: `KV.defrag`.
    DEFRAG = 1
    #: The cells can be read: `KV.snapshot`.
    CELLS = 2
    #: The library counts: `Context.counters`.
    COUNTERS = 4
    #: The state of a single sequence can be saved and restored.
    STATES = 8
    #: A cache can have a stream per sequence.
    STREAMS = 16
    #: A sliding-window cache frees the cells outside its window.
    SWA = 32
    #: Logit biases, temperature, top-k, top-p, min-p and the repetition penalty.
    SAMPLER = 64
    #: ``kv_unified`` has an effect.
    KV_UNIFIED = 128
    #: llama.cpp can decide about flash attention: ``flash_attn="auto"``.
    FLASH_AUTO = 256
    #: ``swa_full`` has an effect.
    SWA_FULL = 512
    #: llama.cpp undoes a batch that found no cells.
    ROLLBACK = 1024
    #: ``defrag_plan``, ``defrag_mover`` and ``defrag_threads`` have an effect.
    DEFRAG_OPTIONS = 2048
    #: The cache can be in mapped memory and in files: ``kv_backing``.
    MAPPING = 4096
    #: The other samplers that all releases since 0.3.0 have, in any order.
    SAMPLER_CHAIN = 8192
    #: Grammars in GBNF.
    GRAMMAR = 16384
    TOP_N_SIGMA = 32768
    XTC = 65536
    DRY = 131072
    ADAPTIVE_P = 262144
    ADAPTERS = 524288
    RANK = 1048576
    THREADS = 2097152


class MemoryType(IntEnum):
    """The type of memory of a context (``PLK_MEMORY_*``)."""

    NONE = 0
    #: One cache of cells.
    ATTENTION = 1
    #: A full cache, and a smaller one for layers with a sliding window.
    SWA = 2
    #: One state per sequence, and no cells.
    RECURRENT = 3
    #: Cells, and states or compressed rows.
    HYBRID = 4
    #: Cells, and those of an indexer.
    OTHER = 5

    @property
    def keeps_states(self) -> bool:
        """Whether the memory stores one state per sequence, which cannot be removed in part."""
        return self in (MemoryType.RECURRENT, MemoryType.HYBRID)


class Pooling(IntEnum):
    """How a context pools the embeddings of a sequence (``PLK_POOLING_*``).

    MODEL requests what the model file names; as a result, it means no embeddings.
    """

    MODEL = -1
    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


class DefragPlan(IntEnum):
    """Which cells a defragmentation moves."""

    UNKNOWN = 0
    #: Cells keep their order, so that logits equal those of a fresh cache bit by bit.
    ORDERED = 1
    #: As few cells as possible.
    FEWEST = 2


class DefragMover(IntEnum):
    """How a defragmentation moves the cells of a tensor."""

    UNKNOWN = -1
    #: A mover for each tensor.
    AUTO = 0
    #: Copies in place on the host.
    HOST = 1
    #: Compute graphs that collect cells by index.
    GATHER = 2
    #: Compute graphs that copy each run of cells.
    GRAPH = 3
    #: Copies through host memory.
    STAGED = 4


class Backing(IntEnum):
    """The memory of a cache on the host (``PLK_BACKING_*``)."""

    HEAP = 0
    #: Mapped memory without a file.
    ANONYMOUS = 1
    #: A file that is deleted with the context.
    TEMPORARY = 2
    #: A file that a later process can reuse.
    FILE = 3


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The parameters for loading a model."""

    n_gpu_layers: int = 0
    use_mmap: bool = True
    use_mlock: bool = False
    check_tensors: bool = True
    vocab_only: bool = False
    rpc_servers: str | None = None
    devices: str | None = None

    def __post_init__(self) -> None:
        _check(self, arguments.flag, "use_mmap use_mlock check_tensors vocab_only")
        _check(self, arguments.c_text_or_none, "rpc_servers devices")
        _check(self, arguments.integer, "n_gpu_layers")
        if not 0 <= self.n_gpu_layers <= arguments.INT32:
            msg = (
                f"n_gpu_layers must be 0 or more, not {arguments.shown(self.n_gpu_layers)}; a "
                "number larger than the model's layers, such as 999, offloads all of them"
            )
            raise UsageError(msg)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a loaded model. Token ids are -1 if the vocabulary has none.

    ``n_ctx_train`` is the context of the training, in tokens. ``n_embd`` is the width of a layer,
    and ``n_embd_k_gqa`` and ``n_embd_v_gqa`` those of a row of K and V, in values. ``token_eot``
    ends a turn of a chat. ``n_bytes`` is the size of the weights. ``n_embd_out`` is the size of an
    embedding. ``n_cls_out`` is the number of outputs of a classification head; 0 if the release
    does not report it.
    """

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
    n_cls_out: int = 0
    n_embd_out: int = 0


@dataclass(frozen=True, slots=True)
class ContextParams:
    """The parameters of a new context. ``flash_attn`` None lets llama.cpp decide.

    llama.cpp uses cache types, ``swa_full``, ``embeddings`` and threads as given, or refuses the
    context. It may change sizes, flash attention and ``kv_unified``; `ContextInfo` has the result.
    Sizes are as for `Model.context`. ``type_k`` and ``type_v`` are ggml type numbers. ``guard``
    False disables the checks and the rollback of this package. A negative ``defrag_thold`` and a
    ``defrag_plan``, ``defrag_mover`` or ``defrag_threads`` of 0 leave the choice to the library,
    which reads environment variables. ``kv_backing`` is a `Backing`. ``kv_keep`` 1 reuses the file
    at ``kv_path``, 2 starts empty. ``kv_model`` identifies the model that the file must belong to.
    ``pooling`` is a `Pooling`, for ``embeddings``.
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
    pooling: int = -1

    def __post_init__(self) -> None:
        _put(self, "flash_attn", arguments.flash_attn(self.flash_attn))
        for low, high, names in _CONTEXT:
            _check(self, arguments.integer, names, low, high)
        _check(self, arguments.flag, "kv_unified swa_full offload_kqv embeddings guard kv_huge")
        _check(self, arguments.number, "defrag_thold")
        _check(self, arguments.c_text_or_none, "kv_path kv_model")


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """The properties of a created context, as the library reports them; None if unknown.

    ``n_ctx`` counts cells, ``n_batch`` and ``n_ubatch`` tokens, ``n_seq_max`` sequences, and
    ``n_swa`` positions of the sliding window (0: none). ``contiguous_slots``: a micro-batch needs
    one hole.
    ``n_streams`` is the number of streams of each cache. With 1, all sequences share the cells;
    with more, each sequence has its own. It is 0 for memory without cells and -1 if unknown.
    The library defragments before a decode if the fraction of unnecessary cells exceeds
    ``defrag_thold``; never if that is negative, or 0 since 0.3.6. ``defrag_threads`` is 0 if
    unknown. ``pooling`` is that of the embeddings. ``n_threads`` and ``n_threads_batch`` are in use
    for one token and for more.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    memory: MemoryType
    n_caches: int
    can_shift: bool
    can_remove_partly: bool | None
    contiguous_slots: bool | None
    defrag: bool
    flash_attn: bool | None
    v_transposed: bool | None
    n_swa: int = 0
    n_streams: int = -1
    defrag_thold: float = -1.0
    defrag_plan: DefragPlan = DefragPlan.UNKNOWN
    defrag_mover: DefragMover = DefragMover.UNKNOWN
    defrag_threads: int = 0
    pooling: Pooling = Pooling.MODEL
    n_threads: int = 0
    n_threads_batch: int = 0


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
    """One stream of one cache; ``used``, ``head`` and ``host`` are -1 if unknown.

    ``head`` is the cell where the next search for a slot begins. ``type_k`` and ``type_v`` are ggml
    type numbers. ``host`` is 1 if K and V are in host memory, and 0 if they are on a device.
    ``bytes_k`` and ``bytes_v`` are the sizes of all layers.
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
    """The cells of one stream.

    ``pos`` (n,) int32, -1 where free; ``shift`` (n,) int32, the pending shift that ``pos`` already
    contains; ``seqs`` (n, words) uint64, a bit per sequence.
    """

    info: CellsInfo
    pos: NDArray[np.int32]
    shift: NDArray[np.int32]
    seqs: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RawDefrag:
    """The result of one defragmentation; -1 if the build cannot report a value."""

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
    """Totals of a context since its creation (patch ``kv-counters``).

    ``ns`` is the time of defragmentations and ``plan_ns`` the part for plans, in nanoseconds.
    ``scratch_bytes`` is the maximum of one defragmentation, not a sum. A value is -1 if no patch of
    the build counts it.
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
        """Return the difference; ``scratch_bytes`` remains the maximum, and -1 remains -1."""
        since = {}
        for name in self.__slots__:
            value = getattr(self, name)
            whole = value < 0 or name == "scratch_bytes"
            since[name] = value if whole else value - getattr(other, name)
        return Counters(**since)


@dataclass(frozen=True, slots=True)
class MappingInfo:
    """Describe the mapped memory of a context (the patch ``mmap-kv``); see `RawMapping`."""

    kind: Backing
    n_mappings: int
    n_tensors: int
    n_cells: int
    kept: bool
    resumed: bool
    generation: int
    bytes_reserved: int
    bytes_committed: int
    bytes_file: int
    bytes_elsewhere: int


@dataclass(frozen=True, slots=True)
class RawMapping:
    """The memory of a mapped cache.

    ``rows`` (n_tensors, 5) uint64: cache, layer, 0 for K and 1 for V, bytes reserved, committed.
    """

    info: MappingInfo
    rows: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device: its name, as for ``devices`` of a load, and a text that describes it.

    ``kind`` is "cpu", "gpu", "accelerator" or "unknown". Its memory is in bytes, 0 if the backend
    does not report it.
    """

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int

    @property
    def kv(self) -> str:
        """Where K and V of layers on this device are stored: "device" or "host"."""
        return "device" if self.kind == "gpu" else "host"


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """The parameters of a sampler. Temperature 0 selects the most likely token.

    ``samplers`` names the samplers to apply, in order (None: all of `SAMPLERS` in their order);
    a named sampler is off at its default value. Logit biases and the grammar come before them,
    the random choice after them. ``mirostat`` 1 or 2, or ``adaptive_target``, replaces it.

    ``logit_bias`` maps tokens to numbers that are added to their logits; -inf excludes a token.
    ``penalty_repeat`` divides the logits of the last ``penalty_last_n`` tokens, ``penalty_freq``
    is subtracted for each occurrence there, and ``penalty_present`` once. ``dry_multiplier``
    penalizes tokens that extend a repetition of more than ``dry_allowed_length`` tokens;
    ``dry_breakers`` are strings that no repetition crosses. ``dynatemp_range`` is added to and
    subtracted from the temperature, by the entropy. ``grammar`` is a text in GBNF with a rule
    ``root``. Samplers with equal parameters and an equal ``seed`` choose equal tokens from equal
    logits; with None, each sampler draws a random seed.

    These values turn a sampler off: ``top_k`` 0 and -1, ``top_p`` and ``typical_p`` 1,
    ``penalty_repeat`` 1, and 0 for the others. Raises UsageError for mirostat and adaptive_target
    at temperature 0, and for a parameter of a sampler that ``samplers`` does not name.
    """

    seed: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_last_n: int = 64
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 1024
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = 0.0
    adaptive_decay: float = 0.9
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        # llama.cpp draws another seed for each sampler in place of the largest number.
        _put(self, "seed", arguments.whole_or_none("seed", self.seed, 0, _MAX_SEED))
        for low, high, names in _SAMPLER:
            _check(self, arguments.integer, names, low, high)
        for least, most, names in _SAMPLER_NUMBERS:
            _check(self, arguments.number, names, least, most)
        _check(self, arguments.c_text_or_none, "grammar")
        _put(self, "logit_bias", _checked_bias(self.logit_bias))
        breakers = arguments.items("dry_breakers", self.dry_breakers, "an iterable of texts")
        for each in breakers:
            if not arguments.c_text("an item of dry_breakers", each) or "\x1f" in each:
                expected = "at least one character, and not the separator \\x1f"
                raise arguments.wrong_value("an item of dry_breakers", each, expected)
        _put(self, "dry_breakers", tuple(breakers))
        self._check_order()

    def _check_order(self) -> None:
        if self.mirostat and self.adaptive_target:
            raise UsageError("mirostat and adaptive_target both choose the token; pass one of them")
        for name in ("mirostat", "adaptive_target"):
            if getattr(self, name) and not self.temperature:
                raise UsageError(f"{name} has no effect at temperature 0; pass temperature=1.0")
        if self.samplers is None:
            return
        names = arguments.items("samplers", self.samplers, "an iterable of names, or None")
        for each in names:
            arguments.choice("an item of samplers", each, SAMPLERS)
        for name in SAMPLERS:
            if name not in names and name in self._active:
                raise UsageError(f"samplers does not name {name!r}, but its parameters are set")
        _put(self, "samplers", tuple(names))

    @property
    def _active(self) -> set[str]:
        """Return the names of the samplers that are on."""
        on = {
            "penalties": self.penalty_last_n > 0
            and (self.penalty_repeat, self.penalty_freq, self.penalty_present) != (1.0, 0.0, 0.0),
            "dry": self.dry_multiplier > 0 and self.dry_penalty_last_n > 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typical_p": 0 < self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0,
            "temperature": self.temperature not in (0.0, 1.0) or self.dynatemp_range > 0,
        }
        return {name for name, active in on.items() if active}

    def seeded(self) -> SamplerParams:
        """Return these parameters with a seed, a random one in place of None."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4), "little") % (_MAX_SEED + 1))

    @property
    def keeps_history(self) -> bool:
        """Return whether a token depends on those sampled before, so of one sequence only."""
        stateful = self.mirostat or self.adaptive_target or self.grammar is not None
        return bool(stateful or self._active & {"penalties", "dry"})

    @property
    def is_greedy(self) -> bool:
        """Return whether the result is always the most likely token of the model."""
        changes = self.keeps_history or self.logit_bias or "xtc" in self._active
        return self.temperature == 0 and not changes

    @property
    def needs(self) -> Capability:
        """Return the capabilities that a build must have to sample with these parameters."""
        needed, active = Capability.SAMPLER, self._active
        for name in ("top_n_sigma", "xtc", "dry"):
            if name in active:
                needed |= Capability[name.upper()]
        if self.adaptive_target:
            needed |= Capability.ADAPTIVE_P
        if self.grammar is not None:
            needed |= Capability.GRAMMAR
        more = self.penalty_freq or self.penalty_present or self.dynatemp_range or self.mirostat
        if more or "typical_p" in active or self.samplers is not None:
            needed |= Capability.SAMPLER_CHAIN
        return needed


def _checked_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Return the pairs of a bias: tokens with finite numbers or -inf."""
    expected = "a mapping of tokens to numbers"
    pairs = value.items() if isinstance(value, Mapping) else value
    found = []
    for pair in arguments.items("logit_bias", pairs, expected):
        both = arguments.items("an item of logit_bias", pair, "a token and a number")
        if len(both) != 2:
            raise arguments.wrong_value("an item of logit_bias", pair, "a token and a number")
        token, bias = both
        if bias != -math.inf:
            bias = arguments.number("a value of logit_bias", bias, -1e6, 1e6)
        found.append((arguments.integer("a token of logit_bias", token, 0, arguments.INT32), bias))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LibraryInfo:
    """The facts of a loaded library: ABI number, variant, capabilities, sections of the shim.

    ``probes`` has the implementation that the shim chose for each operation, None if it is absent.
    """

    abi: int
    variant: str
    capabilities: Capability
    probes: dict[str, str | None] = field(default_factory=dict)

    def require(self, capability: Capability, deed: str) -> None:
        """Raise Unsupported unless the build has the capability."""
        if capability not in self.capabilities:
            msg = f"this build cannot {deed} (capability {capability.name} is absent)"
            raise Unsupported(msg, capability.name or "")


class Native(Protocol):
    """Call one loaded library. A context is for one thread at a time, except for `cancel`."""

    about: LibraryInfo
    #: Environment variables of its process that differ from those of this process.
    environment: Mapping[str, str]

    def close(self) -> None:
        """Release the library; every handle is invalid afterwards."""

    def many(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Run operations, each (name, arguments), in order; the first error ends it."""

    def logs(self) -> list[tuple[int, str]]:
        """Drain the log: (level, line) with level 1 debug, 2 info, 3 warning, 4 error."""

    def log_level(self, lowest: int) -> int:
        """Set the minimum log level; return the previous one."""

    def devices(self) -> list[Device]:
        """List the devices."""

    # models
    def model_load(self, path: str, params: ModelParams) -> ModelHandle:
        """Load a model or raise `ModelError`."""

    def model_free(self, model: ModelHandle) -> None:
        """Free a model after its contexts and samplers."""

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
        """Return whether a token ends a generation."""

    # adapters
    def adapter_load(self, model: ModelHandle, path: str, n_pairs: int) -> AdapterHandle:
        """Load a LoRA adapter of ``n_pairs`` pairs of tensors, or raise `AdapterError`.

        The caller has checked the file.
        """

    def adapter_free(self, adapter: AdapterHandle) -> None:
        """Free an adapter. Contexts that use it keep it until they are freed."""

    def adapters_set(
        self, context: ContextHandle, adapters: Sequence[int], scales: Sequence[float]
    ) -> None:
        """Replace the adapters of a context. The cells keep their content."""

    # contexts
    def context_new(self, model: ModelHandle, params: ContextParams) -> ContextHandle:
        """Create a context or raise `ContextError`."""

    def context_free(self, context: ContextHandle) -> None:
        """Free a context."""

    def context_info(self, context: ContextHandle) -> ContextInfo:
        """Return the properties of a context."""

    def buffers(self, context: ContextHandle) -> list[Buffer]:
        """Return the allocations that the library logged for a context; empty if there are none."""

    def threads(self, context: ContextHandle, n_threads: int, n_threads_batch: int) -> None:
        """Set the number of compute threads."""

    # sequences: p0 < 0 from the start, p1 < 0 to the end, seq < 0 every sequence
    def clear(self, context: ContextHandle, data: bool) -> None:
        """Remove every sequence; ``data`` clears the K and V bytes as well."""

    def seq_rm(self, context: ContextHandle, seq: int, p0: int, p1: int) -> bool:
        """Remove positions; False when the memory refuses a partial removal."""

    def seq_cp(self, context: ContextHandle, src: int, dst: int, p0: int, p1: int) -> None:
        """Share the cells of positions with another sequence."""

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
        """Apply pending shifts and stream copies."""

    def cells(self, context: ContextHandle, cache: int) -> RawCells:
        """Read the cells of one stream of one cache, or raise `Unsupported`."""

    def counters(self, context: ContextHandle) -> Counters:
        """Read the counters or raise `Unsupported`."""

    # mapped memory
    def mapping(self, context: ContextHandle) -> RawMapping:
        """Return the memory of a mapped cache. Raises `Unsupported` for a cache on the heap."""

    def mapping_trim(self, context: ContextHandle) -> int:
        """Return the memory above the last used cell to the system; return its bytes."""

    def mapping_flush(self, context: ContextHandle, tokens: NDArray[np.int32] | None) -> None:
        """Write a kept cache to its file, with a token for each cell of all caches."""

    def mapping_tokens(self, context: ContextHandle) -> NDArray[np.int32]:
        """Return the tokens that the last flush was given."""

    # states
    def state_save(self, context: ContextHandle, seq: int) -> bytes:
        """Return the state of a sequence."""

    def state_load(self, context: ContextHandle, seq: int, state: bytes | memoryview) -> int:
        """Restore a sequence; return the bytes read, 0 when the library refused."""

    # decoding
    def decode(
        self,
        context: ContextHandle,
        token: NDArray[np.int32] | NDArray[np.float32] | list[int],
        pos: NDArray[np.int32] | list[int],
        seq_count: NDArray[np.int32] | None,
        seq_id: NDArray[np.int32] | tuple[int, ...],
        logits: NDArray[np.int8] | tuple[int, ...] | None,
    ) -> int:
        """Run one batch; return llama_decode's own code: 0, 1, 2 or a negative one.

        ``seq_count`` None is one sequence per token; ``logits`` has a flag per token, None is the
        last token. With a list of tokens, which is faster for few of them, ``pos`` is a list as
        well, ``seq_id`` and ``logits`` are tuples, and ``seq_count`` is None. Raises `NativeError`
        when llama.cpp threw or an argument was refused.

        ``token`` may be embeddings (n, n_embd) instead, except in a guarded context, which raises
        `Unsupported`. ``pos`` then is (1, n), or (4, n) for a model with M-RoPE: the time, row,
        column and 0 of each embedding.
        """

    def logits(self, context: ContextHandle, index: int, n_vocab: int) -> NDArray[np.float32]:
        """Return the logits (n_vocab,) at an index of the last batch, without a copy if possible.

        A negative index counts from the end of the outputs, as in llama.cpp. The caller guards
        against staleness.
        """

    def logits_all(self, context: ContextHandle, n_vocab: int) -> NDArray[np.float32]:
        """Return the logits (n, n_vocab) of every place of the last batch that has any, in order.

        The result is a view if the library stores the rows contiguously, else a copy.
        """

    def embeddings(self, context: ContextHandle, index: int) -> NDArray[np.float32]:
        """Return the embedding (n,) of a place of the last batch, without a copy if possible.

        With pooling, ``index`` is a sequence of the last batch. ``n`` is `ModelInfo.n_embd_out`;
        for `Pooling.RANK`, the number of outputs of the classification head.
        """

    def cancel(self, context: ContextHandle) -> None:
        """End the decode that runs; callable from any thread."""

    def cancel_after(self, context: ContextHandle, polls: int) -> None:
        """Abort later decodes at this poll of the abort callback; negative: never."""

    def cancel_polls(self, context: ContextHandle) -> int:
        """Return how often the last decode polled the abort callback."""

    # samplers
    def sampler_new(self, model: ModelHandle, params: SamplerParams) -> SamplerHandle:
        """Create a sampler."""

    def sampler_free(self, sampler: SamplerHandle) -> None:
        """Free a sampler."""

    def sampler_reset(self, sampler: SamplerHandle) -> None:
        """Clear the token history of a sampler."""

    def sample(self, sampler: SamplerHandle, context: ContextHandle, index: int) -> int:
        """Choose a token from the logits of a place in the last batch, and accept it."""

    def sample_logits(self, sampler: SamplerHandle, logits: NDArray[np.float32]) -> int:
        """Choose a token from logits (n_vocab,), finite or -inf, and accept it."""

    def sampler_accept(self, sampler: SamplerHandle, tokens: NDArray[np.int32]) -> None:
        """Add tokens (n,) to the history for penalties and DRY."""

    def sample_all(self, sampler: SamplerHandle, context: ContextHandle, room: int) -> list[int]:
        """Choose a token for every place of the last batch with logits, in order.

        Raises `NativeError` when there are more than ``room``, or none.
        """

    def run(
        self,
        sampler: SamplerHandle,
        context: ContextHandle,
        token: Sequence[int],
        pos: Sequence[int],
        seq_id: tuple[int, ...],
        steps: int,
        stop: bool,
    ) -> tuple[int, list[list[int]]]:
        """Decode a token of each sequence and choose the next ones, ``steps`` times in one call.

        Returns the last decode's code and the tokens chosen after each step that was decoded; with
        ``stop``, those of the last step may contain an end-of-generation token.
        """
