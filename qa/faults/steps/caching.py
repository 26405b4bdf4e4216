"""Record a run, page branches out and in, and keep caches and prefixes in files."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
from pathlib import Path
from typing import Any, Final

import pyllamakv as kv
from pyllamakv.cache.prefix_store import PrefixStore, scan
from pyllamakv.errors import KvError, KVFileDirty, PagingError
from pyllamakv.traces import trace
from qa.faults.attempt import AttemptResult
from qa.faults.step import FaultTarget

# Imported once before the forks: attributes of the package are resolved on first use.
_open, _record, _prefix_cache = kv.open, kv.record, kv.PrefixCache
_batcher, _schedule = kv.Batcher, kv.CheckpointSchedule

_BEGINNING: Final = [1 + n % 20 for n in range(40)]
#: More than one page of a prefix store.
_LONG: Final = [1 + n % 20 for n in range(280)]


def _digest(logits: Any) -> str:
    return hashlib.sha256(logits.copy().tobytes()).hexdigest()[:16]


class NativeStep(FaultTarget):
    """Use a built variant and a model outside the directory.

    ``release`` is part of the name if it is not the test release.
    """

    def __init__(self, variant: Path, model: Path, release: str = "") -> None:
        self.variant, self.model = variant, model
        self.name = f"{self.name} {release}".strip()

    def open(self) -> Any:
        """Open the variant; in a worker if memory is limited, because llama.cpp aborts then."""
        short = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        return _open(self.variant, isolated=short)

    def context(self, library: Any, **options: Any) -> Any:
        """Return a small context with one thread: bit-identical results."""
        model = library.load_model(self.model)
        shape = {"n_ctx": 256, "n_batch": 64, "n_seq_max": 4, "n_threads": 1}
        return model.context(**{**shape, **options})

    def note(self, path: Path, count: int) -> None:
        """Write a file with one byte per flush that has returned; a fault leaves fewer bytes."""
        try:
            path.write_bytes(b"." * count)
        except OSError as error:
            raise KvError(f"the test cannot write {path}: {error}") from error


class RecordRun(NativeStep):
    """Record a run; an incomplete trace is read up to its last complete row."""

    name = "recording"
    allowed_errors = ("UsageError",)

    def run(self, folder: Path) -> Any:
        """Record with many flushes, and read the trace."""
        path = folder / "run.jsonl"
        with self.open() as library:
            ctx = self.context(library)
            with _record(ctx, path) as recording:
                a, b = ctx.sequence(), ctx.sequence()
                for token in range(12):
                    ctx.step_all([a, b], [token + 1, token + 2])
                    recording.flush()
                a.remove()
                ctx.kv.defrag()
                ctx.decode(b.feed([1, 2, 3]))
        return self._rows(path)

    def _rows(self, path: Path) -> list[str]:
        return [f"{line.op} {json.dumps(line.arguments)}" for line in trace.read(path)[1]]

    def check_interrupted(self, folder: Path, outcome: AttemptResult, expected: Any) -> list[str]:
        """Check that a trace has the first rows, each complete."""
        path = folder / "run.jsonl"
        lines = path.read_bytes().count(b"\n") if path.is_file() else 0
        if lines < 3:
            return []
        try:
            rows = self._rows(path)
        except KvError as error:
            return [f"the incomplete trace cannot be read: {error}"]
        right = rows == expected[: len(rows)]
        return [] if right else ["the incomplete trace differs from the recorded run"]


class Paging(NativeStep):
    """Page branches out to files and in again."""

    name = "paging"
    # After a crash this directory remains and may be deleted (docs/prefix-cache.md).
    allowed_leftovers = (r"home(/pages)?", r"home/pages/prefixes-\w+(/.*)?")

    def run(self, folder: Path) -> Any:
        """Fill a cache, page out, and continue every branch."""
        found: list[Any] = []
        with self.open() as library:
            ctx = self.context(library)
            with _prefix_cache(ctx, paging=folder / "home" / "pages") as cache:
                prompts = [_BEGINNING + [n] * 3 for n in (21, 22, 23)]
                for prompt in prompts:
                    with cache.acquire(prompt) as lease:
                        lease.prefill()
                for prompt in prompts:
                    self._page_out(cache, prompt)
                for prompt in prompts:
                    with cache.acquire([*prompt, 24]) as lease:
                        cached = lease.cached
                        lease.prefill()
                        found.append([cached, _digest(lease.sequence.logits())])
                cache.check()
                found.append(cache.stats().damaged)
        return found

    def _page_out(self, cache: Any, prompt: list[int]) -> None:
        try:
            cache.page_out(prompt)
        except PagingError:
            cache.check()
            with cache.acquire([*prompt, 25]) as lease:
                assert lease.cached == len(prompt), "a branch was lost with its page"
            raise

    def check_interrupted(self, folder: Path, outcome: AttemptResult, expected: Any) -> list[str]:
        """Check that only a killed process leaves page files."""
        left = list((folder / "home" / "pages").glob("*/*"))
        # No process reads the pages of another.
        shutil.rmtree(folder / "home", ignore_errors=True)
        ended = outcome.ending in ("killed", "hung")
        return [] if ended or not left else [f"page files remain: {left[0].name}"]


def _check_logits(lease: Any) -> None:
    """Check that the logits after a lease's prompt are those of a fresh decode.

    In a second context: some releases cannot begin a state beside others.
    """
    mine, tokens = lease.sequence.logits().copy(), lease.sequence.tokens
    with lease.cache.context.model.context(n_ctx=512, n_batch=64, n_threads=1) as other:
        other.sequence().prefill(tokens)
        far = float(abs(mine - other.logits().copy()).max())
    assert far < 0.02, f"logits after {lease.cached} cached tokens differ by {far}"


class KeepCheckpoints(NativeStep):
    """Keep the states of a recurrent memory in files, and continue after them.

    A state that is not kept, or that cannot be read, costs time: every prompt completes.
    """

    name = "checkpoints"
    optional = True
    allowed_leftovers = Paging.allowed_leftovers
    check_interrupted = Paging.check_interrupted

    def run(self, folder: Path) -> Any:
        """Branch off from one prompt, twice at each place; return the number of right logits."""
        schedule = _schedule(interval=16, first=4)
        prompts = [[*_BEGINNING[:at], 21 + n] for at in (37, 20) for n in range(2)]
        found = 0
        with self.open() as library:
            ctx = self.context(library, n_ctx=512)
            pages = folder / "home" / "pages"
            with _prefix_cache(ctx, entries=2, paging=pages, checkpoints=schedule) as cache:
                for prompt in (_BEGINNING, *prompts, *prompts):
                    with cache.acquire(prompt) as lease:
                        lease.prefill()
                        _check_logits(lease)
                    found += 1
                cache.check()
        return found


class ParkGenerations(NativeStep):
    """Generate more than fits at once: generations are parked in files and resumed."""

    name = "parking"
    allowed_leftovers = Paging.allowed_leftovers
    check_interrupted = Paging.check_interrupted

    def run(self, folder: Path) -> Any:
        """Run eight requests of 80 tokens in 256 cells; return their tokens."""
        with self.open() as library:
            ctx = self.context(library)
            with (
                _prefix_cache(ctx, paging=folder / "home" / "pages") as cache,
                _batcher(cache, max_wait=8) as batcher,
            ):
                prompts = [_BEGINNING[:20] + [21 + n] * 30 for n in range(8)]
                going = [batcher.submit(each, 30, stop_at_end=False) for each in prompts]
                batcher.run()
                assert batcher.stats().parks, "nothing was parked"
                cache.check()
                for one in going:
                    one.result()
                return [one.tokens for one in going]


class StorePrefixes(NativeStep):
    """Flush prefixes to a store in several steps, and reuse them in an earlier or later run.

    The file ``flushed`` has one byte per prompt whose flush has returned. The store ``guard`` is
    open during the whole run: a second run would change what the first one reopens.
    """

    name = "prefix store"
    allowed_errors = ("PrefixStoreBusy",)
    #: The second prompt replaces the last page of the first one, the third one branches off.
    prompts: tuple[list[int], ...] = (
        _LONG, [*_LONG, *[21] * 20], [*_LONG[:270], 22], [23] * 30
    )  # fmt: skip

    def run(self, folder: Path) -> Any:
        """Flush every prompt, reuse all of them, and remove half of the pages."""
        guard = PrefixStore(folder / "guard", {"model": "none"})
        try:
            return self._use(folder)
        finally:
            guard.close()

    def _use(self, folder: Path) -> list[Any]:
        done = folder / "flushed"
        flushed = done.stat().st_size if done.exists() else 0
        with self.open() as library, self.context(library, n_ctx=2048, n_seq_max=8) as ctx:
            with self._cache(ctx, folder) as cache:
                for number, prompt in enumerate(self.prompts):
                    cached = self._serve(cache, prompt)
                    if number < flushed:
                        assert cached == len(prompt) - 1, "a flushed prompt was not reused"
                    cache.flush()
                    self.note(done, number + 1)
            ctx.clear()
            with self._cache(ctx, folder) as cache:
                found: list[Any] = [self._serve(cache, [*each, 24]) for each in self.prompts]
                found.append(cache.stats().damaged)
            # After the cache's last flush: an interrupted run may have written its pages before.
            size = scan(folder / "prefixes").size
            self.note(done, 0)
            ctx.clear()
            with self._cache(ctx, folder, budget=max(size // 2, 1)) as cache:
                found.append(cache.stats().stored_bytes <= size // 2)
        return found

    def _cache(self, ctx: Any, folder: Path, **options: Any) -> Any:
        return _prefix_cache(ctx, store=folder / "prefixes", **options)

    def _serve(self, cache: Any, prompt: list[int]) -> int:
        """Decode a prompt after its cached prefix; the logits must be those of a fresh decode."""
        with cache.acquire(prompt) as lease:
            lease.prefill()
            _check_logits(lease)
            cached: int = lease.cached
        return cached


class StoreStates(StorePrefixes):
    """Flush the states of a recurrent memory, which are stored as whole sequences."""

    name = "state store"
    optional = True
    prompts = (_BEGINNING, [*_BEGINNING, *[21] * 5], [*_BEGINNING[:30], *[23] * 3])


class Keeping(NativeStep):
    """Keep a cache in a file over several flushes, and resume from an earlier run."""

    name = "keeping"
    allowed_errors = ("KVFileBusy",)
    _MORE: Final = (5, 6, 7, 8)

    def run(self, folder: Path) -> Any:
        """Open the existing file, complete it, and return the next token's logits."""
        path, done = folder / "chat.kv", folder / "flushed"
        flushed = done.stat().st_size if done.exists() else 0
        with self.open() as library:
            try:
                ctx = self.context(library, kv_backing=path, kv_keep=True)
            except KVFileDirty:
                assert not flushed, "a flush was lost"
                ctx = self.context(library, kv_backing=path, kv_keep="fresh")
            chat = ctx.sequence(0)
            whole = [*_BEGINNING, *self._MORE]
            there = len(chat.tokens)
            assert chat.tokens == whole[:there], "a kept cache was resumed with other tokens"
            assert there in (0, len(_BEGINNING), len(whole)), (
                "a kept cache has contents that were never flushed"
            )
            assert there >= (0, len(_BEGINNING), len(whole))[flushed], "a flush was lost"
            if not there:
                chat.prefill(_BEGINNING)
                ctx.kv.flush()
                self.note(done, 1)
                there = len(_BEGINNING)
            if there < len(whole):
                for token in self._MORE:
                    chat.step(token)
                ctx.kv.flush()
                self.note(done, 2)
            kept = chat.tokens
            ctx.close()
            ctx = self.context(library, kv_backing=path, kv_keep=True)
            chat = ctx.sequence(0)
            chat.step(9)
            answer = _digest(ctx.logits())
            chat.trim(len(whole))
            ctx.close()
        return [kept, answer]
