"""Test npm: the git bundle in node-llama-cpp, with a small script in place of npm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from source_kit import TREE, link, objects, pack, refs, repository, sha256

from pyllamakv.errors import ArchiveError, FetchError, HashMismatch, ToolMissing
from pyllamakv.source import fetch, git_command, lockfile, npm, tree_limits
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import open_store

BUNDLE = "package/llama/gitRelease.bundle"
ABOUT = "package/llama/llama.cpp.info.json"


pytestmark = pytest.mark.usefixtures("home")


def bundle(folder: Path, *revisions: str) -> bytes:
    """Return a bundle of a tiny llama.cpp."""
    if not folder.exists():
        repository(folder)
    git_command.git(folder, "bundle", "create", "-q", "made", *(revisions or ("HEAD",)))
    return (folder / "made").read_bytes()


def tarball(folder: Path, version: str = "3.7.0", tag: str = "b4980") -> Path:
    """Write a tarball of node-llama-cpp."""
    members = {
        "package/package.json": b'{"scripts": {"preinstall": "exit 1"}}',
        BUNDLE: bundle(folder / "up", "HEAD"),
        ABOUT: json.dumps({"tag": tag, "llamaCppGithubRepo": "x"}).encode(),
    }
    return pack(folder / f"node-llama-cpp-{version}.tgz", members)


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an npm on the PATH that runs a few lines of Python."""
    place = folder / "bin" / "npm"
    place.parent.mkdir(exist_ok=True)
    place.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, shutil\nargs = sys.argv[1:]\n{script}"
    )
    place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place.parent}{os.pathsep}{os.environ['PATH']}")


def fake_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an npm on the PATH whose script gets the package directory as ``to``."""
    folder_of = "next(a for a in args if a.startswith('--pack-destination=')).split('=', 1)[1]"
    fake_tool(folder, monkeypatch, f"to = pathlib.Path({folder_of})\n{script}")


def test_a_bundle_is_imported(tmp_path: Path) -> None:
    """The commit of the bundle is imported completely, with upstream's tag."""
    file = tarball(tmp_path)
    store = open_store()
    commit, tree, tag = npm.import_package(store, file)
    assert tag == "b4980"
    assert {path: store.read(tree, path) for path in store.ls(commit)} == TREE
    assert not refs(store)


def test_a_release_is_packed_and_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version is added under upstream's tag, then fetched again from its lock entry."""
    file = tarball(tmp_path)
    script = (
        "assert '--ignore-scripts' in args and args[:2] == ['pack', 'node-llama-cpp@3.7.0']\n"
        f"shutil.copy({str(file)!r}, to)\n"
    )
    fake_npm(tmp_path, monkeypatch, script)
    release = fetch.add("node-llama-cpp@3.7.0")
    assert (release.name, release.kind, release.sha256) == ("b4980", "npm", sha256(file))
    assert resolve("b4980") == release
    open_store().delete_ref("refs/upstream/b4980")
    assert fetch.fetch(release) == release
    assert open_store().has(release)
    assert fetch.add("node-llama-cpp@3.7.0") == release


def test_missing_npm_error_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without npm, the error names npm, its hint, and an alternative."""
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ToolMissing, match="upstream add FILE") as caught:
        npm.pack("3.7.0", tmp_path, sha256=None)
    assert caught.value.tool == "npm"
    assert "Node.js" in caught.value.hint
    assert fetch.add(str(tarball(tmp_path))).name == "b4980"


def test_failed_npm_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has npm's message, and no file is left."""
    fake_npm(tmp_path, monkeypatch, "sys.exit('npm ERR! network ENOTFOUND')\n")
    with pytest.raises(FetchError, match="ENOTFOUND"):
        npm.pack("3.7.0", tmp_path / "d", sha256=None)
    fake_npm(tmp_path, monkeypatch, "pass\n")
    with pytest.raises(FetchError, match="wrote no"):
        npm.pack("3.7.0", tmp_path / "d", sha256=None)
    with pytest.raises(FetchError, match="not a version"):
        npm.pack("--evil", tmp_path / "d", sha256=None)
    assert list((tmp_path / "d").iterdir()) == []


