"""Compare the cache managers with those of an earlier commit, operation by operation.

Both run over the present runtime and library, in two contexts of one model, and get equal random
operations. After each operation, its result, the type of a refusal, the tokens of all sequences,
the statistics, the drawing of the tree or slots, and `check()` must be equal, and so must logits,
bit by bit if the tokens are in the same cells (see `Row`). After a restart, each manager opens the
store that the other one wrote. In half of the cases without a store, all prompts of the present
manager have one salt, which must change nothing.

The earlier managers are the package ``pyllamakv/cache`` of `COMMIT`, read from git. `CHANGED` lists
what was changed in them on purpose since then.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

import numpy as np

import pyllamakv
from pyllamakv.binding.protocol import Capability
from pyllamakv.building import variant
from pyllamakv.cache.slot_choice import Policy
from pyllamakv.errors import (
    GitError,
    KvError,
    ModelError,
    NotBuilt,
    Unsupported,
    UsageError,
)
from pyllamakv.home import checkout
from pyllamakv.source import git_command, lockfile
from pyllamakv.source.releases import TEST_RELEASE
from qa.entry import Entry, StressOptions, Tick, skipped_entry, strip_directories
from qa.random_operations.combination import MODELS, Combination, normalize

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context

SECTION = "differential"

#: The commit before the managers were divided by kind of memory.
COMMIT: Final = "e39fa10b"
#: The name of its package. Frames of ``pyllamakv`` belong to the operation that called them.
PACKAGE: Final = "pyllamakv.earlier_cache"


class Change(NamedTuple):
    """A deliberate change since `COMMIT`, made in the earlier managers too."""

    module: str
    was: str
    now: str
    why: str


_SAVES_PORTABLE: Final = "a state for this process is saved without the digest of its model"
CHANGED: Final = (
    *(
        Change(module, ".save()", ".save(portable=False)", _SAVES_PORTABLE)
        for module in ("branches", "eviction", "slot_cache")
    ),
    *(
        Change("prefix_cache", was, was.replace("budget", "budget_bytes", 1), "the name has a unit")
        for was in ("    budget: int | None\n    hits", "        budget=cache.budget,\n")
    ),
    *(
        Change(module, was, now, "the call is a method of the sequence")
        for module, was, now in (
            ("prefix_cache", "context.prefill(sequence, ", "sequence.prefill("),
            ("batcher", "context.step(one.sequence, ", "one.sequence.step("),
            ("batcher", "context.step(self._sequences[0], ", "self._sequences[0].step("),
        )
    ),
    Change(
        "stored_branches",
        "def identity(context: Context) -> dict[str, str]:",
        "from pyllamakv.cache.directory_tier import identity\n\n"
        "def _identity(context: Context) -> dict[str, str]:",
        "a store is of one model, which the digest of its files identifies",
    ),
    Change(
        "stored_branches",
        "state.SavedSequence(state.compatibility(self.context), numbers, positions, raw)",
        "state.SavedSequence(numbers, positions, raw)",
        "the shape of a state is checked where it is restored",
    ),
    Change(
        "stored_branches",
        "from pyllamakv.runtime import backing, state, state_slices",
        "from pyllamakv.runtime import state, state_slices",
        "the identity of a model is the digest of its files",
    ),
    Change(
        "checkpoints",
        "def leaves_states(sequence: Sequence) -> bool:",
        "from pyllamakv.cache.checkpoints import leaves_states\n\n"
        "def _leaves_states(sequence: Sequence) -> bool:",
        "restarts are tried out while another sequence has a state",
    ),
    Change(
        "checkpoints",
        "    with context.sequence() as sequence:\n        return leaves_states(sequence)",
        "    with context.sequence() as sequence:\n"
        "        if not context.vacant:\n"
        "            return leaves_states(sequence)\n"
        "        with context.sequence() as other:\n"
        "            return leaves_states(sequence, other)",
        "restarts are tried out while another sequence has a state",
    ),
    Change(
        "eviction",
        "    ends = [node for node in found if",
        "    found = [node for node in found if not node.pins] or found\n"
        "    ends = [node for node in found if",
        "a pinned branch is paged out last",
    ),
    *(
        Change("branches", was, now, "tokens that a memory refuses to remove are not counted")
        for was, now in (
            (
                "        heir, kept = self.heir(node), None\n",
                "        heir, kept, count = self.heir(node), None, 0\n",
            ),
            (
                "            self.evicted_tokens += node.end - min(max(keep, first), node.end)\n",
                "            count = node.end - min(max(keep, first), node.end)\n",
            ),
            (
                "                self.close(sequence)\n        self.forget_page(node)\n",
                "                self.close(sequence)\n        self.evicted_tokens += count\n"
                "        self.forget_page(node)\n",
            ),
        )
    ),
    Change(
        "branches",
        "        node.unpark()\n"
        "        if self.pager is None and not (self.sharing or node.protected):\n"
        "            self.forget_page(node)\n"
        "        while self.pager is None and not node.children and node.bare and node.linked:\n",
        "        node.unpark()\n        self.drop_unneeded_pages(node)\n\n"
        "    def drop_unneeded_pages(self, node: Node) -> None:\n"
        "        for each in [] if self.pager or self.sharing else list(node.walk()):\n"
        "            if each.page and not each.protected and not self.only_page(each):\n"
        "                self.forget_page(each)\n"
        "                self.tidy(each)\n"
        "        while (\n"
        "            self.pager is None and not node.children and node.bare\n"
        "            and node.linked and not self.only_page(node)\n"
        "        ):\n",
        "a page that a pin needs is kept when a parked lease ends",
    ),
    *(
        Change("eviction", was, now, "nothing is evicted if too few sequences would be free")
        for was, now in (
            (
                "def free_sequences(",
                "def _may_go(branches, node, kept):\n"
                "    protected = node.protected and branches.storage(node) is None\n"
                "    if node.entry is None or node in kept or protected:\n"
                "        return False\n"
                "    if node.children:\n"
                "        return True\n"
                "    heir = branches.heir(node)\n"
                "    return branches.removable(node, frees_id=True) and heir not in kept\n\n\n"
                "def free_sequences(",
            ),
            (
                "node.entry is not None and node not in kept for node",
                "_may_go(cache.branches, node, kept) for node",
            ),
        )
    ),
    Change(
        "prefix_cache",
        "    bytes_by_tier: dict[str, int]\n",
        "    bytes_by_tier: dict[str, int]\n    digest_bytes: int = 0\n",
        "the bytes of digests of evicted blocks are counted",
    ),
    Change(
        "prefix_cache",
        "    def pin(self, name: str, tokens: Iterable[int]) -> None:\n",
        "    def pin(self, name: str, tokens: Iterable[int]) -> None:\n"
        "        from pyllamakv.errors import Unsupported\n\n"
        "        try:\n"
        "            self._pin(name, tokens)\n"
        "        except Unsupported:\n"
        "            with self.acquire(tokens) as lease:\n"
        "                lease.prefill(logits=False)\n"
        "            self._pin(name, tokens)\n\n"
        "    def _pin(self, name: str, tokens: Iterable[int]) -> None:\n",
        "tokens without a state are evaluated again to be pinned",
    ),
    Change(
        "prefix_cache",
        "self.limit_batch(prompt - here)",
        "self.limit_batch(min(context.info.n_ubatch, prompt - here))",
        "a prompt is decoded in micro-batches, so that complete ones remain after a cancel",
    ),
    *(
        Change("prefix_cache", was, now, "the limits of pages hold after every operation")
        for was, now in (
            (
                "            node.pins.discard(name)\n            self.branches.tidy(node)\n",
                "            node.pins.discard(name)\n"
                "            self.branches.drop_unneeded_pages(node)\n"
                "        self.enforce(0)\n",
            ),
            (
                "        self.unpin(name, missing_ok=True)\n",
                "        old = self._pins.pop(name, None)\n"
                "        if old is not None:\n"
                "            old.pins.discard(name)\n"
                "            branches.drop_unneeded_pages(old)\n",
            ),
            (
                "        self._pins[name] = node\n",
                "        self._pins[name] = node\n        self.enforce(0)\n",
            ),
            (
                '            self.counts.add("paged_in")\n',
                '            self.counts.add("paged_in")\n            self.drop_surplus()\n',
            ),
            (
                '            LOG.warning("%s", error)\n            return False\n'
                "        return True\n",
                '            LOG.warning("%s", error)\n            return False\n'
                "        self.enforce(0)\n        return True\n",
            ),
            (
                "        while (node := self.branches.surplus()) is not None:\n",
                "        self.drop_surplus()\n\n"
                "    def drop_surplus(self) -> None:\n"
                "        while (node := self.branches.surplus()) is not None:\n",
            ),
            (
                "        self.cache.branches.unpark(node)\n",
                "        self.cache.branches.unpark(node)\n        self.cache.enforce(0)\n",
            ),
        )
    ),
    *(
        Change("slot_cache", was, now, "a prompt is decoded in micro-batches")
        for was, now in (
            (
                "start + len(given), context.info.n_batch",
                "start + len(given), context.info.n_ubatch",
            ),
            (
                "again[have : have + context.info.n_batch]",
                "again[have : have + context.info.n_ubatch]",
            ),
            (
                "            self._room(upto - at)\n",
                "            if upto <= at:\n"
                "                upto = grouping.ceil(together, at + 1)\n"
                "            self._room(upto - at)\n",
            ),
        )
    ),
    Change(
        "prefix_cache",
        "        cancels = context.cancels\n        while (here",
        "        cancels = context.cancels\n"
        "        if not len(self.ledger) and context.info.can_remove_partly is False:\n"
        "            from pyllamakv.errors import StateError\n\n"
        "            self.cache.sync()\n"
        "            node, known = self.cache.branches.tree.match(self.key[:-TOKEN_BYTES])\n"
        "            for each in reversed(node.path):\n"
        "                whole = grouping.floor(self._groups, each.end) == each.end\n"
        "                if each.page is not None and each.end <= known and whole:\n"
        "                    with suppress(StateError):\n"
        "                        self.sequence.restore(each.page.read())\n"
        "                    break\n"
        "        while (here",
        "the state of a prompt is looked for again when its evaluation begins",
    ),
    Change(
        "slot_cache",
        "            given = self.prompt[len(self.sequence) :]\n",
        "            info = self._cache.context.info\n"
        "            if not len(self.sequence) and info.can_remove_partly is False:\n"
        "                self._cache._restore_state(\n"
        "                    self._slot, self.prompt[:-1], 0, self._slot.groups\n"
        "                )\n"
        "            given = self.prompt[len(self.sequence) :]\n",
        "the state of a prompt is looked for again when its evaluation begins",
    ),
    Change(
        "batcher",
        "def batches(context: Context, portions: list[Portion]) -> list[list[Portion]]:",
        "from pyllamakv.cache.batcher import batches\n\n"
        "def _batches(context: Context, portions: list[Portion]) -> list[list[Portion]]:",
        "a step is decoded in micro-batches, so that complete ones remain after a cancel",
    ),
)
#: A change of speed, which is not made in the earlier managers of benchmarks.
FASTER: Final = Change(
    "prefix_cache",
    "            wanted = max(n, wanted - max(0, eviction.shortage(cache, wanted, self)))\n",
    "            spare = max(0, -eviction.shortage(cache, n, self))\n"
    "            wanted = min(wanted, n + spare // len(cache.leases))\n",
    "leases do not take reserved cells from each other",
)
#: Not compared: `Batcher.submit` raises PromptTooLong since `COMMIT`, where the manager refused the
#: prompt later, and a cancelled generation has an error. Both sides have the policy "lru": the
#: earlier managers have no "adaptive", and the present ones none of the others.

#: All operations, with their weights.
WEIGHTS: Final = {
    "start": 16, "go_on": 8, "end": 8, "cancel": 2, "park": 5, "resume": 6, "give_up": 1,
    "batch": 2, "pin": 3, "unpin": 1, "page_out": 2, "page_in": 2, "evict": 2, "relieve": 1,
    "flush": 2, "restart": 1, "clear": 1,
}  # fmt: skip
KINDS: Final = ("prefix cache", "paged prefix cache", "prefix store", "slot cache")
MEMORIES: Final = (*MODELS, "separate streams")
#: Operations of a case.
LENGTH: Final = 60
#: Maximum difference of logits, which are up to 10, between other orders of the same sums.
ROUNDING: Final = 1e-4
#: The longest prompt with its text, in the contexts of `Combination`.
LONGEST: Final = 90
#: The result of an operation that raised an exception of Python.
_UNTYPED: Final = "untyped exception"
#: The salt of a branch in a drawing, which `COMMIT` has not.
_SALT: Final = re.compile(r" salt [0-9a-f]{8}\b")
#: Texts that later prompts begin with.
PAST: Final = 12


# The earlier managers...


class _Sources(MetaPathFinder, InspectLoader):
    """Import modules from their source texts."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module that has a text."""
        if name not in self.sources:
            return None
        return ModuleSpec(name, self, is_package=name == PACKAGE)

    def get_source(self, fullname: str) -> str:
        """Return the text of a module."""
        return self.sources[fullname]


