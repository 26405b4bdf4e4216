"""Python API for the KV cache of llama.cpp: open a variant, decode, read and move cells.

    import pyllamakv as kv
    with kv.open() as library, library.load_model("model.gguf") as model:
        ...

The names below are imported when they are first used, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyllamakv import errors, models
    from pyllamakv.binding.protocol import (
        Backing,
        Capability,
        ContextInfo,
        ContextParams,
        Counters,
        DecodeStatus,
        DefragMover,
        DefragPlan,
        Device,
        MemoryType,
        ModelInfo,
        Pooling,
        SamplerParams,
    )
    from pyllamakv.binding.rpc_server import RpcServer
    from pyllamakv.cache.async_batcher import AsyncBatcher, AsyncGeneration
    from pyllamakv.cache.batcher import Batcher
    from pyllamakv.cache.checkpoints import CheckpointSchedule
    from pyllamakv.cache.context_cache import ContextCache, ContextCacheStats
    from pyllamakv.cache.generation import Generation
    from pyllamakv.cache.interface import Cache, CacheManager, Lease
    from pyllamakv.cache.lockstep import LockstepCache
    from pyllamakv.cache.prefix_cache import PrefixCache, PrefixStats
    from pyllamakv.cache.slot_cache import SlotCache
    from pyllamakv.errors import (
        AdapterError,
        ArgumentTypeError,
        BudgetTooSmall,
        Busy,
        Cancelled,
        ChatTemplateError,
        Closed,
        ContextError,
        CpuFeaturesMissing,
        DecodeError,
        DeviceLost,
        GrammarError,
        KVCacheFull,
        KvError,
        KVFileBusy,
        KVFileDamaged,
        KVFileDirty,
        KVFileError,
        KVFileForeign,
        KVFileFull,
        LoadError,
        ModelError,
        ModelUnverified,
        NativeError,
        NoKVSlot,
        NoSlotAvailable,
        NotBuilt,
        NotEnoughMemory,
        NoTokenAllowed,
        PagingError,
        PartialRemovalRefused,
        PrefixStoreBusy,
        PrefixStoreDamaged,
        PrefixStoreError,
        PrefixStoreForeign,
        PrefixStoreFull,
        PromptTooLong,
        ReprocessNeeded,
        SchemaError,
        SequenceChanged,
        SharedCells,
        StaleLogits,
        StateError,
        StateForeign,
        TraceMismatch,
        Unsupported,
        UsageError,
        WorkerDied,
        WorkerTimeout,
    )
    from pyllamakv.open_variant import OpenLibrary, open, serve_rpc, variants
    from pyllamakv.runtime import metrics
    from pyllamakv.runtime.adapter import Adapter
    from pyllamakv.runtime.backing import KVMemory, LayerMemory
    from pyllamakv.runtime.batch import Batch
    from pyllamakv.runtime.breakdown import MemoryBreakdown, memory_breakdown
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.defrag_policy import DefragCosts, measure_defrag_costs
    from pyllamakv.runtime.generated_text import TextStream, Usage
    from pyllamakv.runtime.kv import KV, DefragReport
    from pyllamakv.runtime.logits import Embedding, Logits, LogitsRows
    from pyllamakv.runtime.model import Model
    from pyllamakv.runtime.sampler import NumpySampler, Sampler, TokenLogprobs
    from pyllamakv.runtime.sequence import Sequence
    from pyllamakv.runtime.snapshot import CellMap, KVStats, Moves, Snapshot
    from pyllamakv.traces.recording import Recording, record
    from pyllamakv.view.live import watch

__version__ = "0.1.0"

_MODULES = {
    "binding.protocol": (
        "Backing Capability ContextInfo ContextParams Counters DecodeStatus DefragMover DefragPlan "
        "Device MemoryType ModelInfo Pooling SamplerParams"
    ),
    "binding.rpc_server": "RpcServer",
    "cache.async_batcher": "AsyncBatcher AsyncGeneration",
    "cache.batcher": "Batcher",
    "cache.checkpoints": "CheckpointSchedule",
    "cache.context_cache": "ContextCacheStats ContextCache",
    "cache.generation": "Generation",
    "cache.interface": "Cache Lease CacheManager",
    "cache.lockstep": "LockstepCache",
    "cache.prefix_cache": "PrefixCache PrefixStats",
    "cache.slot_cache": "SlotCache",
    "errors": (
        "AdapterError ArgumentTypeError BudgetTooSmall "
        "Busy Cancelled ChatTemplateError Closed ContextError CpuFeaturesMissing DecodeError "
        "DeviceLost GrammarError "
        "KvError LoadError ModelError ModelUnverified NoTokenAllowed SchemaError "
        "NativeError NoKVSlot NotBuilt NotEnoughMemory PartialRemovalRefused PromptTooLong "
        "SequenceChanged SharedCells StaleLogits StateError StateForeign Unsupported UsageError "
        "WorkerDied WorkerTimeout "
        "KVCacheFull NoSlotAvailable Unsupported PagingError ReprocessNeeded TraceMismatch "
        "KVFileBusy KVFileDamaged KVFileDirty KVFileError KVFileForeign KVFileFull "
        "PrefixStoreBusy PrefixStoreDamaged PrefixStoreError PrefixStoreForeign PrefixStoreFull"
    ),
    "traces.recording": "Recording record",
    "view.live": "watch",
    "runtime.adapter": "Adapter",
    "runtime.backing": "KVMemory LayerMemory",
    "runtime.batch": "Batch",
    "runtime.breakdown": "MemoryBreakdown memory_breakdown",
    "runtime.defrag_policy": "DefragCosts measure_defrag_costs",
    "runtime.context": "Context",
    "runtime.generated_text": "TextStream Usage",
    "runtime.kv": "KV DefragReport",
    "runtime.logits": "Embedding Logits LogitsRows",
    "runtime.model": "Model",
    "open_variant": "OpenLibrary open serve_rpc variants",
    "runtime.sampler": "NumpySampler Sampler TokenLogprobs",
    "runtime.sequence": "Sequence",
    "runtime.snapshot": "CellMap KVStats Moves Snapshot",
}
#: Names that are modules themselves.
_WHOLE = {"errors": "errors", "metrics": "runtime.metrics", "models": "models"}
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "KV",
    "Adapter",
    "AdapterError",
    "ArgumentTypeError",
    "AsyncBatcher",
    "AsyncGeneration",
    "Backing",
    "Batch",
    "Batcher",
    "BudgetTooSmall",
    "Busy",
    "Cache",
    "CacheManager",
    "Cancelled",
    "Capability",
    "CellMap",
    "ChatTemplateError",
    "CheckpointSchedule",
    "Closed",
    "Context",
    "ContextCache",
    "ContextCacheStats",
    "ContextError",
    "ContextInfo",
    "ContextParams",
    "Counters",
    "CpuFeaturesMissing",
    "DecodeError",
    "DecodeStatus",
    "DefragCosts",
    "DefragMover",
    "DefragPlan",
    "DefragReport",
    "Device",
    "DeviceLost",
    "Embedding",
    "Generation",
    "GrammarError",
    "KVCacheFull",
    "KVFileBusy",
    "KVFileDamaged",
    "KVFileDirty",
    "KVFileError",
    "KVFileForeign",
    "KVFileFull",
    "KVMemory",
    "KVStats",
    "KvError",
    "LayerMemory",
    "Lease",
    "LoadError",
    "LockstepCache",
    "Logits",
    "LogitsRows",
    "MemoryBreakdown",
    "MemoryType",
    "Model",
    "ModelError",
    "ModelInfo",
    "ModelUnverified",
    "Moves",
    "NativeError",
    "NoKVSlot",
    "NoSlotAvailable",
    "NoTokenAllowed",
    "NotBuilt",
    "NotEnoughMemory",
    "NumpySampler",
    "OpenLibrary",
    "PagingError",
    "PartialRemovalRefused",
    "Pooling",
    "PrefixCache",
    "PrefixStats",
    "PrefixStoreBusy",
    "PrefixStoreDamaged",
    "PrefixStoreError",
    "PrefixStoreForeign",
    "PrefixStoreFull",
    "PromptTooLong",
    "Recording",
    "ReprocessNeeded",
    "RpcServer",
    "Sampler",
    "SamplerParams",
    "SchemaError",
    "Sequence",
    "SequenceChanged",
    "SharedCells",
    "SlotCache",
    "Snapshot",
    "StaleLogits",
    "StateError",
    "StateForeign",
    "TextStream",
    "TokenLogprobs",
    "TraceMismatch",
    "Unsupported",
    "Usage",
    "UsageError",
    "WorkerDied",
    "WorkerTimeout",
    "__version__",
    "errors",
    "measure_defrag_costs",
    "memory_breakdown",
    "metrics",
    "models",
    "open",
    "record",
    "serve_rpc",
    "variants",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name on its first use."""
    if name in _WHOLE:
        return importlib.import_module(f"pyllamakv.{_WHOLE[name]}")
    if name not in _WHERE:
        msg = f"module 'pyllamakv' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"pyllamakv.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)
