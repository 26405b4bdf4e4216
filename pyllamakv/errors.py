"""All exceptions of the package. This module imports nothing else, so every layer can use it.

A message states what was expected and what to do. Fields contain the state that explains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "AdapterError",
    "AddressInUse",
    "ArchiveError",
    "ArgumentTypeError",
    "BranchRefused",
    "BudgetTooSmall",
    "BuildError",
    "Busy",
    "Cancelled",
    "ChatTemplateError",
    "Closed",
    "CommandFailed",
    "ContextError",
    "CpuFeaturesMissing",
    "DecodeError",
    "DeviceLost",
    "DiskFailed",
    "DiskFull",
    "FetchError",
    "GitError",
    "GrammarError",
    "HarnessError",
    "HashMismatch",
    "KVCacheFull",
    "KVFileBusy",
    "KVFileDamaged",
    "KVFileDirty",
    "KVFileError",
    "KVFileForeign",
    "KVFileFull",
    "KvError",
    "LoadError",
    "LockFileError",
    "Locked",
    "ManifestError",
    "ModelError",
    "ModelUnverified",
    "NativeError",
    "NoKVSlot",
    "NoPortApplies",
    "NoSlotAvailable",
    "NoTokenAllowed",
    "NotBuilt",
    "NotEnoughMemory",
    "NotFetched",
    "PagingError",
    "PartialRemovalRefused",
    "PatchConflict",
    "PatchError",
    "PatchFormatError",
    "PatchLintError",
    "PrefixStoreBusy",
    "PrefixStoreDamaged",
    "PrefixStoreError",
    "PrefixStoreForeign",
    "PrefixStoreFull",
    "PromptTooLong",
    "RebaseConflict",
    "ReprocessNeeded",
    "RequestFailed",
    "ScenarioFailed",
    "SchemaError",
    "ScriptError",
    "SequenceChanged",
    "ServerDied",
    "SharedCells",
    "SourceError",
    "StaleLogits",
    "StateError",
    "StateForeign",
    "ToolMissing",
    "TraceMismatch",
    "TreeDirty",
    "UnknownModel",
    "UnknownPatch",
    "UnknownRelease",
    "Unsupported",
    "Untestable",
    "UsageError",
    "WorkerDied",
    "WorkerTimeout",
]


class KvError(Exception):
    """Base class of all errors that this package raises on purpose."""

    #: Exit status of the command line for this error.
    exit_code = 2
    #: The next step for the user, if the message does not contain it.
    hint = ""


class UsageError(KvError, ValueError):
    """An argument is invalid. Nothing was changed."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has the wrong type. This is a UsageError and a TypeError."""


