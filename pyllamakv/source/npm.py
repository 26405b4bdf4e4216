"""Fetch the releases that only npm has: the git bundle inside packages of node-llama-cpp.

`npm pack` downloads the plain tarball from the registry that npm is configured for; nothing of the
package is installed or run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import ArchiveError, FetchError, GitError, HashMismatch, ToolMissing
from pyllamakv.source import tree_limits
from pyllamakv.source.download import file_hash
from pyllamakv.source.index import is_version, utc
from pyllamakv.source.package_sources import NODE_LLAMA_CPP
from pyllamakv.source.quarantine import quarantine
from pyllamakv.source.releases import is_safe_name
from pyllamakv.source.tarball import copy_member, open_tar

if TYPE_CHECKING:
    from pyllamakv.source.store import Store

PROJECT = NODE_LLAMA_CPP.project

_BUNDLE = "package/llama/gitRelease.bundle"
_ABOUT = "package/llama/llama.cpp.info.json"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]*")
#: Timeouts of npm in seconds: for a package of 40 MB, and for the list of versions.
_SECONDS, _LIST_SECONDS = 900, 120
#: Limits of references in a bundle and of its description; the package has one, and 200 bytes.
_REFERENCES, _ABOUT_BYTES = 1000, 64 << 10


def pack(version: str, folder: Path, *, sha256: str | None) -> Path:
    """Download a version of node-llama-cpp to ``folder`` and return the tarball.

    Raises ToolMissing without npm, FetchError when npm fails, HashMismatch for another file.
    """
    npm = _npm()
    if not _VERSION.fullmatch(version):
        msg = f"{version!r} is not a version of {PROJECT}"
        raise FetchError(msg)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="npm-") as scratch:
        words = ["pack", f"{PROJECT}@{version}", "--ignore-scripts", "--no-audit", "--no-fund"]
        _run([npm, *words, f"--pack-destination={scratch}"], Path(scratch), _SECONDS)
        packed = Path(scratch) / f"{PROJECT}-{version}.tgz"
        if not packed.is_file():
            msg = f"`npm pack {PROJECT}@{version}` succeeded, but wrote no {packed.name}"
            raise FetchError(msg)
        found = file_hash(packed)
        if sha256 is not None and found != sha256:
            msg = f"{packed.name} has SHA-256 {found}, expected {sha256}; the file was deleted"
            raise HashMismatch(msg, sha256, found)
        return packed.replace(folder / packed.name)


def versions() -> dict[str, str]:
    """Return the versions of node-llama-cpp on npm's registry, each with its date of upload.

    Dates are ISO 8601 in UTC, or empty where the registry states none. Entries that are no versions
    are left out. Raises ToolMissing without npm, and FetchError when npm fails or the answer is not
    a list of versions.
    """
    npm = _npm()
    with tempfile.TemporaryDirectory(prefix="npm-") as scratch:
        output = _run([npm, "view", PROJECT, "time", "--json"], Path(scratch), _LIST_SECONDS)
    try:
        if len(output) > tree_limits.MAX_INDEX_PAGE_BYTES:
            msg = f"the answer is longer than {tree_limits.MAX_INDEX_PAGE_BYTES} bytes"
            raise ValueError(msg)
        listed = json.loads(output)
    except (ValueError, RecursionError) as error:
        msg = f"`npm view {PROJECT}` did not print JSON: {error}"
        raise FetchError(msg) from error
    listed = listed if isinstance(listed, dict) else {}
    found = {name: _date(when) for name, when in listed.items() if is_version(name)}
    if not found:
        msg = f"`npm view {PROJECT}` printed no version: {output[:100]!r}"
        raise FetchError(msg)
    return found


def _date(when: object) -> str:
    try:
        return utc(datetime.fromisoformat(str(when)))
    except ValueError:
        return ""


def _npm() -> str:
    npm = shutil.which("npm")
    if npm is None:
        msg = (
            f"{PROJECT} comes from npm's registry, and npm is not installed; "
            "install Node.js, or give the tarball to `pyllamakv upstream add FILE`"
        )
        raise ToolMissing(msg, tool="npm", hint="install Node.js, which brings npm")
    return npm


def _run(command: list[str], folder: Path, seconds: float) -> bytes:
    shown = f"npm {' '.join(command[1:3])}"
    try:
        done = subprocess.run(
            [*command, "--loglevel=error"],
            cwd=folder,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"`{shown}` did not finish: {error}"
        raise FetchError(msg) from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        msg = f"`{shown}` exited with {done.returncode}: {output}"
        raise FetchError(msg)
    return done.stdout


def import_package(
    store: Store, archive: Path, *, commit: str = "", tree: str = ""
) -> tuple[str, str, str]:
    """Import the bundle of a tarball; return its commit, tree and upstream's tag (``b4980``).

    ``commit`` and ``tree``, where given, must be the ones found. No ref is made. Raises
    ArchiveError for a tarball without a whole bundle, HashMismatch for another commit or tree.
    """
    with quarantine(store) as held:
        bundle, about = held.folder / "bundle", held.folder / "about"
        wanted = {_BUNDLE: bundle, _ABOUT: about}
        with open_tar(archive) as tar:
            for member in tar:
                place = wanted.pop(member.name, None)
                if place is not None:
                    copy_member(tar, member, place)
        if _BUNDLE in wanted:
            msg = f"{archive.name} has no {_BUNDLE}; {PROJECT} ships it since 3.0"
            raise ArchiveError(msg)
        pack = held.folder / "pack"
        head, tag = _head(bundle, archive, pack), _tag(about)
        try:
            # `git bundle unbundle` maps every pack of the store as a whole: a store of a hundred
            # releases exceeded the memory limit.
            held.git("index-pack", "--stdin", "--fix-thin", input=pack)
        except GitError as error:
            msg = f"the bundle in {archive.name} is damaged: {error.output.strip()}"
            raise ArchiveError(msg) from error
        found = held.admit(head, expected_commit=commit, expected_tree=tree)
        return head, found, tag


def _head(bundle: Path, archive: Path, pack: Path) -> str:
    """Return the commit that a bundle is of, its HEAD or its only ref; write its pack to a file."""
    refs: dict[str, str] = {}
    with bundle.open("rb") as source:
        if not source.readline(100).startswith((b"# v2 git bundle", b"# v3 git bundle")):
            msg = f"the bundle in {archive.name} is not a git bundle"
            raise ArchiveError(msg)
        lines = 0
        while (line := source.readline(1000).rstrip(b"\n")) != b"":
            lines += 1
            if lines > _REFERENCES:
                msg = f"the bundle in {archive.name} has more than {_REFERENCES} references"
                raise ArchiveError(msg)
            if line.startswith(b"-"):
                msg = f"the bundle in {archive.name} requires history that it does not contain"
                raise ArchiveError(msg)
            sha, _, name = line.decode("utf-8", "replace").partition(" ")
            if re.fullmatch(r"[0-9a-f]{40}", sha):
                refs[name] = sha
        with pack.open("wb") as target:
            shutil.copyfileobj(source, target)
    head = refs.get("HEAD") or (next(iter(refs.values())) if len(set(refs.values())) == 1 else "")
    if not head:
        msg = f"the bundle in {archive.name} names no commit"
        raise ArchiveError(msg)
    return head


def _tag(about: Path) -> str:
    """Return upstream's tag in the package, or nothing if it has no usable one."""
    try:
        with about.open("rb") as source:
            text = source.read(_ABOUT_BYTES).decode("utf-8")
        tag = str(json.loads(text)["tag"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return tag if is_safe_name(tag) else ""