def load_earlier(changed: Sequence[Change] = (*CHANGED, FASTER)) -> None:
    """Make the package of the earlier managers importable. Raises GitError without the commit."""
    if PACKAGE in sys.modules:
        return
    root = checkout()
    if root is None:
        raise UsageError("the earlier managers are read from git: run this in a checkout")
    names = git_command.git(root, "ls-tree", "--name-only", f"{COMMIT}:pyllamakv/cache")
    sources = {}
    for name in names.split():
        stem = name.removesuffix(".py")
        text = git_command.git(root, "show", f"{COMMIT}:pyllamakv/cache/{name}")
        text = text.replace("pyllamakv.cache", PACKAGE)
        text = text.replace("pyllamakv.runtime.interrupts", "pyllamakv.binding.interrupts")
        for change in changed:
            if change.module == stem:
                if change.was not in text:
                    msg = f"{COMMIT} has no text {change.was!r} in {name}: correct CHANGED"
                    raise UsageError(msg)
                text = text.replace(change.was, change.now)
        sources[PACKAGE if stem == "__init__" else f"{PACKAGE}.{stem}"] = text
    sys.meta_path.insert(0, _Sources(sources))
    importlib.import_module(PACKAGE)


# The section...


def names() -> tuple[str, ...]:
    """Return the names of the entries: a release with a memory."""
    return tuple(f"{name} {memory}" for name in lockfile.known() for memory in MEMORIES)


