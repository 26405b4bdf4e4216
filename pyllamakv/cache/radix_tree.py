"""A radix tree of token runs: the longest known prefix of a prompt, and the node to evict first.

Prior art: the radix cache of SGLang (Zheng et al., 2023) has one node per run, splits it where
prompts diverge, counts the users of a node, and evicts leaves from a heap that is built for each
eviction. Ollama's trie for MLX merges a node with its only child, and keeps snapshots that a user
named. vLLM's automatic prefix caching has no tree: blocks of 16 tokens are found by a hash of all
tokens before, in a list in order of use. Here,

- a run is a byte string with four bytes per token, so that two runs are compared at once, and a
  prefix may end at any token: llama.cpp has no blocks;
- a node has either a sequence of the context (its ``entry``), or the content of one that was paged
  out (its ``page``), or both: llama.cpp addresses sequences and not blocks, so that the sequence at
  a leaf contains every node above;
- nodes that keep either are in a heap for as long as they do; a node is placed again when it is
  used, and its former place is skipped later. An eviction takes O(log n), and O(log n) for each
  node before it that may not be evicted now.

Prompts with different salts share no node: the children of the root are found by salt and first
token, all others by their first token. SGLang (``extra_key``) and vLLM (``cache_salt``) separate
prompts in the same way, by a part of the key or of the first block's hash.

The tree is independent of contexts and files: the owner of a node sets entry, page and leases. A
node is *held* while an entry or a lease is at it or below it; the tokens of its run are then in the
cache. A page contains the run of a node that is not held, and may contain the runs of several.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from pyllamakv.cache.eviction_policy import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Bytes per token.
TOKEN_BYTES = 4

#: The salt of prompts without one. Others are digests of equal length: see `interface.salt_digest`.
NO_SALT = b""


def tokens_to_key(tokens: Iterable[int]) -> bytes:
    """Return tokens as the bytes that a tree compares."""
    return array("i", tokens).tobytes()


def key_to_tokens(key: bytes) -> list[int]:
    """Return the tokens of a key."""
    return array("i", key).tolist()


def common(a: bytes, b: bytes, at: int = 0) -> int:
    """Return how many tokens ``a`` has in common with ``b`` from byte ``at`` on."""
    low, high = 0, min(len(a), len(b) - at) // TOKEN_BYTES
    if high > 0 and b.startswith(a[: high * TOKEN_BYTES], at):
        return high
    # Bisect: each comparison of halves is a comparison of bytes.
    while low < high - 1:
        middle = (low + high) // 2
        if (
            a[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == b[at + low * TOKEN_BYTES : at + middle * TOKEN_BYTES]
        ):
            low = middle
        else:
            high = middle
    return low


class Node:
    """One run: the tokens ``start`` to ``end`` of every sequence that contains it."""

    __slots__ = (
        "children",
        "end",
        "entry",
        "frequent",
        "last_used",
        "leases",
        "page",
        "parent",
        "parked",
        "pins",
        "place",
        "priority",
        "ref_count",
        "run",
        "salt",
        "start",
    )

    def __init__(self, parent: Node | None, start: int, run: bytes, salt: bytes) -> None:
        self.parent = parent
        self.start = start
        self.run = run
        #: The salt of all prompts with this node.
        self.salt = salt
        self.end = start + len(run) // TOKEN_BYTES
        self.children: dict[bytes, Node] = {}
        self.entry: Any = None
        self.page: Any = None
        self.leases: list[Any] = []
        self.pins: set[str] = set()
        #: Number of parked leases that end here.
        self.parked = 0
        #: Number of entries and leases at this node and below.
        self.ref_count = 0
        #: Time of the last use, by the tree's clock.
        self.last_used = 0
        #: The highest time of the last use of the branches that were merged into this one.
        self.priority = 0
        #: Whether several prompts used these tokens: see `AdaptiveReplacement`.
        self.frequent = False
        #: The place in the tree's order of eviction; None: nothing is kept here.
        self.place: Place | None = None

    def __len__(self) -> int:
        return self.end - self.start

    def __bool__(self) -> bool:
        return True

    @property
    def bare(self) -> bool:
        """Return whether nothing is kept at this very node."""
        return not (self.protected or self.leases) and self.entry is None

    @property
    def protected(self) -> bool:
        """Return whether this may be paged out, but not dropped."""
        return bool(self.pins) or self.parked > 0

    def park(self) -> None:
        """Count a parked lease."""
        self.parked += 1

    def unpark(self) -> None:
        """Count a parked lease less, if its content was not lost."""
        self.parked = max(0, self.parked - 1)

    def unprotect(self) -> None:
        """Forget pins and parked leases, because the content is lost."""
        self.pins.clear()
        self.parked = 0

    @property
    def edge(self) -> bytes:
        """Return what the parent finds this node by: its first token, at the root with the salt."""
        first = self.run[:TOKEN_BYTES]
        return first if self.start else self.salt + first

    @property
    def linked(self) -> bool:
        """Return whether this is a node below another one still."""
        return self.parent is not None and self.parent.children.get(self.edge) is self

    @property
    def path(self) -> list[Node]:
        """Return the nodes from below the root down to this one."""
        found, node = [], self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def key(self) -> bytes:
        """Return all tokens from the root to the end of this node."""
        return b"".join(node.run for node in self.path)

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Return the order of eviction: the lowest priority, then the deepest, the longest."""
        return self.priority, self.last_used, -self.end, -len(self)

    @property
    def branch(self) -> list[int]:
        """Return the place among all nodes, in the order of `walk`."""
        found, node = [], self
        while node.parent is not None:
            found.append(-list(node.parent.children.values()).index(node))
            node = node.parent
        return found[::-1]

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def __repr__(self) -> str:
        return (
            f"<Node {self.start}..{self.end}, {len(self.children)} children, held {self.ref_count}>"
        )