def test_tarball_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tarball with another hash than the pinned one is deleted."""
    fake_npm(tmp_path, monkeypatch, f"shutil.copy({str(tarball(tmp_path))!r}, to)\n")
    with pytest.raises(HashMismatch):
        npm.pack("3.7.0", tmp_path / "d", sha256="0" * 64)
    assert list((tmp_path / "d").iterdir()) == []


def test_a_pinned_commit_is_checked(tmp_path: Path) -> None:
    """A bundle of another commit than pinned is refused."""
    release = fetch.add(str(tarball(tmp_path)))
    other = open_store(tmp_path / "other.git")
    with pytest.raises(HashMismatch):
        npm.import_package(other, tmp_path / release.archive, commit="1" * 40)  # type: ignore[operator]
    assert not refs(other)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "has no"),
        (b"rubbish", "not a git bundle"),
        (b"# v2 git bundle\n\nPACK", "names no commit"),
        (b"# v2 git bundle\n-" + b"1" * 40 + b" x\n", "requires history"),
        (b"# v2 git bundle\n" + b"x\n" * 5000 + b"\nPACK", "more than 1000 references"),
    ],
)
def test_tarballs_without_a_valid_bundle_are_refused(
    tmp_path: Path, content: bytes | None, word: str
) -> None:
    """A tarball without a bundle, and one whose bundle is none, are refused."""
    members = {"package/x": b""} if content is None else {BUNDLE: content}
    file = pack(tmp_path / "node-llama-cpp-1.0.0.tgz", members)
    with pytest.raises(ArchiveError, match=word):
        npm.import_package(open_store(), file)


def test_damaged_bundle_leaves_no_files(tmp_path: Path) -> None:
    """A bundle with a flipped bit, and one in place of which a link stands, are refused."""
    data = bytearray(bundle(tmp_path / "up"))
    data[-30] ^= 1
    store = open_store()
    before = objects(store)
    bad = pack(tmp_path / "a.tgz", {BUNDLE: bytes(data)})
    linked = pack(tmp_path / "b.tgz", {BUNDLE: link(BUNDLE, "/etc/passwd")})
    for file in (bad, linked):
        with pytest.raises(ArchiveError):
            npm.import_package(store, file)
    assert objects(store) == before


def test_unsafe_tag_is_replaced_by_the_package_version(tmp_path: Path) -> None:
    """An unsafe tag is replaced by the version of the package."""
    assert fetch.add(str(tarball(tmp_path, tag="../../x"))).name == "node-llama-cpp-3.7.0"


@pytest.mark.parametrize(
    "about",
    [b"[" * 60_000, b"[" * 200_000, b"\xff"],
    ids=["nested", "nested deeper", "no text"],  # pytest puts an id into the environment
)
@pytest.mark.regression(
    "deeply nested or non-UTF-8 metadata of an npm package raised an untyped error",
    by="hostile input",
    of="Python",
)
def test_malformed_package_metadata_names_no_tag(tmp_path: Path, about: bytes) -> None:
    """Metadata with deep nesting or without text have no tag."""
    members = {BUNDLE: bundle(tmp_path / "up", "HEAD"), ABOUT: about}
    file = pack(tmp_path / "node-llama-cpp-3.7.0.tgz", members)
    assert fetch.add(str(file)).name == "node-llama-cpp-3.7.0"


def test_a_lock_entry_names_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version requested from npm is that of the lock entry's package."""
    fake_npm(tmp_path, monkeypatch, "sys.exit(' '.join(args))\n")
    release = fetch.add(str(tarball(tmp_path)))
    lockfile.save(lockfile.added(), [replace(release, name="b1")])
    with pytest.raises(FetchError, match=r"node-llama-cpp@3\.7\.0"):
        fetch.fetch(resolve("b1"))


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_reference_release_is_fetched_from_the_real_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference release is fetched from the registry in npm's configuration."""
    monkeypatch.undo()
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    if shutil.which("npm") is None or subprocess.run(["npm", "--version"], check=False).returncode:
        pytest.skip("npm is not installed")
    release = resolve("b4980")
    try:
        fetch.fetch(release)
    except HashMismatch:
        raise
    except FetchError as error:
        pytest.skip(f"the registry cannot be reached: {error}")
    assert open_store().tree_of(release) == release.tree