def entries(effort: StressOptions, tick: Tick) -> list[Entry]:
    """Compare managers over each memory of the test release, and of the newest verified one."""
    wanted = effort.only
    if not wanted:
        releases = dict.fromkeys((TEST_RELEASE, _newest()))
        wanted = tuple(f"{name} {memory}" for name in releases for memory in MEMORIES)
    share = effort.shared(len(wanted))
    found = []
    for name in wanted:
        release, _, memory = name.partition(" ")
        built = variant.find(f"{release}+patched")
        if built is None:
            why = f"it is not built: pyllamakv build {release}"
            found.append(skipped_entry(SECTION, name, why))
        else:
            found.append(compare(name, built.folder, memory, share, tick))
    return found


def _newest() -> str:
    try:
        return variant.newest_verified().manifest.release
    except NotBuilt:
        return TEST_RELEASE


def compare(name: str, folder: Path, memory: str, effort: StressOptions, tick: Tick) -> Entry:
    """Compare managers over one memory of a variant until the time ends, or one differs."""
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    reused = logits = cases = 0
    defects: list[str] = []
    end = time.monotonic() + effort.seconds
    try:
        load_earlier()
        with contexts(folder, memory) as open_context:
            while (time.monotonic() < end or done.total() < effort.operations) and not defects:
                kind, seed = KINDS[cases % len(KINDS)], effort.seed * 100_000 + cases
                tick(f"{name}: {done.total()} operations")
                comparison = Comparison(open_context, kind, seed)
                comparison.run(LENGTH)
                comparison.close()
                done += comparison.done
                refused += comparison.refused
                reused, logits = reused + comparison.reused, logits + comparison.logits
                defects += [f"{kind}, seed {seed}: {comparison.defect}"] * bool(comparison.defect)
                cases += 1
    except (ModelError, Unsupported, GitError) as error:
        if not done:
            return skipped_entry(SECTION, name, str(error))
        raise
    row = {
        "operations": f"{done.total():,}",
        "cases": str(cases),
        "logits": f"{logits:,}",
        "reused tokens": f"{reused:,}",
        "refusals": str(refused.total()),
    }
    data = {"done": dict(done), "refused": dict(refused)}
    return Entry(SECTION, name, row, tuple(map(strip_directories, defects)), effort.seed, data)