#: The rank of a node, a number that no other place has, and the node.
Place = tuple[tuple[int, int, int, int], int, Node]

#: Number of places in the heap beyond which former ones are removed, if they are the most.
_FEW_PLACES = 64


class RadixTree:
    """The root; ``tokens`` counts those of all runs, ``held_tokens`` those of nodes in use.

    A page may have the runs of several nodes, and needs those of the nodes above. ``policy``
    chooses the nodes for eviction (None: the least recently used node goes first).
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy or EvictionPolicy()
        self.root = Node(None, 0, b"", NO_SALT)
        self.clock = 0
        self.nodes = 0
        self.tokens = 0
        self.held_tokens = 0
        #: Tokens of the nodes that are frequent.
        self.frequent_tokens = 0
        #: The nodes with an entry, in the order in which they got one.
        self.entries: dict[Node, None] = {}
        #: Heaps of places, of recent and of frequent nodes; those that are not `Node.place` are
        #: former ones.
        self._places: tuple[list[Place], list[Place]] = ([], [])
        self._placed = 0
        self._numbers = count()

    def match(self, key: bytes, salt: bytes) -> tuple[Node, int]:
        """Return the deepest node that a key goes into, and how many of its tokens are known."""
        node, at, size = self.root, 0, len(key)
        while at < size:
            first = key[at : at + TOKEN_BYTES]
            child = node.children.get(first if at else salt + first)
            if child is None:
                break
            run = child.run
            if not key.startswith(run, at):
                return child, at // TOKEN_BYTES + common(run, key, at)
            node, at = child, at + len(run)
        return node, at // TOKEN_BYTES

    def insert(self, key: bytes, salt: bytes) -> Node:
        """Return the node at the end of a key, creating it if necessary."""
        node, length = self.match(key, salt)
        if length < node.end:
            node = self.split(node, length)
        end = len(key) // TOKEN_BYTES
        known = self.policy.recall(key, salt, length, self.tokens) if length < end else end
        for stop, frequent in ((known, known > length), (end, False)):
            if node.end < stop:
                run = key[node.end * TOKEN_BYTES : stop * TOKEN_BYTES]
                child = Node(node, node.end, run, salt)
                node.children[child.edge] = child
                self.nodes += 1
                self.tokens += len(child)
                self._rank(child, again=frequent)
                node = child
        return node

    def split(self, node: Node, at: int) -> Node:
        """Divide a node at a position inside of it; return the new upper one.

        The lower node keeps entry, page and leases. Both nodes use a partial page.
        """
        parent, cut = node.parent, (at - node.start) * TOKEN_BYTES
        if parent is None or not node.start < at < node.end:
            msg = f"expected a position inside {node}, not {at}"
            raise ValueError(msg)
        upper = Node(parent, node.start, node.run[:cut], node.salt)
        upper.last_used, upper.ref_count = node.last_used, node.ref_count
        upper.frequent, upper.priority = node.frequent, node.priority
        parent.children[upper.edge] = upper
        node.parent, node.start, node.run = upper, at, node.run[cut:]
        upper.children[node.edge] = node
        self.nodes += 1
        self._place(node)
        self._share_page(node, upper)
        return upper

    def _share_page(self, node: Node, upper: Node) -> None:
        """Let the upper part of a divided node use the page, which has its run too."""
        if node.page is not None:
            self.set_page(upper, node.page)

    def merge(self, node: Node) -> bool:
        """Merge a node with its only child if neither needs the boundary.

        The result is as valuable as the upper one, which is in at least as many prompts.
        """
        parent = node.parent
        if parent is None or len(node.children) != 1 or not node.bare or not node.linked:
            return False
        (child,) = node.children.values()
        if not self._is_joint(node, child):
            return False
        if node.page is not None:
            node.page.drop_ref()
            node.page = None
            self._place(node)
        # Tokens of different lists are merged only if they leave the tree together.
        self.frequent_tokens += len(node) * (child.frequent - node.frequent)
        child.run = node.run + child.run
        child.priority = max(node.priority, child.priority)
        child.start, child.parent = node.start, parent
        parent.children[child.edge] = child
        self.nodes -= 1
        self._place(child)
        return True

    def _is_joint(self, node: Node, child: Node) -> bool:
        """Return whether nothing differs between a node that keeps nothing, and its only child."""
        if node.page is not None and node.page is not child.page:
            return False
        return node.frequent == child.frequent

    def prune(self, node: Node) -> None:
        """Remove a node that keeps nothing and has no children, and what that leaves useless.

        The policy remembers its tokens, because they left the cache.
        """
        while not node.children and node.bare and node.page is None and node.linked:
            parent = node.parent
            assert parent is not None
            if self.policy.adaptive:
                self.policy.remember(
                    node.key, node.salt, node.start, self.tokens, frequent=node.frequent
                )
            del parent.children[node.edge]
            self.nodes -= 1
            self.tokens -= len(node)
            self.frequent_tokens -= len(node) * node.frequent
            node = parent
        self.merge(node)

    def attach(self, node: Node, entry: Any) -> None:
        """Set the entry of a node."""
        node.entry = entry
        self.entries[node] = None
        self._place(node)
        self.add_ref(node)

    def detach(self, node: Node) -> Any:
        """Remove the entry of a node and return it."""
        entry, node.entry = node.entry, None
        del self.entries[node]
        self._place(node)
        self.drop_ref(node)
        return entry

    def lease(self, node: Node, lease: Any) -> None:
        """Add a lease to a node."""
        node.leases.append(lease)
        self.add_ref(node)

    def unlease(self, node: Node, lease: Any) -> None:
        """Detach a lease from a node."""
        node.leases.remove(lease)
        self.drop_ref(node)

    def add_ref(self, node: Node) -> None:
        """Count an entry or a lease at a node."""
        for each in node.path:
            each.ref_count += 1
            if each.ref_count == 1:
                self.held_tokens += len(each)

    def drop_ref(self, node: Node) -> None:
        """Count an entry or a lease less."""
        for each in node.path:
            each.ref_count -= 1
            if each.ref_count == 0:
                self.held_tokens -= len(each)

    def set_page(self, node: Node, page: Any) -> Any:
        """Set the page of a node (None: none); return the one that no node uses any longer."""
        old, node.page = node.page, page
        self._place(node)
        if page is not None:
            page.add_ref()
        if old is None:
            return None
        return None if old.drop_ref() else old

    def touch(self, node: Node, *, again: bool = False) -> None:
        """Record that the tokens up to the end of a node were used; ``again``: by a new prompt."""
        self.clock += 1
        for each in node.path:
            self._rank(each, again=again)

    def _rank(self, node: Node, *, again: bool) -> None:
        node.last_used = node.priority = self.clock
        if again and self.policy.adaptive and not node.frequent and node.parent is not None:
            node.frequent = True
            self.frequent_tokens += len(node)
            # The former place is in the other heap.
            self._placed -= node.place is not None
            node.place = None
        self._place(node)

    # Eviction...

    def _place(self, node: Node) -> None:
        """Place a node in the order of eviction, or remove it if it keeps nothing."""
        if node.entry is None and node.page is None:
            self._placed -= node.place is not None
            node.place = None
            return
        if node.place is not None and node.place[0] == node.rank:
            return
        self._placed += node.place is None
        node.place = (node.rank, next(self._numbers), node)
        heappush(self._places[node.frequent], node.place)
        if sum(map(len, self._places)) > 2 * self._placed + _FEW_PLACES:
            # Each former place was added once: its removal costs no more than that, on average.
            for places in self._places:
                places[:] = [each for each in places if each[2].place is each]
                heapify(places)

    def evict_first(self, wanted: Callable[[Node], bool], *, entries: bool = False) -> Node | None:
        """Return the node to evict first: the lowest priority, then the deepest, then the largest.

        It is in the list that the policy names, unless the other one alone has a wanted node. It
        keeps an entry or a page; with ``entries``, an entry.
        """
        first = self.policy.frequent_first(self.tokens, self.frequent_tokens)
        some = self._first_entries if entries else self._first_places
        best = some(wanted, first) or some(wanted, not first)
        # Equal nodes were created or used together, such as the branches of a batch.
        return min(best, key=lambda node: node.branch) if len(best) > 1 else next(iter(best), None)

    def _first_entries(self, wanted: Callable[[Node], bool], frequent: bool) -> list[Node]:
        """Return the equal first nodes among those with an entry: a context has few sequences."""
        found = [node for node in self.entries if node.frequent == frequent and wanted(node)]
        first = min((node.rank for node in found), default=None)
        return [node for node in found if node.rank == first]

    def _first_places(self, wanted: Callable[[Node], bool], frequent: bool) -> list[Node]:
        """Return the equal first nodes in a heap."""
        seen: list[Place] = []
        found: list[Node] = []
        places = self._places[frequent]
        while places:
            place = places[0]
            node = place[2]
            if found and place[0] != found[0].rank:
                break
            heappop(places)
            if node.place is place:
                seen.append(place)
                if wanted(node):
                    found.append(node)
        for place in seen:
            heappush(places, place)
        return found

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root."""
        nodes = self.root.walk()
        next(nodes)
        return nodes

    def check(self) -> None:
        """Raise AssertionError with the broken invariant."""
        nodes = tokens = held_tokens = frequent_tokens = 0
        pages: dict[int, tuple[Any, int]] = {}
        for node in self.walk():
            parent = node.parent
            assert parent is not None, f"{node} has no parent"
            assert parent.children.get(node.edge) is node, f"{node} is not under its token"
            assert parent is self.root or node.salt == parent.salt, f"{node} has another salt"
            assert node.start == parent.end, f"{node} does not begin where {parent} ends"
            assert node.end - node.start == len(node.run) // TOKEN_BYTES > 0, (
                f"{node} has another length"
            )
            own = (node.entry is not None) + len(node.leases)
            below = sum(child.ref_count for child in node.children.values())
            assert node.ref_count == own + below, f"{node} is held by {own + below}"
            kept = not node.bare or node.page is not None
            assert kept or node.children, f"{node} keeps nothing"
            if node.page is not None:
                page, count = pages.get(id(node.page), (node.page, 0))
                pages[id(page)] = (page, count + 1)
            if node.bare and len(node.children) == 1:
                (child,) = node.children.values()
                assert not self._is_joint(node, child), f"{node} should be one with its only child"
            nodes, tokens = nodes + 1, tokens + len(node)
            held_tokens += len(node) if node.ref_count else 0
            frequent_tokens += len(node) if node.frequent else 0
        for page, count in pages.values():
            assert page.refs == count, f"{page} is at {count} nodes and counts {page.refs}"
        counted = (self.nodes, self.tokens, self.held_tokens, self.frequent_tokens)
        found = (nodes, tokens, held_tokens, frequent_tokens)
        assert counted == found, f"counted {counted}, not {found}"
        self._check_places()

    def _check_places(self) -> None:
        nodes = list(self.walk())
        entries = {node for node in nodes if node.entry is not None}
        assert entries == set(self.entries), f"{len(self.entries)} of {len(entries)} entries known"
        kept = {node for node in nodes if node.entry is not None or node.page is not None}
        placed = {
            place[2]
            for frequent, places in enumerate(self._places)
            for place in places
            if place[2].place is place and place[2].frequent == frequent
        }
        assert kept == placed, f"{len(placed)} of {len(kept)} nodes have a place"
        assert self._placed == len(kept), f"{self._placed} nodes counted, not {len(kept)}"
        for node in kept:
            assert node.place is not None, f"{node} has no place"
            assert node.place[0] == node.rank, f"{node} has another place"


class WholePageTree(RadixTree):
    """A tree whose pages have all tokens of a branch, so that each is of use for its node alone."""

    def _share_page(self, node: Node, upper: Node) -> None:
        """Do nothing: the page is of use for the lower part alone."""

    def _is_joint(self, node: Node, child: Node) -> bool:
        """Return whether nothing is at a node, whose tokens leave the tree with its only child."""
        return node.page is None

    def touch(self, node: Node, *, again: bool = False) -> None:
        """Record that a node was used, without the nodes above it; ``again``: by a new prompt."""
        self.clock += 1
        self._rank(node, again=again)