class Unsupported(KvError):
    """The library, release, platform or memory type lacks a feature. Nothing was changed.

    ``capability`` is the missing capability of the library, and ``reason`` what the library or a
    cache manager found, without the operation that it refuses. Either may be empty.
    """

    def __init__(self, message: str, capability: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.capability = capability
        self.reason = reason


# Errors of finding and fetching releases.


class SourceError(KvError):
    """Base class of errors of finding and fetching releases."""

    exit_code = 4


class UnknownRelease(SourceError):
    """Name a release that neither the lock nor the index has, with the closest names."""

    exit_code = 2

    def __init__(self, message: str, name: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.suggestions = tuple(suggestions)


class UnknownModel(SourceError, UsageError):
    """Name a model that the lock file does not have, with the closest names."""

    exit_code = 2

    def __init__(self, message: str, name: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.suggestions = tuple(suggestions)


class NotFetched(SourceError):
    """A model has not been fetched, or the lock file has nothing to fetch a release from.

    The message has the command that fetches a model.
    """

    exit_code = 2


class FetchError(SourceError):
    """An archive could not be fetched. Existing data is unchanged."""


class HashMismatch(FetchError):
    """Report an archive, commit or tree whose hash is not the one in the lock."""

    def __init__(self, message: str, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class ArchiveError(FetchError):
    """Report an archive that is truncated, hostile or not of the expected shape."""


class DiskFull(FetchError):
    """The disk is full. The message has the path."""


class DiskFailed(FetchError):
    """The disk failed or is read-only. The message has the path."""


class LockFileError(SourceError):
    """Report a lock file that cannot be read."""

    exit_code = 2


class GitError(SourceError):
    """A git command failed: command, exit status and output."""

    exit_code = 2

    def __init__(self, command: Sequence[str], code: int, output: str) -> None:
        shown = " ".join(command)
        super().__init__(f"`{shown}` exited with {code}: {output.strip() or 'no output'}")
        self.command = tuple(command)
        self.code = code
        self.output = output


class Locked(SourceError):
    """Another process holds a lock of the data directory. The message names the lock."""


class BranchRefused(SourceError):
    """A branch cannot be replaced: it has commits of another author, or is checked out."""

    exit_code = 2


class TreeDirty(SourceError):
    """Files of a vendored tree differ from the exported ones."""

    exit_code = 1

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = tuple(files)


# Errors of patches.


class PatchError(KvError):
    """Base class of errors of patches."""


class UnknownPatch(PatchError, UsageError):
    """Name a patch that the series does not have, with the closest ids."""

    exit_code = 2

    def __init__(self, message: str, name: str = "", close: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.close = tuple(close)


class PatchFormatError(PatchError):
    """Report a patch file that cannot be read, with its line."""

    def __init__(self, message: str, path: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class PatchLintError(PatchError):
    """List everything that lint found."""

    exit_code = 1

    def __init__(self, message: str, findings: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class PatchConflict(PatchError):
    """Name the hunk that does not apply: patch, file, line, what was expected and found.

    ``half_applied`` is whether the tree already contains some of the patch's changes, and
    ``contained`` whether it contains all of them.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        patch: str = "",
        file: str = "",
        hunk: int = 0,
        line: int = 0,
        expected: str = "",
        found: str = "",
        half_applied: bool = False,
        contained: bool = False,
    ) -> None:
        super().__init__(message)
        self.half_applied = half_applied
        self.contained = contained
        self.patch = patch
        self.file = file
        self.hunk = hunk
        self.line = line
        self.expected = expected
        self.found = found


class NoPortApplies(PatchError):
    """Report that no port of a patch applies to a release, with every conflict."""

    exit_code = 3

    def __init__(self, message: str, conflicts: Sequence[PatchConflict] = ()) -> None:
        super().__init__(message)
        self.conflicts = tuple(conflicts)


class RebaseConflict(PatchError):
    """A rebase stopped at a conflict, which the user must resolve."""

    exit_code = 3

    def __init__(self, message: str, folder: Path | None = None, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.folder = folder
        self.files = tuple(files)


# Errors of building and loading variants.


class BuildError(KvError):
    """Base class of errors of building."""


class ToolMissing(BuildError):
    """Name a tool that is not installed, and the command that installs it."""

    def __init__(self, message: str, tool: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.tool = tool
        self.hint = hint


class CommandFailed(BuildError):
    """A command failed: command, exit status, first error and path of the log."""

    exit_code = 1

    def __init__(
        self, message: str, command: Sequence[str], code: int, output: str, first_error: str = ""
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.code = code
        self.output = output
        self.first_error = first_error


class ManifestError(BuildError):
    """Report a variant whose manifest is missing, damaged or does not match its library."""


class NotBuilt(BuildError):
    """A variant has not been built. The message has the command that builds it."""


# Errors of the native library.


class NativeError(KvError):
    """An error of the native library, with its last log lines in ``log``.

    ``code`` is the status of its call. After a failed assertion of llama.cpp, the context can only
    be closed.
    """

    def __init__(self, message: str, *, code: int = 0, log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.log = tuple(log)


class LoadError(NativeError):
    """A library cannot be loaded: file, ABI, manifest, CPU features or driver."""


class CpuFeaturesMissing(LoadError):
    """A variant uses CPU features that this machine lacks. Raised before the library is loaded.

    ``missing`` are their names in ``/proc/cpuinfo``.
    """

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class ModelError(NativeError):
    """A model file cannot be loaded. The message states the reason.

    ``architecture`` is that of the file, or empty if the file could not be read.
    """

    def __init__(
        self, message: str, *, code: int = 0, log: Sequence[str] = (), architecture: str = ""
    ) -> None:
        super().__init__(message, code=code, log=log)
        self.architecture = architecture


class ModelUnverified(ModelError):
    """The content of a model or adapter is unknown: its file is gone, or changed after the load.

    Load the file again, or pass ``accept_unverified_model=True`` if the content is the same.
    """


class AdapterError(NativeError):
    """A LoRA adapter cannot be loaded: damaged, no adapter, or of another model."""


class ContextError(NativeError):
    """A context cannot be created. The message names the parameter."""


class NotEnoughMemory(ContextError):
    """A context does not fit into memory, which has ``available`` of ``needed`` bytes.

    Raised before any allocation.
    """

    def __init__(self, message: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class KVFileError(ContextError):
    """Base class of errors about the file of a cache."""


class KVFileFull(KVFileError):
    """The disk has no room for the file of a cache, or for the copy that `KV.flush` makes."""


class KVFileBusy(KVFileError):
    """The file is the cache of another context or process."""


class KVFileDirty(KVFileError):
    """The last owner of a cache file ended before a flush, and no copy of a flush exists."""


class KVFileForeign(KVFileError):
    """The file is no cache file, or of another format, model, release, shape or adapters."""


class KVFileDamaged(KVFileError):
    """The checksum of a cache file does not match, or the file is truncated."""


class AddressInUse(UsageError):
    """A server cannot listen: the address is in use, or does not belong to this machine."""


class RequestFailed(NativeError):
    """A server refused a request. ``code`` is the HTTP status, and the message its reason."""


class Closed(KvError, RuntimeError):
    """An object was used after it was closed."""


class Busy(KvError, RuntimeError):
    """Another thread, a signal handler or a callback used a context that is in use."""


class StaleLogits(KvError, RuntimeError):
    """The logits were overwritten by a later decode."""


class SequenceChanged(KvError, RuntimeError):
    """A generation cannot continue, because something else changed the end of its sequence."""


class WorkerDied(NativeError):
    """A worker ended. The message has its exit status or signal, and its last lines."""

    def __init__(
        self, message: str, *, signal: int = 0, exitcode: int | None = None, log: Sequence[str] = ()
    ) -> None:
        super().__init__(message, log=log)
        self.signal = signal
        self.exitcode = exitcode


class WorkerTimeout(WorkerDied):
    """A worker did not answer in time and was killed."""


class ServerDied(WorkerDied):
    """A llama-server ended, or did not answer in time and was stopped.

    The message has its exit status or signal, and its last log lines.
    """


class DeviceLost(WorkerDied):
    """A device or RPC server of a context was lost."""


# Errors of decodes and sequences.


class DecodeError(NativeError):
    """A decode failed. `Context.emptied` lists the sequences that have no tokens now.

    All others keep theirs. The subclasses name the reason: `NoKVSlot` and `Cancelled`.
    """


class NoKVSlot(DecodeError):
    """A batch found no slot.

    ``cause`` is ``"full"`` (too few free cells), ``"fragmented"`` (enough, but scattered) or
    ``"other"``. ``n_tokens`` is the size of the batch. ``stats`` are the statistics of the cache at
    that time.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: str = "other",
        n_tokens: int = 0,
        stats: Any = None,
        log: Sequence[str] = (),
    ) -> None:
        super().__init__(message, code=1, log=log)
        self.cause = cause
        self.n_tokens = n_tokens
        self.stats = stats


class Cancelled(DecodeError):
    """A decode or a generation was cancelled.

    `Context.emptied` lists the sequences without tokens now. ``text`` is what a generation had
    generated before.
    """

    def __init__(
        self, message: str, *, code: int = 2, log: Sequence[str] = (), text: str = ""
    ) -> None:
        super().__init__(message, code=code, log=log)
        self.text = text


# Errors of chats and samplers.


class ChatTemplateError(UsageError):
    """A chat template cannot be rendered: it is invalid, raises, or exceeds a limit.

    ``line`` is the line of the template, 0 if unknown. Nothing was decoded.
    """

    def __init__(self, message: str, *, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class GrammarError(UsageError):
    """A grammar does not parse. ``line`` and ``column`` start at 1, and are 0 if unknown."""

    def __init__(self, message: str, *, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class SchemaError(UsageError):
    """A JSON schema is invalid or unsupported, or no document meets it.

    ``path`` is the JSON pointer of the part at fault: empty for the whole schema, and if unknown.
    ``pattern`` is the regular expression at fault, or empty.
    """

    def __init__(self, message: str, *, path: str = "", pattern: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.pattern = pattern


class NoTokenAllowed(KvError):
    """A grammar, schema, processor or bias excludes every token. The sampler is unchanged."""


class PartialRemovalRefused(KvError):
    """The memory cannot remove a part of a sequence. Nothing was changed."""


class SharedCells(KvError):
    """Positions cannot change: ``sequences`` (ids) share their cells. Nothing was changed."""

    def __init__(self, message: str, sequences: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.sequences = tuple(sequences)


class StateError(NativeError):
    """A sequence state cannot be saved or restored.

    Nothing was changed if ``saved`` is empty. Else it has the sequences that could not be put back,
    which are empty now: their bytes for `Sequence.restore`, by id.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        log: Sequence[str] = (),
        saved: Mapping[int, bytes] | None = None,
    ) -> None:
        super().__init__(message, code=code, log=log)
        self.saved = dict(saved or {})


class StateForeign(StateError):
    """A saved sequence is of another model, cache or adapters, or its model is unverified.

    ``differences`` has the names of the properties that differ or are unknown.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


# Errors of the cache managers.


class KVCacheFull(NoKVSlot):
    """A cache manager has no free cells for a request.

    ``cells`` is the size of the cache, ``used`` the number of used cells, ``largest_hole`` the
    longest run of free cells (None if unknown), and ``wanted`` the number of requested cells.
    ``defragged``: a defragmentation was tried.
    """

    def __init__(
        self,
        message: str,
        *,
        cells: int,
        used: int,
        largest_hole: int | None,
        wanted: int,
        defragged: bool = False,
        cause: str = "full",
        stats: Any = None,
    ) -> None:
        super().__init__(message, cause=cause, n_tokens=wanted, stats=stats)
        self.cells = cells
        self.used = used
        self.largest_hole = largest_hole
        self.wanted = wanted
        self.defragged = defragged


class NoSlotAvailable(KvError):
    """All slots are in use. Release one, or create the cache with more slots."""

    def __init__(self, message: str, *, slots: int = 0) -> None:
        super().__init__(message)
        self.slots = slots


class ReprocessNeeded(KvError):
    """The memory could not keep ``tokens``, which must be decoded again."""

    def __init__(self, message: str, tokens: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tokens = tuple(tokens)


class PromptTooLong(UsageError):
    """A sequence would have more tokens than its cache, or an input more than a micro-batch.

    ``needed`` and ``available`` are numbers of tokens. Nothing was decoded.
    """

    def __init__(self, message: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class BudgetTooSmall(UsageError):
    """A budget is smaller than a single entry: ``needed`` and ``budget`` are bytes."""

    def __init__(self, message: str, *, needed: int = 0, budget: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget


class PagingError(KvError):
    """A branch could not be paged out or in. The cache is unchanged."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class PrefixStoreError(KvError):
    """Base class of errors of prefix stores. Nothing was changed; ``path`` is the one at fault."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class PrefixStoreBusy(PrefixStoreError):
    """Another process or cache writes to the store."""


class PrefixStoreForeign(PrefixStoreError):
    """A store belongs to another model, build, shape or format, or is something else.

    ``differences`` has the names of the properties that differ.
    """

    def __init__(
        self, message: str, path: Path | None = None, differences: Sequence[str] = ()
    ) -> None:
        super().__init__(message, path)
        self.differences = tuple(differences)


class PrefixStoreDamaged(PrefixStoreError):
    """A file of a store is missing, truncated or changed."""

    exit_code = 1


class PrefixStoreFull(PrefixStoreError):
    """The disk has no room for a page. Complete pages stay in the store."""


# Errors of scenarios, scripts and traces.


class HarnessError(KvError):
    """An internal error of the verification, not of the tested build."""

    exit_code = 128


class Untestable(KvError):
    """A release, patch or scenario cannot be verified here.

    ``failure`` is "crash" if the process ended before any result.
    """

    exit_code = 125

    def __init__(self, message: str, *, failure: str = "") -> None:
        super().__init__(message)
        self.failure = failure


class ScriptError(KvError):
    """Report a decode script that cannot be read or run, with its line."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class TraceMismatch(ScriptError):
    """A trace belongs to another model or format version."""

    def __init__(self, message: str, line: int = 0, *, expected: str = "", found: str = "") -> None:
        super().__init__(message, line)
        self.expected = expected
        self.found = found


class ScenarioFailed(KvError):
    """Report a claim that a run did not meet: class of failure, what was expected and seen."""

    exit_code = 1

    def __init__(self, message: str, *, failure: str = "claim", evidence: Any = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.evidence = evidence
