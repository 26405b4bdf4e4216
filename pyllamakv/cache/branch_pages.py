"""Page branches of a prefix tree out of the cache and in again.

Where cells are shared a page has what nothing else holds: the runs of the nodes from which on a
sequence was alone. It comes back into a sequence of its own, which then shares what is above.
Pages may overlap, and a page serves every node whose run it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.cache.prefix_tree import pack
from pyllamakv.errors import (
    NativeError,
    PagingError,
    PartialRemovalRefused,
    Unsupported,
    UsageError,
    WorkerDied,
)

if TYPE_CHECKING:
    from pyllamakv.cache.branches import Branches
    from pyllamakv.cache.paging import Page
    from pyllamakv.cache.prefix_tree import Node
    from pyllamakv.runtime.sequence import Sequence


class DamagedPage(PagingError):
    """Report a page that can never be read back; ``page`` is the one."""

    def __init__(self, error: PagingError, page: Page) -> None:
        super().__init__(str(error), error.path)
        self.page = page


def discard(branches: Branches, page: Page) -> None:
    """Part with all that cannot be had without a page; nothing of it is held."""
    top = next(node for node in branches.tree.walk() if node.page is page)
    above = top.parent
    for each in list(top.walk())[::-1] if branches.sharing else [top]:
        each.pins.clear()
        branches.forget_page(each)
        branches.tree.prune(each)
    if above is not None:
        branches.tidy(above)


def page_out(branches: Branches, node: Node, keep: int = 0) -> Sequence | None:
    """Save what only this node's sequence holds, then close it, or cut it to ``keep`` tokens.

    Raises PagingError with nothing changed.
    """
    assert branches.pager is not None
    sequence: Sequence = node.entry
    chain = [node]
    while branches.sharing and (above := chain[-1].parent) is not None and above.held == 1:
        if above.parent is None:
            break
        chain.append(above)
    start = chain[-1].start if branches.sharing else 0
    page = branches.pager.write(_save(branches, sequence, chain[-1], start), start, node.end)
    try:
        if keep:
            sequence.trim(keep)
    except PartialRemovalRefused:
        page.drop()
        raise
    branches.detach(node)
    for each in chain:
        branches.tree.set_page(each, page)
    branches.tidy(node)
    if keep:
        return sequence
    branches.close(sequence)
    return None


def _save(branches: Branches, sequence: Sequence, top: Node, start: int) -> bytes:
    assert top.parent is not None
    beside = branches.provider(top.parent, top) if start else None
    try:
        if beside is None:
            return sequence.save()
        sequence.remove(0, start)
        try:
            return sequence.save()
        finally:
            sequence.share(beside, 0, start)
    except WorkerDied:
        raise
    except (NativeError, Unsupported) as error:
        msg = f"a branch of {top.end} tokens could not be saved: {error}"
        raise PagingError(msg) from error


def missing(branches: Branches, node: Node) -> list[Page]:
    """Return the pages that a node needs, from the root down, to be in the cache."""
    if not branches.sharing:
        return [node.page]
    path = [each for each in node.path if not each.held]
    pages: list[Page] = []
    low = node.end
    # Pages may overlap: from the end up, only what the ones below leave out.
    while low > path[0].start:
        at = next(each for each in path if each.start < low <= each.end)
        pages.insert(0, at.page)
        low = at.page.start
    return pages


def page_in(branches: Branches, node: Node) -> None:
    """Bring a node and all above it into the cache; needs a vacant sequence, two for two pages.

    Raises PagingError with nothing changed, DamagedPage where it will never be possible.
    """
    pages = missing(branches, node)
    covered = 0
    if branches.sharing:
        first = next(each for each in node.path if not each.held)
        covered = first.start
    made: list[Sequence] = []
    try:
        sequence = _restore(branches, pages[-1], made)
        sequence.trim(node.end - pages[-1].start)
        low = max(covered, pages[-1].start)
        if low > pages[-1].start:
            sequence.remove(None, low)
        for page in reversed(pages[:-1]):
            other = _restore(branches, page, made)
            begin = max(covered, page.start)
            sequence.share(other, begin, low)
            low = begin
            branches.close(made.pop())
        if covered:
            sequence.share(branches.provider(first.parent or node), 0, covered)
        if pack(sequence.ledger.tokens) != node.key:
            msg = f"a page of {node.end} tokens holds others; decode them again"
            raise DamagedPage(PagingError(msg), pages[-1])
        made.clear()
    except WorkerDied:
        raise
    except (NativeError, UsageError) as error:
        msg = f"a branch of {node.end} tokens could not be paged in: {error}"
        raise PagingError(msg) from error
    finally:
        for each in made:
            branches.close(each)
    branches.attach(node, sequence)
    branches.tidy(node)


def _restore(branches: Branches, page: Page, made: list[Sequence]) -> Sequence:
    try:
        saved = page.read()
    except PagingError as error:
        raise DamagedPage(error, page) from error
    sequence = branches.new()
    made.append(sequence)
    sequence.restore(saved)
    if sequence.positions != list(range(page.start, page.end)):
        msg = f"a page of positions {page.start}..{page.end} holds others; decode them again"
        raise DamagedPage(PagingError(msg), page)
    return sequence
