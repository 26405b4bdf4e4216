"""Read traces, and record scripts: a head, a row per operation, an end (docs/traces.md).

A trace without its last rows, for example after a crash, is a shorter trace. Any other damage is
refused with the line number.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.building import manifest as manifests
from pyllamakv.content_digest import is_digest
from pyllamakv.errors import DiskFull, ManifestError, ScriptError, TraceMismatch, UsageError
from pyllamakv.home import variant_roots
from pyllamakv.traces import model_digest, script
from pyllamakv.traces.script import Line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyllamakv.scenarios.cell_samples import CellSample
    from pyllamakv.traces.script_session import ScriptSession


#: errno values of a full disk, an exceeded quota, and the size limit of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check(path: Path) -> None:
    """Raise UsageError if no trace can be written: before a long search, not after it."""
    new = not path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise _refused(path, error) from error
    if new:
        path.unlink(missing_ok=True)


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror}; choose a writable directory")


def _opened(path: Path) -> int:
    """Open an empty file for one writer. Raises BlockingIOError if another process writes it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


class TraceFile:
    """Write lines to a new file at ``path``, replacing an existing one."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises UsageError if it cannot be written or is in use, or DiskFull."""
        self.path = path
        self._size = 0
        try:
            self._handle = _opened(path)
        except BlockingIOError as error:
            msg = (
                f"{path} is being written by another recording; wait for it, or choose another file"
            )
            raise UsageError(msg) from error
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(error) from error
            raise _refused(path, error) from error

    @property
    def closed(self) -> bool:
        """Return whether nothing more is written."""
        return self._handle < 0

    def write(self, lines: Sequence[str]) -> None:
        """Append lines, all or none of them. Raises DiskFull, or ScriptError for other faults."""
        if not lines:
            return
        data = memoryview(("\n".join(lines) + "\n").encode())
        left = data
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
                os.lseek(self._handle, self._size, os.SEEK_SET)
            if error.errno in _FULL:
                raise self._full(error) from error
            msg = (
                f"{self.path} cannot be written: {error.strerror}; it has the rows before this one"
            )
            raise ScriptError(msg) from error
        self._size += len(data)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _full(self, error: OSError) -> DiskFull:
        return DiskFull(
            f"the disk is full for the trace {self.path}: {error.strerror}; it ends with the last "
            "complete rows, and the run continues without a recording; make room and record again"
        )


BACKING = "LLAMA_KV_BACKING"

#: Variables that the patches read, and those of llama.cpp that affect results.
KNOWN = (
    "LLAMA_ATTN_ROT_DISABLE",
    "LLAMA_GRAPH_REUSE_DISABLE",
    BACKING,
    "LLAMA_KV_BACKING_HUGE",
    "LLAMA_KV_CACHE_DEBUG",
    "LLAMA_KV_DEFRAG_MIN_CELLS",
    "LLAMA_KV_DEFRAG_MOVER",
    "LLAMA_KV_DEFRAG_PLAN",
    "LLAMA_KV_DEFRAG_THOLD",
    "LLAMA_KV_DEFRAG_THREADS",
    "LLAMA_SERVER_PARK_MIB",
    "LLAMA_SET_ROWS",
)

#: mmap-kv takes any other value for the path of a file, which it would create and truncate.
BACKINGS = ("heap", "mmap")

_WORD = re.compile(r"[A-Za-z0-9_.-]{0,16}", re.ASCII)


