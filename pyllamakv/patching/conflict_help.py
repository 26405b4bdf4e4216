"""Explain how to resolve the conflict of a rebase, file by file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.errors import RebaseConflict
from pyllamakv.patching import hunks, patch_export, rename_detection, trees, worktree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllamakv.patching.rebase_session import Session
    from pyllamakv.source.store import Store

_ADVICE = {
    "content": "resolve the marked places",
    "gone": "{onto} has no such file; carry its change over{where}, then delete it",
    "kept": "the patch deletes it, {onto} changed it; delete it, or `git add` it to keep it",
    "both": "both sides add it; resolve the marked places",
}


def conflict_error(
    store: Store, session: Session, why: str, marked: Sequence[str] | None = None
) -> RebaseConflict:
    """Create the error with directory, files and the action for each.

    ``marked`` are the files that still have conflict markers, if known; the others are resolved.
    """
    folder = session.folder(store)
    clashes = worktree.unmerged_files(folder) if folder.is_dir() else ()
    rows = {
        clash.path: _ADVICE[clash.kind].format(
            onto=session.onto, where=_where(store, session, clash)
        )
        for clash in clashes
        if marked is None or clash.path in marked or clash.kind != "content"
    }
    rows |= {path: _ADVICE["content"] for path in marked or () if path not in rows}
    id_ = session.id
    lines = [
        f"{why}; in {folder}",
        *(f"  {path}: {advice}" for path, advice in rows.items()),
        f"Then `pyllamakv patch rebase --continue {id_}`; --skip leaves it out, --abort ends it.",
    ]
    return RebaseConflict("\n".join(lines), folder, tuple(rows))


def _where(store: Store, session: Session, clash: worktree.UnmergedFile) -> str:
    """Name the file that most of the vanished file's code went to."""
    if clash.kind != "gone":
        return ""
    patch = hunks.parse(patch_export.format_patch(store, session.picked_commit), session.id)
    old = [line for hunk in patch.file(clash.path).hunks for line in hunk.old]
    tree = trees.StoreTree(store, store.tree_of(session.parent))
    found = rename_detection.find(tree, clash.path, old)
    return f" to {found[0].path}" if found else " to where its code went"
