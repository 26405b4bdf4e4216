"""Write the mails in `docs/upstream` from the ports of their patches.

``python tests/kits/upstream_mails.py [ID…]`` writes them again. Author, date, subject and message
are taken from the file, which is where they are edited; blob ids and changes come from the port.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pyllamakv.patching import apply, patch_export
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "upstream"
IDS = ("window-rollback", "whole-shift", "server-park")
#: The release that the mails apply to and the reproducers are built against.
RELEASE = "b11549"


def path_of(id_: str) -> Path:
    """Return the file of a mail."""
    return FOLDER / f"{id_}.patch"


def generate(id_: str) -> bytes:
    """Return a mail with the message of its file and the changes of its patch, without ours."""
    store = open_store()
    patched = apply.apply(spec_resolver.resolve(RELEASE), [id_], store=store)
    (port,) = patched.ports
    header, _, _ = path_of(id_).read_bytes().partition(b"diff --git ")
    mail = replace(port, patch=replace(port.patch, header=header))
    parent = spec_resolver.resolve(RELEASE).commit
    return patch_export.format_patch(store, apply.commit_port(store, patched.tree, parent, mail))


if __name__ == "__main__":
    for each in sys.argv[1:] or IDS:
        path_of(each).write_bytes(generate(each))