@contextmanager
def contexts(folder: Path, memory: str) -> Iterator[Callable[[], Context]]:
    """Open a variant and a generated model of a memory; yield what creates its contexts."""
    streams = "separate" if memory == "separate streams" else "shared"
    memory = "attention" if memory == "separate streams" else memory
    chosen = Combination(memory=memory, streams=streams, manager=KINDS[0], cache="plain f16")
    with pyllamakv.open(folder) as library:
        if streams == "separate" and Capability.KV_UNIFIED not in library.about.capabilities:
            raise Unsupported("this release has no streams", "streams")
        windows = Capability.SWA_FULL in library.about.capabilities
        if "window" in memory and not windows:
            raise Unsupported("this release has no caches for windows", "windows")
        chosen = normalize(chosen, windows=windows)
        with library.load_model(chosen.model_file) as model:
            yield lambda: model.context(**chosen.options)


# One manager...


class Row:
    """Logits, and the cells of all tokens.

    Sums are rounded differently if tokens are in other cells; then logits may differ by `ROUNDING`.
    """

    def __init__(self, context: Context, logits: Any) -> None:
        self.logits = np.array(logits, np.float32)
        streams = context.kv.snapshot().streams
        self.cells = [(each.pos.tobytes(), each.used.tobytes()) for each in streams]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        if self.cells == other.cells:
            return self.logits.tobytes() == other.logits.tobytes()
        return bool(np.abs(self.logits - other.logits).max() <= ROUNDING)

    __hash__ = None  # type: ignore[assignment]


