"""Write a patched release as a plain series of mails, for people who build llama.cpp themselves.

`git am` takes the mails on upstream's own commit, and quilt the folder; neither needs this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.errors import UsageError
from pyllamakv.patching import patch_export
from pyllamakv.source import gitting
from pyllamakv.source.files import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.patching.apply import Patched
    from pyllamakv.source.store import Store

#: The list of the mails in their order, which quilt reads; its first line says that it is ours.
LIST = "series"
_OURS = "# llama.cpp"


@dataclass(frozen=True)
class Mail:
    """Hold one patch as a mail: the name of its file, and its bytes."""

    name: str
    data: bytes


def mails(store: Store, base: str, patched: Patched) -> tuple[Mail, ...]:
    """Return the mails that make a patched release of its base commit, the same bytes anywhere.

    Raises UsageError for a release that no patch is meant for.
    """
    if not patched.texts:
        reasons = "; ".join(f"{skip.id}: {skip.reason}" for skip in patched.skipped)
        raise UsageError(f"no patch changes {patched.release}: {reasons or 'none was named'}")
    listed = gitting.git(store.path, "rev-list", "--reverse", f"{base}..{patched.commit}")
    commits = listed.split()
    return tuple(
        Mail(
            f"{number:04d}-{text.id}.patch",
            patch_export.format_patch(store, commit, f"PATCH {number}/{len(commits)}"),
        )
        for number, (commit, text) in enumerate(zip(commits, patched.texts, strict=True), 1)
    )


def listing(found: tuple[Mail, ...], base: str, release: str) -> str:
    """Return the text of the file that lists the mails, and says what they are for."""
    head = f"{_OURS} {base} ({release}); there: git am *.patch"
    return "\n".join([head, *(mail.name for mail in found)]) + "\n"


def write(found: tuple[Mail, ...], folder: Path, *, base: str, release: str) -> tuple[Path, ...]:
    """Write the mails and their list into a folder, in the place of an earlier series.

    Raises UsageError, and writes nothing, where anything else lies in the folder.
    """
    old = _earlier(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    for mail in found:
        write_whole(folder / mail.name, mail.data)
    # Last, so that a list never names a mail that is not there.
    write_whole(folder / LIST, listing(found, base, release).encode())
    return tuple(folder / mail.name for mail in found)


def _earlier(folder: Path) -> list[Path]:
    """Return the files of an earlier series in a folder."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name one that is empty or not there yet.")
    there = set(folder.iterdir()) if folder.is_dir() else set()
    lines: list[str] = []
    if folder / LIST in there:
        lines = (folder / LIST).read_text("utf-8", "replace").splitlines()
    ours = {folder / LIST, *(folder / name for name in lines[1:])}
    if not lines or not lines[0].startswith(_OURS):
        ours = set()
    if foreign := sorted(there - ours):
        raise UsageError(
            f"{folder} holds {foreign[0].name}, which is of no exported series; "
            "name a folder that is empty or not there yet."
        )
    return sorted(there)