def recorded(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that a trace contains, of this process and ``more``.

    A path in `BACKING` is omitted, so that a replay writes no file.
    """
    found = {**os.environ, **(more or {})}
    return {name: found[name] for name in KNOWN if name in found and _fits(name, found[name])}


def wrong(environment: Mapping[str, str]) -> str:
    """Return the error in a trace's environment variables, or an empty text."""
    for name, value in environment.items():
        if name not in KNOWN:
            return f"may set {', '.join(KNOWN)}, not {name[:80]!r}"
        if not _fits(name, value):
            words = " or ".join(BACKINGS) if name == BACKING else "a word of at most 16 letters"
            return f"may set {name} to {words}, not to {value[:80]!r}"
    return ""


def _fits(name: str, value: str) -> bool:
    return value in BACKINGS if name == BACKING else _WORD.fullmatch(value) is not None


#: Version of the file format.
SCHEMA = 2

#: What a claim may require of decodes: success if enough cells are free, or the recorded result.
EXPECTS = ("ok", "recorded")

#: Operations that move cells; others change their content.
_MOVING = (*script.DECODES, "defrag", "restore", "update")

#: Start of a head that cannot be read completely.
_BEGINS = re.compile(rb'\s*\{\s*"trace"\s*:')

_TEXTS = ("variant", "spec", "model", "identity", "start", "expect", "kind", "claim", "issue")


@dataclass(frozen=True)
class Head:
    """The first line of a trace: its origin, and its claim as a scenario.

    ``spec`` names the variant if its id is not built. ``identity`` is the model's digest. ``start``
    is "rebuilt" if the context had tokens at the start of the recording: they are decoded again,
    and may be in other cells. ``complete``: the trace has its end.
    """

    variant: str = ""
    model: str = "tiny"
    spec: str = ""
    identity: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    start: str = "empty"
    expect: str = "ok"
    kind: str = "fix"
    claim: str = ""
    issue: str = ""
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the line for a file, without default values."""
        usual = vars(Head())
        words = {name: value for name, value in vars(self).items() if value != usual[name]}
        words.pop("complete", None)
        return {"trace": SCHEMA, "variant": self.variant, "model": self.model, **words}


def current_head(variant: str, model: Path, more: Mapping[str, str] | None = None) -> Head:
    """Return the head of a trace of this variant and this model file.

    ``more`` are the variables that a worker has in addition to those of this process.
    """
    name, digest = model_digest.name(model), model_digest.identity(model)
    return Head(variant, name, spec_of(variant), digest, recorded(more))


def spec_of(variant: str) -> str:
    """Return release and patches of a built variant, or "" if it is not built."""
    for root in variant_roots():
        try:
            made = manifests.load(root / variant)
        except ManifestError:
            continue
        return f"{made.release}+{'stock' if made.stock else ','.join(made.patches)}"
    return ""


def is_trace(path: Path) -> bool:
    """Return whether the first line of a file is the head of a trace of any version.

    An input that can be read only once, such as a pipe, is treated as a script.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            first = file.readline(1 << 16)
    except (OSError, ValueError):
        return False
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        return _BEGINS.match(first) is not None  # damaged, and to be refused as a trace
    return isinstance(head, dict) and "trace" in head and "op" not in head


def read(path: Path) -> tuple[Head, list[Line]]:
    """Return head and rows of a trace.

    Raises ScriptError if the file is no trace or damaged, TraceMismatch for another version.
    """
    try:
        data = script.contents(path)
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise ScriptError(msg) from error
    whole, _, torn = data.rpartition(b"\n")
    if not whole and torn:
        whole, torn = torn, b""
    try:
        text = whole.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        msg = f"{path} is not a trace: line {line} is not text"
        raise ScriptError(msg, line) from error
    first, *rest = text.split("\n")
    head = _head(path, first)
    rows = list(script.parse(["", *rest]))
    ended = _end(rest[-1]) if rest and not torn else None
    if ended is not None and ended != len(rows):
        msg = f"{path} is damaged: its end states {ended} rows, and it has {len(rows)}"
        raise ScriptError(msg, len(rest) + 1)
    if not rows:
        msg = f"{path} was cut short: it has no rows"
        raise ScriptError(msg, 1)
    return Head(**{**vars(head), "complete": ended is not None}), rows


def model_file(head: Head, given: str = "") -> Path:
    """Return the file of a trace's model, or the given one.

    Raises TraceMismatch for a different model, UsageError if there is none.
    """
    path = model_digest.find(given or head.model, head.identity)
    # Traces of earlier versions have no digest of the whole file.
    if not is_digest(head.identity):
        return path
    found = model_digest.identity(path)
    if found != head.identity:
        msg = (
            f"this trace was recorded on another model ({head.model}, digest {head.identity}) than "
            f"{path} (digest {found}); pass the right one with --model"
        )
        raise TraceMismatch(msg, 1, expected=head.identity, found=found)
    return path


class Recorder:
    """Write a trace while a script is played; `observe` is the callback of the player."""

    def __init__(self, path: Path, head: Head, session: ScriptSession) -> None:
        self._file = TraceFile(path)
        self._session = session
        self._before: CellSample | None = None
        self._rows = 0
        self._start = self._last = time.perf_counter_ns()
        self._file.write([json.dumps(head.to_json())])

    def observe(self, line: Line, result: dict[str, Any]) -> None:
        """Write one line with its result, and the cells if they changed."""
        now, sample = time.perf_counter_ns(), self._session.last_sample
        written = dict(result)
        if sample is not None:
            before, self._before = self._before, sample
            label = str(line.arguments.get("label", line.op))
            written |= seen(line.op, before, sample, label=label)
        written |= {"at": (self._last - self._start) // 1000, "us": (now - self._last) // 1000}
        row = Line(line.number, line.op, line.arguments, written)
        self._file.write([json.dumps(row.to_json())])
        self._rows += 1
        self._last = time.perf_counter_ns()

    def close(self) -> None:
        """Write the end, and close the file."""
        try:
            if not self._file.closed:
                self._file.write([end(self._rows)])
        finally:
            self._file.close()


def seen(op: str, before: CellSample | None, sample: CellSample, *, label: str) -> dict[str, Any]:
    """Return the cells of a row: before, after, moves, and a picture."""
    words: dict[str, Any] = dict(sample.counts)
    if before is not None and before.counts != sample.counts:
        words["before"] = before.counts
    changed = before is None or (before.owner != sample.owner).any()
    if changed or op == "snapshot":
        words["picture"] = {"label": label, "runs": sample.runs()}
    moved = sample.moved(before) if before is not None and op in _MOVING else []
    if moved:
        words["moved"] = moved
    return words


def end(rows: int) -> str:
    """Return the last line of a trace."""
    return json.dumps({"end": rows})


def _end(text: str) -> int | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    ended = found.get("end") if isinstance(found, dict) else None
    return ended if type(ended) is int else None


def _head(path: Path, text: str) -> Head:
    try:
        raw = json.loads(text)
        schema = raw["trace"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        msg = f'{path} is not a trace: its first line must be like {{"trace": {SCHEMA}, …}}'
        raise ScriptError(msg, 1) from error
    if schema != SCHEMA:
        msg = (
            f"{path} is a trace of schema {schema}, this package reads {SCHEMA}: record it again, "
            "or use the package that recorded it"
        )
        raise TraceMismatch(msg, 1, expected=str(SCHEMA), found=str(schema))
    words = {name: raw[name] for name in _TEXTS if name in raw}
    environment = raw.get("environment", {})
    texts = isinstance(environment, dict) and all(
        isinstance(each, str) for each in (*words.values(), *environment.values())
    )
    variant, spec = (words.get("variant", ""), words.get("spec", "")) if texts else ("", "")
    if os.sep in variant or (os.sep in spec and not spec.startswith(("git:", "path:"))):
        msg = f"{path}: the head's variant and spec must name a build, not a path"
        raise ScriptError(msg, 1)
    strange = wrong(environment) if texts else ""
    if strange:
        msg = f"{path}: the head's environment {strange}"
        raise ScriptError(msg, 1)
    if not texts:
        msg = f"{path}: the head's {', '.join(_TEXTS)} and environment must be texts"
        raise ScriptError(msg, 1)
    if words.get("kind") == "cure":
        words["kind"] = "fix"  # the name of this kind in traces of version 0.1 and earlier
    for name, known in (("expect", EXPECTS), ("kind", ("fix", "guard", "feature"))):
        if words.get(name, known[0]) not in known:
            msg = f"{path}: {name} must be one of {', '.join(known)}, found {words[name]!r}"
            raise ScriptError(msg, 1)
    return Head(**words, environment=environment)
