"""What modules of `runtime` use of a model, a context and a sequence, as Protocols.

`Model`, `Context` and `Sequence` import these modules, which therefore cannot refer to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pyllamakv.binding.owner import Lock, Owner, ReadLock
    from pyllamakv.binding.protocol import (
        ContextHandle,
        ContextInfo,
        ContextParams,
        ModelHandle,
        ModelInfo,
        Native,
    )
    from pyllamakv.runtime.gguf_file import ModelFile
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.logits import Outputs
    from pyllamakv.runtime.snapshot import Snapshot


class ModelParts(Protocol):
    """A loaded model: `pyllamakv.runtime.model.Model`."""

    native: Native
    handle: ModelHandle
    owner: Owner[Any]
    info: ModelInfo
    file: ModelFile
    isolated: bool
    origin: str

    @property
    def path(self) -> Path:
        """Return the path of the file."""

    @property
    def chat_template(self) -> str | None:
        """Return the template of the file."""

    @property
    def schema_tokens(self) -> Any:
        """Return the vocabulary for JSON schemas."""

    def digest(self) -> str:
        """Return the digest of the files."""

    def meta(self, key: str) -> str | None:
        """Return a metadata value."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def detokenize(self, tokens: Iterable[int], special: bool = False) -> str:
        """Return the text of tokens."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""

    def is_eog(self, token: int) -> bool:
        """Return whether a token ends a generation."""


class Cells(Protocol):
    """The cells of a context: `pyllamakv.runtime.kv.KV`."""

    def try_snapshot(self) -> Snapshot | None:
        """Return the cells, or None if the build cannot read them."""

    def defrag_locked(self, *, fallback: bool) -> Any:
        """Defragment; the caller holds the context's lock."""


class Policy(Protocol):
    """What defragments a context: `pyllamakv.runtime.defrag_policy.DefragPolicy`."""

    trims: bool

    def freed(self) -> None:
        """Record that cells were freed."""


class KeptFile(Protocol):
    """The file of a kept cache: `pyllamakv.runtime.backing.KVFile`."""

    flushes: bool

    def flush(self, handle: ContextHandle) -> Any:
        """Write the cache to the file."""


class SequenceParts(Protocol):
    """A sequence: `pyllamakv.runtime.sequence.Sequence`."""

    id: int
    ledger: Ledger

    @property
    def context(self) -> ContextParts:
        """Return the context."""

    @property
    def next_pos(self) -> int:
        """Return the position of the next token."""

    def step(self, token: int) -> None:
        """Decode the next token."""

    def check(self, context: Any) -> None:
        """Raise Closed or UsageError unless this is an open sequence of an open context."""

    def __len__(self) -> int:
        """Return the number of tokens."""


class ContextParts(Protocol):
    """A context: `pyllamakv.runtime.context.Context`."""

    native: Native
    handle: ContextHandle
    params: ContextParams
    info: ContextInfo
    guard: bool
    embeds: bool
    n_vocab: int
    partitions: int
    stream_per_sequence: bool
    cancels: int
    ledgers: tuple[Ledger, ...]
    lock: Lock[Any]
    read_lock: ReadLock[Any]
    outputs: Outputs
    adapters_key: str

    @property
    def model(self) -> ModelParts:
        """Return the model."""

    @property
    def kv(self) -> Cells:
        """Return the cells."""

    @property
    def kv_file(self) -> KeptFile | None:
        """Return the file of a kept cache."""

    @property
    def defrag_policy(self) -> Policy:
        """Return what defragments the cells."""

    @property
    def adapters(self) -> Mapping[Any, float]:
        """Return the adapters in use with their scales."""

    @property
    def emptied(self) -> tuple[int, ...]:
        """Return the sequences that the last failed decode emptied."""

    def new_marks(self, n: int) -> int:
        """Reserve marks for cells."""

    def use_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Compute with these numbers of threads."""

    def sequence_id(self, sequence: Any) -> int:
        """Check a sequence, or the number of one, and return its id."""

    def check(self) -> None:
        """Raise Closed if this was closed."""

    def close(self) -> None:
        """Free the context."""