class Side:
    """One of the two managers, with its leases and parked leases in the order of their creation.

    ``package`` has the modules of the manager. Every operation returns what must be equal. All
    prompts of the present manager have the ``salt``.
    """

    def __init__(
        self, package: str, context: Context, kind: str, folder: Path, salt: str | None = None
    ) -> None:
        self.context, self.kind, self.folder = context, kind, folder
        self._package = package
        self._salted = {"salt": salt} if salt is not None and package != PACKAGE else {}
        self.manager: Any = None
        self.leases: list[Any] = []
        self.parked: list[tuple[Any, list[int]]] = []

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self._package}.{name}")

    def restart(self, folder: str, choice: dict[str, Any]) -> str:
        """Create the manager, with the store in a directory of this name."""
        choice = dict(choice)
        cells, schedule = choice.pop("cells"), choice.pop("schedule")
        choice["checkpoints"] = self._module("checkpoints").CheckpointSchedule(**schedule)
        if self.kind == "slot cache":
            self.manager = self._module("slot_cache").SlotCache(self.context, **choice)
            self._save_no_backups()
            return repr(self.manager)
        if self.kind == "paged prefix cache":
            choice["paging"] = self.folder / "pages"
        elif self.kind == "prefix store":
            choice["store"] = self.folder.parent / folder
        elif self._package != PACKAGE:
            choice["paging"] = 0  # as `COMMIT` without it
        self.manager = self._module("prefix_cache").PrefixCache(self.context, **choice)
        self._save_no_backups()
        if cells is not None:
            stats = self.context.kv.snapshot().streams
            size = sum(each.info.bytes_k + each.info.bytes_v for each in stats if each.info)
            self.manager.budget = size * cells // 64
        return repr(self.manager)

    def _save_no_backups(self) -> None:
        """Save no states for a cancel: the times depend on the clock, and `COMMIT` saves none."""
        if self._package != PACKAGE:
            self.manager.backups.new = lambda *_: None

    # Leases...

    def start(
        self, prompt: list[int], groups: list[tuple[int, int]], named: list[int], polls: int
    ) -> object:
        """Acquire a prompt and evaluate it, until a cancel after a number of polls."""
        lease = self.manager.acquire(prompt, groups=groups, checkpoints=named, **self._salted)
        self.leases.append(lease)
        self.context.native.cancel_after(self.context.handle, polls)
        try:
            return lease.cached, list(lease.rest), self._evaluate(lease)
        except KvError:
            self.leases.remove(lease)
            lease.release()
            raise
        finally:
            self.context.native.cancel_after(self.context.handle, -1)

    #: A start with few polls is cancelled.
    cancel = start

    def _evaluate(self, lease: Any) -> Row:
        if self.kind == "slot cache":
            lease.decode()
        else:
            lease.prefill()
        return self._logits(lease)

    def _logits(self, lease: Any) -> Row:
        return Row(self.context, lease.sequence.logits())

    def go_on(self, number: int, tokens: list[int]) -> object:
        """Decode more tokens of a lease."""
        lease = self.leases[number]
        if self.kind == "slot cache":
            lease.decode(tokens)
        else:
            lease.make_room(len(tokens))
            feed = lease.sequence.feed(tokens)
            self._module("defrag_retry").decode_feed(self.context, feed, self.manager.relieve)
        lease.checkpoint()
        return self._logits(lease)

    def end(self, number: int) -> object:
        """Release a lease."""
        return self.leases.pop(number).release()

    def park(self, number: int) -> object:
        """Park a lease."""
        lease = self.leases[number]
        tokens = list(lease.sequence.tokens)
        self.parked.append((lease.park(), tokens))
        self.leases.remove(lease)
        return tokens

    def resume(self, number: int, tokens: list[int]) -> object:
        """Resume a parked lease with more tokens."""
        parked, had = self.parked[number]
        lease = parked.resume([*had, *tokens])
        del self.parked[number]
        self.leases.append(lease)
        return lease.cached, self._evaluate(lease)

    def give_up(self, number: int) -> object:
        """Close a parked lease."""
        return self.parked.pop(number)[0].close()

    def batch(self, prompts: list[list[int]], text: int, max_wait: int, steps: int) -> object:
        """Generate for several prompts, one of which is cancelled after some steps.

        Without deferral and priorities, which `COMMIT` has not, generations are admitted as there.
        """
        options = {} if self._package == PACKAGE else {"max_defer": 0}
        if self.kind != "slot cache":
            for each in prompts:
                # The present `submit` refuses these; in `COMMIT`, their generations failed.
                self.manager.check_budget(len(each))
        with self._module("batcher").Batcher(self.manager, max_wait=max_wait, **options) as batcher:
            going = [
                batcher.submit(each, text, stop_at_end=False, **self._salted) for each in prompts
            ]
            for _ in range(steps):
                batcher.step()
            going[0].cancel()
            batcher.run()
            ends = [
                (one.tokens, one.finish_reason, type(one.error) if one is not going[0] else None)
                for one in going
            ]
            stats = batcher.stats()
            return ends, (stats.decodes, stats.decoded_tokens, stats.parks, stats.resumes)

    # What stays...

    def pin(self, name: str, tokens: list[int]) -> object:
        """Pin a prefix."""
        return self.manager.pin(name, tokens, **self._salted)

    def unpin(self, name: str) -> object:
        """Unpin a prefix."""
        return self.manager.unpin(name)

    def page_out(self, tokens: list[int]) -> object:
        """Page a branch out."""
        return self.manager.page_out(tokens, **self._salted)

    def page_in(self, tokens: list[int]) -> object:
        """Page a branch in."""
        return self.manager.page_in(tokens, **self._salted)

    def evict(self) -> object:
        """Drop a branch."""
        return self.manager.evict()

    def relieve(self) -> object:
        """Free cells as after a failed decode."""
        return self.manager.relieve()

    def clear(self) -> object:
        """Drop all branches."""
        return self.manager.clear()

    def flush(self) -> object:
        """Write the store."""
        return self.manager.flush()

    def stop(self) -> object:
        """Close the manager."""
        self.leases.clear()
        self.parked.clear()
        self.manager.close()
        self.context.clear()
        return None

    def picture(self) -> dict[str, object]:
        """Return all that must be equal after an operation. Raises AssertionError of `check`."""
        self.manager.check()
        stats = self.manager.stats().to_json()
        return {
            "tokens": [(each.tokens.copy(), each.positions) for each in self.context.ledgers],
            "statistics": stats,
            "drawing": [_SALT.sub("", line) for line in self.manager.dump().splitlines()],
            "leases": [(lease.cached, lease.evaluated) for lease in self.leases],
        }


