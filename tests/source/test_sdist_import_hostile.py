"""Test hostile archives: paths outside of the tree, wrong sizes, programs to run."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from typing import TYPE_CHECKING

import pytest
from archive_kit import BUNDLE, PLAIN, UNPACKED, not_fetched, refused, sdist
from source_kit import (
    TREE,
    fill,
    link,
    pack,
    repository,
    sdist_members,
)

from pyllamakv.errors import SourceError
from pyllamakv.source import fetch, git_command, tree_export
from pyllamakv.source.sdist_import import import_sdist
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(
    "kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_only_files_and_links_of_a_plain_tree_are_taken(tmp_path: Path, kind: bytes) -> None:
    """A hard link, a device or a pipe in an unpacked tree is refused."""
    members = PLAIN | {"x": link(f"{UNPACKED}/src/x", "/etc/passwd", kind)}
    refused(open_store(), sdist(tmp_path, members), "not a plain file")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "llama_cpp_python-1.0/../../x"])
def test_members_outside_the_tree_are_passed_over(tmp_path: Path, name: str) -> None:
    """A member outside of llama.cpp is never written, whatever its path is."""
    store = open_store()
    commit, _ = import_sdist(store, sdist(tmp_path, PLAIN | {name: b"out"}))
    assert set(store.ls(commit)) == set(TREE)
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("name", ["/etc/x", "/", "a//b"])
def test_an_absolute_path_below_the_tree_is_refused(tmp_path: Path, name: str) -> None:
    """An absolute path is refused."""
    refused(
        open_store(),
        sdist(tmp_path, PLAIN | {f"{UNPACKED}/{name}": b"x"}),
        r"points outside|path outside",
    )


@pytest.mark.parametrize(
    "links",
    [
        {"a/out": "/etc"},
        {"a/out": "../../etc"},
        {"a/b/up": "../..", "a/b/out": "up/../etc"},
        {"a/b/up": "../..", "out": "a/b/up/../etc"},
    ],
)
@pytest.mark.regression(
    "a link to the outside of a tree through another link was exported",
    by="hostile input",
    of="Python",
)
def test_a_link_out_of_the_tree_is_not_exported(tmp_path: Path, links: dict[str, str]) -> None:
    """A link to the outside, directly or through another link, is not written to a directory."""
    members = PLAIN | {at: link(f"{UNPACKED}/{at}", to) for at, to in links.items()}
    store = open_store()
    commit, _ = import_sdist(store, sdist(tmp_path, members))
    with pytest.raises(SourceError, match=r"points outside|path outside"):
        store.export(commit, tmp_path / "tree")


@pytest.mark.regression(
    "a tree could contain the stamp of an export, and was accepted as complete",
    by="hostile input",
    of="Python",
)
def test_a_tree_with_a_stamp_of_its_own_is_not_exported(tmp_path: Path) -> None:
    """The stamp of a directory is written by this package; one of the tree is ignored."""
    store = open_store()
    for name in (".PYLLAMAKV-TREE", ".pyllamakv-tree/x"):
        commit, _ = store.commit(None, TREE | {name: b'{"complete": true}'}, "x")
        with pytest.raises(SourceError, match="unsafe path"):
            store.export(commit, tmp_path / "tree")
    lying = b'{"tree": "' + b"0" * 40 + b'", "complete": true}'
    commit, tree = store.commit(None, TREE | {".pyllamakv-tree": lying}, "x")
    store.export(commit, tmp_path / "tree")
    assert tree_export.stamped(tmp_path / "tree") == tree
    assert not store.compare(commit, tmp_path / "tree")
    assert store.export(commit, tmp_path / "tree").written == 0


# --- commits ------------------------------------------------------------------------------------

MAKER = b"author a <a@b> 1 +0000\n"
MADE = b"committer a <a@b> 1 +0000\n"
ODD = {
    "no committer": MAKER,
    "no number": MAKER + b"committer a <a@b> z +0000\n",
    "no field": MAKER + b"committer x\n",
    "far away": MAKER + b"committer a <a@b> 99999999999999 +0000\n",
    "crowd": b"",
}


def loose(kind: str, data: bytes) -> tuple[str, bytes]:
    """Return the name of a git object, and the bytes of its file."""
    whole = f"{kind} {len(data)}\0".encode() + data
    return hashlib.sha1(whole).hexdigest(), zlib.compress(whole)


@pytest.mark.parametrize("case", ODD)
@pytest.mark.regression(
    "commits without a date, with an invalid one, or with too many parents were accepted or "
    "raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_commits_with_invalid_fields_are_refused(tmp_path: Path, case: str) -> None:
    """A commit without a date, or with parents without number, is refused before it is taken."""
    up = tmp_path / "up"
    tree = f"tree {git_command.git(up, 'rev-parse', repository(up) + '^{tree}')}\n".encode()
    parents = [loose("commit", tree + MAKER + MADE + b"\n%d\n" % n) for n in range(65)]
    named = b"".join(f"parent {name}\n".encode() for name, _ in parents)
    text = tree + (ODD[case] or named + MAKER + MADE) + b"\nx\n"
    head, data = loose("commit", text)
    for name, content in (*parents, (head, data)):
        fill(up / ".git" / "objects", {f"{name[:2]}/{name[2:]}": content})
    git_command.git(up, "update-ref", "refs/heads/main", head)
    git_command.git(up, "bundle", "create", "-q", str(tmp_path / "bundle"), "HEAD")
    file = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", {BUNDLE: (tmp_path / "bundle").read_bytes()})
    words = "65 parents" if case == "crowd" else "no valid date"
    for spec in (str(file), f"git:file://{up}@main", f"git:{tmp_path / 'bundle'}@HEAD"):
        not_fetched(spec, words)
    if case != "crowd":
        assert fetch.add(f"path:{up}").date


# --- run --------------------------------------------------------------------------------------


def test_no_code_of_an_sdist_is_run(tmp_path: Path) -> None:
    """No code of a directory that Python, CMake, make, npm or git could run is run."""
    trace = tmp_path / "ran"
    python = f"open({str(trace)!r}, 'w')\n".encode()
    shell = f"#!/bin/sh\ntouch {trace}\n".encode()
    top = "llama_cpp_python-1.0"
    members = sdist_members(tmp_path / "making", "1.0")
    members |= {
        f"{top}/setup.py": python,
        f"{top}/conftest.py": python,
        f"{top}/sitecustomize.py": python,
        f"{top}/llama_cpp/__init__.py": python,
        f"{top}/CMakeLists.txt": f"execute_process(COMMAND touch {trace})\n".encode(),
        f"{top}/Makefile": f"all:\n\ttouch {trace}\n".encode(),
        f"{top}/pyproject.toml": b'[build-system]\nrequires = ["evil"]\nbuild-backend = "setup"\n',
        f"{top}/.git/config": f"[core]\n\tfsmonitor = touch {trace}\n".encode(),
        f"{top}/.git/hooks/post-checkout.sh": shell,
        f"{top}/.git/modules/vendor/llama.cpp/hooks/reference-transaction.sh": shell,
        f"{top}/.git/modules/vendor/llama.cpp/config": (
            f"[core]\n\tfsmonitor = touch {trace}\n\tsshCommand = touch {trace}\n"
            f'[filter "x"]\n\tsmudge = touch {trace}\n\trequired = true\n'
        ).encode(),
    }
    release = fetch.add(str(sdist(tmp_path, members)))
    open_store().export(release, tmp_path / "tree")
    assert (tmp_path / "tree" / "include" / "llama.h").is_file()
    assert not trace.exists()


@pytest.mark.regression(
    "files of a tree with a newline or a carriage return in their name could not be read, or were"
    " confused",
    by="hostile input",
    of="Python",
)
def test_file_names_are_never_options(tmp_path: Path) -> None:
    """Leading dashes, spaces, quotes and newlines in file names are passed unchanged."""
    names = ["-rf", "--upload-pack=x", "a b", "a\nb", 'a"b', "a\tb", "$(x)", "`x`", ";x", "'"]
    files = TREE | {f"src/{name}": b"x" for name in names} | {"-x/--y": b"z"}
    plain = {f"{UNPACKED}/{name}": data for name, data in files.items()}
    store = open_store()
    commit, _ = import_sdist(store, sdist(tmp_path, plain))
    assert set(store.ls(commit)) == set(files)
    store.export(commit, tmp_path / "tree")
    assert all((tmp_path / "tree" / name).read_bytes() == data for name, data in files.items())
    fill(tmp_path / "folder", files)
    release = fetch.add(f"path:{tmp_path / 'folder'}")
    assert set(store.ls(release.commit)) == set(files)