def test_npm_versions_have_upload_times_in_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions have their upload time in UTC; invalid versions and dates are ignored."""
    listed = {
        "created": "2023-08-01T00:00:00.000Z",
        "3.7.0": "2025-03-28T01:02:03.456Z",
        "3.0.0-beta.4": "2024-01-01T02:00:00+02:00",
        "3.8.0": "yesterday",
        "3.9.0": None,
        "latest": "2025-03-28T01:02:03.456Z",
        "1" * 5000: "2025-03-28T01:02:03.456Z",
    }
    head = "assert args[:4] == ['view', 'node-llama-cpp', 'time', '--json'], args\n"
    fake_tool(tmp_path, monkeypatch, f"{head}print({json.dumps(json.dumps(listed))})\n")
    assert npm.versions() == {
        "3.7.0": "2025-03-28T01:02:03Z",
        "3.0.0-beta.4": "2024-01-01T00:00:00Z",
        "3.8.0": "",
        "3.9.0": "",
    }


@pytest.mark.parametrize(
    "output",
    ["<html>busy</html>", '{"3.7.0": "2025', "", "[]", "7", "{}", '{"error": {"code": "E"}}'],
)
def test_malformed_npm_output_raises_fetch_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """Malformed output of npm is a failed fetch, not an empty list."""
    fake_tool(tmp_path, monkeypatch, f"print({output!r})\n")
    with pytest.raises(FetchError, match="npm view node-llama-cpp"):
        npm.versions()


def test_failed_npm_list_raises_typed_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of npm, a timeout and a missing npm have typed errors."""
    fake_tool(tmp_path, monkeypatch, "sys.exit('npm ERR! code E503')\n")
    with pytest.raises(FetchError, match="E503"):
        npm.versions()
    monkeypatch.setattr(npm, "_LIST_SECONDS", 0.2)
    fake_tool(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n")
    with pytest.raises(FetchError, match="did not finish"):
        npm.versions()
    monkeypatch.setattr(tree_limits, "MAX_INDEX_PAGE_BYTES", 10)
    monkeypatch.setattr(npm, "_LIST_SECONDS", 60)
    fake_tool(tmp_path, monkeypatch, """print('{"3.7.0": ""}')\n""")
    with pytest.raises(FetchError, match="longer than 10"):
        npm.versions()
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ToolMissing):
        npm.versions()


def test_tag_with_a_leading_v_is_the_release_name(tmp_path: Path) -> None:
    """The tag `v0.5.0` of llama.cpp is the unchanged name of the release."""
    release = fetch.add(str(tarball(tmp_path, "3.22.1", "v0.5.0")))
    assert release.name == "v0.5.0"
    assert resolve("v0.5.0") == resolve("node-llama-cpp@3.22.1") == release


def test_package_of_a_taken_tag_gets_its_own_name(tmp_path: Path) -> None:
    """A second package of the same build gets its own name, and replaces nothing."""
    first = fetch.add(str(tarball(tmp_path / "1")))
    second = fetch.add(str(tarball(tmp_path / "2", "3.7.1")))
    assert (first.name, second.name) == ("b4980", "node-llama-cpp-3.7.1")
    assert resolve("b4980") == first
    assert resolve("node-llama-cpp@3.7.1") == second


def test_bundle_without_its_commit_is_refused(tmp_path: Path) -> None:
    """A bundle whose reference names a commit that its pack lacks is refused."""
    data = bundle(tmp_path / "up", "HEAD")
    head = git_command.git(tmp_path / "up", "rev-parse", "HEAD").encode()
    file = pack(tmp_path / "node-llama-cpp-3.7.0.tgz", {BUNDLE: data.replace(head, b"1" * 40)})
    store = open_store()
    before = objects(store)
    with pytest.raises(ArchiveError):
        fetch.add(str(file))
    assert objects(store) == before
    assert not refs(store)
