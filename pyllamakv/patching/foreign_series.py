"""Read foreign patches: a file, a directory of files, or a series of any layout.

They go through the same doors as the shipped ones: applied strictly, reported hunk by hunk.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pyllamakv.errors import PatchFormatError, UsageError
from pyllamakv.patching import hunks
from pyllamakv.patching import series as series_module
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.series import Series

if TYPE_CHECKING:
    from pathlib import Path

_ENDINGS = (".patch", ".diff")


def load(path: Path) -> Series:
    """Read a patch file, a mailbox of several patches, or a directory.

    A directory contains `series.toml` (the layout of this package), a quilt `series` file (one name
    per line, ``#`` starts a comment, options after the name are ignored) or plain patch files,
    which are sorted by name.
    """
    if os.path.isfile(path):  # noqa: PTH113 - pathlib raises where a text is no path
        return Series(_distinct(_texts(path)), path.parent)
    if not os.path.isdir(path):  # noqa: PTH112
        raise UsageError(f"There is no patch file or directory {path}.")
    if (path / "series.toml").is_file():
        return series_module.load(path)
    if (path / "series").is_file():
        files = [path / name for name in _quilt(path / "series")]
    else:
        files = sorted(file for file in path.iterdir() if file.suffix in _ENDINGS)
    if not files:
        raise UsageError(f"{path} has no patch: expected series.toml, series or *.patch files.")
    return Series(_distinct([text for file in files for text in _texts(file)]), path)


def _texts(file: Path) -> list[Port]:
    """Read the patches of a file: one, or the mails of a mailbox."""
    try:
        pieces = hunks.split(file.read_bytes())
    except OSError as error:
        raise PatchFormatError(f"{file} cannot be read: {error.strerror}", str(file)) from error
    if len(pieces) < 2:
        return [Port.of(hunks.parse(pieces[0], file.name), file)]
    named = [(f"{file.stem}-{number}", piece) for number, piece in enumerate(pieces, 1)]
    return [Port.of(hunks.parse(piece, name), file, stem=name) for name, piece in named]


def definition_of(text: Port) -> Definition:
    """Return a file as a patch that is a candidate for every tree."""
    return Definition(id=text.id, title=text.title, ports=(text,), requires=text.requires)


def _quilt(path: Path) -> list[str]:
    try:
        listing = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchFormatError(f"{path} cannot be read: {error}", str(path)) from error
    if "\0" in listing:
        raise PatchFormatError(
            f"{path} is not a list of patches: it contains zero bytes", str(path)
        )
    lines = (line.split("#", 1)[0].split() for line in listing.splitlines())
    names = [words[0] for words in lines if words]
    for name in map(PurePosixPath, names):
        if name.is_absolute() or ".." in name.parts:
            msg = f"{path} lists {name}, outside of its folder; list files in it"
            raise PatchFormatError(msg, str(path))
    return names


def _distinct(texts: list[Port]) -> tuple[Definition, ...]:
    ids = [text.id for text in texts]
    twice = sorted({id_ for id_ in ids if ids.count(id_) > 1})
    if twice:
        raise UsageError(f"Two files define the patch {twice[0]}; rename one of them.")
    return tuple(definition_of(text) for text in texts)