# Both...


class Comparison:
    """Run equal random operations on both managers, and compare them after each.

    ``open_context`` returns a new context of a model. ``seed`` selects the options of the managers,
    and the arguments of the operations, which depend on the tokens that the present manager has.
    """

    def __init__(self, open_context: Callable[[], Context], kind: str, seed: int) -> None:
        load_earlier()
        self.random = Random(seed)
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        #: Tokens that prompts reused, and rows of logits that were compared after prompts.
        self.reused = self.logits = 0
        #: What differs, with the operation; empty: nothing.
        self.defect = ""
        self._past: list[list[int]] = [[3, 4, 5]]
        self._swapped = False
        self._opened = ExitStack()
        try:
            root = Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
            # A store of one side, with the digests of salts, is opened by the other one.
            salt = "a tenant" if seed % 2 and kind != "prefix store" else None
            self.sides = [
                Side(
                    package,
                    self._opened.enter_context(open_context()),
                    kind,
                    root / str(number),
                    salt,
                )
                for number, package in enumerate(("pyllamakv.cache", PACKAGE))
            ]
            info = self.sides[0].context.info
            self._most = min(LONGEST, info.n_ctx // self.sides[0].context.partitions - 8)
            choice = self._options()
            self._both("restart", [["0", choice], ["1", choice]])
        except BaseException:
            self._opened.close()
            raise

    @property
    def kind(self) -> str:
        """Return the kind of the managers."""
        return self.sides[0].kind

    def _options(self) -> dict[str, Any]:
        """Draw the options of the managers."""
        draw = self.random
        info = self.sides[0].context.info
        schedule = {"size": draw.choice((4, 16, 64)), "interval": draw.choice((8, 24)), "first": 4}
        few = draw.choice((None, None, 1, 3))
        choice: dict[str, Any] = {"schedule": schedule, "cells": None}
        if self.kind == "slot cache":
            size = info.n_ctx // self.sides[0].context.partitions
            policy = draw.choice(get_args(Policy))
            size = draw.choice((size, size // 2))
            choice |= {"n_slots": few, "policy": policy, "size": size}
        else:
            choice |= {"entries": few, "policy": "lru"}
            choice["cells"] = draw.choice((None, None, 24))
        return choice

    def close(self) -> None:
        """Close the managers and their contexts; an error is added to the defect."""
        closes = [side.manager.close for side in self.sides if side.manager is not None]
        for close in (*closes, self._opened.close):
            try:
                close()
            except Exception as error:
                self._fail(f"close: {_described(error)}")

    def run(self, operations: int) -> None:
        """Run operations until one differs, or an exception is not one of `pyllamakv.errors`."""
        names = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=operations)
        for name in names:
            try:
                drawn = getattr(self, f"_{name}")() if not self.defect else None
            except Exception as error:
                # Arguments are drawn from the leases of the present manager.
                self._fail(f"{name}: its arguments: {_described(error)}")
                drawn = None
            if self.defect:
                return
            if drawn is not None:
                self._both(name, drawn if isinstance(drawn, list) else [drawn, drawn])

    def _fail(self, defect: str) -> None:
        self.defect = f"{self.defect}; {defect}" if self.defect else defect

    def _both(self, name: str, arguments: Sequence[Any], *, look: bool = True) -> None:
        """Run an operation on both sides, and compare."""
        pairs = zip(self.sides, arguments, strict=True)
        results = [_result(side, name, given) for side, given in pairs]
        differing = _difference(*results)
        if results[0][0] == "returned":
            self.done[name] += 1
        else:
            self.refused[results[0][0]] += 1
            if name in ("stop", "restart") and not differing:
                differing = f"both raise {results[0][0]}, and have no manager to compare"
        if name == "start" and not differing and results[0][0] == "returned":
            self.reused += results[0][1][0]
            self.logits += 1
        if look and not differing:
            pictures = [_result(side, "picture", ()) for side in self.sides]
            differing = _difference(*pictures)
        if differing:
            self._fail(f"{name}: {differing}")

    # The arguments of operations; None: it is not possible now...

    def _start(self, polls: int = -1) -> tuple[Any, ...]:
        prompt = self._prompt(self._most)
        self._past = [*self._past, prompt][-PAST:]
        named = [self.random.randrange(len(prompt))] if self.random.random() < 0.3 else []
        return prompt, self._groups(len(prompt)), named, polls

    def _cancel(self) -> tuple[Any, ...]:
        return self._start(self.random.randint(0, 12))

    def _go_on(self) -> tuple[Any, ...] | None:
        number = self._number(self.sides[0].leases)
        if number is None:
            return None
        have = len(self.sides[0].leases[number].sequence)
        if have >= self._most:
            return None
        return number, self._tokens(self.random.randint(1, min(16, self._most - have)))

    def _end(self) -> tuple[Any, ...] | None:
        number = self._number(self.sides[0].leases)
        if number is None:
            return None
        tokens = self.sides[0].leases[number].sequence.tokens
        self._past = [*self._past, list(tokens) or [3]][-PAST:]
        return (number,)

    def _park(self) -> tuple[Any, ...] | None:
        number = self._number(self.sides[0].leases)
        return None if number is None else (number,)

    def _resume(self) -> tuple[Any, ...] | None:
        number = self._number(self.sides[0].parked)
        return None if number is None else (number, self._tokens(self.random.randint(1, 4)))

    def _give_up(self) -> tuple[Any, ...] | None:
        number = self._number(self.sides[0].parked)
        return None if number is None else (number,)

    def _batch(self) -> tuple[Any, ...]:
        while self.sides[0].leases and not self.defect:
            self._both("end", [(0,), (0,)])
        text = self.random.randint(1, 16)
        count = self.random.randint(2, 2 * self.sides[0].context.info.n_seq_max)
        prompts = [self._prompt(self._most - text) for _ in range(count)]
        return prompts, text, self.random.choice((2, 8, 1000)), self.random.randint(0, 12)

    def _pin(self) -> tuple[Any, ...] | None:
        tokens = self.random.choice(self._past)
        if self.kind == "slot cache":
            return None
        kept = tokens[: self.random.choice((len(tokens), self.random.randint(1, len(tokens))))]
        return self.random.choice("ab"), kept

    def _unpin(self) -> tuple[Any, ...] | None:
        return None if self.kind == "slot cache" else (self.random.choice("ab"),)

    def _page_out(self) -> tuple[Any, ...] | None:
        paged = self.kind == "paged prefix cache"
        return (self.random.choice(self._past),) if paged else None

    _page_in = _page_out

    def _evict(self) -> tuple[Any, ...] | None:
        return None if self.kind == "slot cache" else ()

    def _relieve(self) -> tuple[Any, ...]:
        return ()

    def _clear(self) -> tuple[Any, ...] | None:
        return None if self.kind == "slot cache" or self.random.random() < 0.7 else ()

    def _flush(self) -> tuple[Any, ...] | None:
        return () if self.kind == "prefix store" else None

    def _restart(self) -> list[Any]:
        """Give each side the store of the other one."""
        self._both("stop", [(), ()], look=False)
        self._swapped = not self._swapped
        names = ["1", "0"] if self._swapped else ["0", "1"]
        choice = self._options()
        return [[name, choice] for name in names]

    def _prompt(self, most: int) -> list[int]:
        draw = self.random
        base = draw.choice(self._past)
        kept = base[: draw.randint(0, len(base))] if draw.random() < 0.6 else base
        kept = kept[: most - 1]
        return [*kept, *self._tokens(draw.randint(1, min(48, most - len(kept))))]

    def _groups(self, n: int) -> list[tuple[int, int]]:
        if n < 4 or self.random.random() < 0.8:
            return []
        ends = sorted(self.random.sample(range(n + 1), 4))
        return [(ends[0], ends[1]), (ends[2], ends[3])]

    def _tokens(self, n: int) -> list[int]:
        return [self.random.randrange(3, 60) for _ in range(n)]

    def _number(self, things: Sequence[object]) -> int | None:
        return self.random.randrange(len(things)) if things else None


def _result(side: Side, name: str, arguments: Sequence[Any]) -> tuple[str, Any]:
    try:
        return "returned", getattr(side, name)(*arguments)
    except (KvError, AssertionError) as error:
        # The message of a failed check is part of the defect.
        return type(error).__name__, str(error) if isinstance(error, AssertionError) else None
    except Exception as error:
        return _UNTYPED, _described(error)


def _described(error: Exception) -> str:
    """Return an exception with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno} ({place.name})"
    return f"{type(error).__name__} in {where}: {error}"


def _difference(present: tuple[str, Any], earlier: tuple[str, Any]) -> str:
    """Return what differs between the results of both; "" if nothing does."""
    if present[0] == "AssertionError":
        return f"check() failed: {present[1]}"
    if present[0] == _UNTYPED:
        return f"{present[1]}"
    if earlier[0] == _UNTYPED:
        return f"{present[0]}, and earlier {earlier[1]}"
    if present[0] != earlier[0]:
        return f"{present[0]}, and earlier {earlier[0]}"
    if present[1] == earlier[1]:
        return ""
    if isinstance(present[1], dict) and isinstance(earlier[1], dict):
        for name, value in earlier[1].items():
            if present[1][name] != value:
                return f"other {name}: {present[1][name]}, and earlier {value}"
    return "other values or logits"
