"""Test git URLs, bundles and directories as sources, which are used unchanged."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, fill, imported, objects, refs, repository

from pyllamakv.errors import (
    FetchError,
    HashMismatch,
    LockFileError,
    SourceError,
    UnknownRelease,
    UsageError,
)
from pyllamakv.source import fetch, git_command, git_limits, lockfile, spec_resolver
from pyllamakv.source.releases import Release
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import open_store
from pyllamakv.source.tree_export import STAMP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.source.releases import Kind


pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(
    ("spec", "url", "ref"),
    [
        ("git:https://h/x.git@main", "https://h/x.git", "main"),
        ("git:https://h/x.git", "https://h/x.git", "HEAD"),
        ("git:https://user@h/x.git", "https://user@h/x.git", "HEAD"),
        ("git:https://user@h/x.git@v1/y", "https://user@h/x.git", "v1/y"),
        ("git:git@h:o/x.git", "git@h:o/x.git", "HEAD"),
        ("git:git@h:o/x.git@b4980", "git@h:o/x.git", "b4980"),
        ("git:/a/b@refs/heads/m", "/a/b", "refs/heads/m"),
    ],
)
def test_git_spec_is_split_into_url_and_reference(spec: str, url: str, ref: str) -> None:
    """A spec splits into URL and reference, also with a user name in the URL."""
    assert spec_resolver.split_git(spec) == (url, ref)


@pytest.mark.parametrize(
    "spec", ["git:", "git:--upload-pack=x", "git:a\nb@c", "git:a\0b", "git:/a\udcff@main"]
)
@pytest.mark.regression(
    "URLs with characters that a lock cannot contain were accepted, or raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_url_that_git_reads_as_an_option_is_refused(spec: str) -> None:
    """A URL that git would read as an option, or that a lock cannot contain, is refused."""
    with pytest.raises(UsageError):
        spec_resolver.split_git(spec)


@pytest.mark.parametrize("url", ["https://me:s3cret@h/x.git", "HTTP://s:3@s3cret@h:8/x@main"])
@pytest.mark.regression(
    "the password of a git URL was written into the lock, which is shared",
    by="hostile input",
    of="Python",
)
def test_lock_contains_no_password(url: str) -> None:
    """The lock contains the URLs of added releases, and is shared."""
    with pytest.raises(UsageError, match="git credential") as caught:
        resolve(f"git:{url}")
    assert "s3cret" not in str(caught.value)
    assert lockfile.known() == {}


@pytest.mark.regression(
    "error messages contained the token of a git URL", by="hostile input", of="Python"
)
def test_errors_contain_no_token() -> None:
    """The user name in a URL may be secret as well."""
    with pytest.raises(FetchError, match=r"//\*\*\*@127") as caught:
        resolve("git:http://s3cret@127.0.0.1:9/x@main")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("place", ["a" * 5000, "~nobody-is-here/x", "a\0b"])
@pytest.mark.parametrize("kind", ["git", "path"])
@pytest.mark.regression(
    "names of sources that are invalid as paths raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_specs_that_are_no_valid_path_are_refused(kind: str, place: str) -> None:
    """Names that are too long and homes of unknown users are refused."""
    with pytest.raises((SourceError, UsageError)):
        resolve(f"{kind}:{place}")


def test_branch_of_a_git_url_is_fetched_and_pinned(tmp_path: Path) -> None:
    """A branch of a repository is fetched without history and pinned by commit."""
    commit = repository(tmp_path / "up", commits=3)
    spec = f"git:file://{tmp_path / 'up'}@main"
    release = fetch.ensure(spec)
    assert (release.commit, release.era, release.kind) == (commit, "monolith", "git")
    store = open_store()
    assert store.has(release)
    assert git_command.git(store.path, "rev-list", "--count", commit) == "1"
    assert set(refs(store)) == {f"refs/upstream/git-{commit[:12]}"}
    assert resolve(spec) == release


def test_a_reference_stays_pinned_until_it_is_added_again(tmp_path: Path) -> None:
    """A changed branch has the pinned commit until it is added again."""
    up = tmp_path / "up"
    first = repository(up)
    spec = f"git:{up}@main"
    assert resolve(spec).commit == first
    git_command.git(up, "commit", "-q", "--allow-empty", "-m", "more")
    assert resolve(spec).commit == first
    second = fetch.add(spec)
    assert second.commit == git_command.git(up, "rev-parse", "HEAD")
    assert resolve(spec) == second


@pytest.mark.slow
@pytest.mark.parametrize("url", ["{up}", "file://{up}"])
def test_remote_commit_is_that_of_a_fetch(tmp_path: Path, url: str) -> None:
    """The commit is the one that a fetch would find, also of a tag; nothing is fetched."""
    up = tmp_path / "up"
    url = url.format(up=up)
    first = repository(up)
    git_command.git(up, "tag", "-a", "-m", "first", "v1")
    git_command.git(up, "branch", "x/main")
    git_command.git(up, "commit", "-q", "--allow-empty", "-m", "second")
    refs = ("main", "v1", "HEAD", "refs/heads/main", "x/main", first)
    pins = {ref: resolve(f"git:{url}@{ref}") for ref in refs}
    assert pins["v1"].commit == pins["x/main"].commit == first != pins["main"].commit
    old = {ref: pin.commit for ref, pin in pins.items()}
    assert {ref: spec_resolver.remote_commit(pin) for ref, pin in pins.items()} == old
    git_command.git(up, "commit", "-q", "--allow-empty", "-m", "third")
    git_command.git(up, "branch", "-q", "-D", "x/main")
    newest = git_command.git(up, "rev-parse", "HEAD")
    before = objects(open_store())
    moved = dict.fromkeys(("main", "HEAD", "refs/heads/main"), newest) | {"x/main": ""}
    assert {ref: spec_resolver.remote_commit(pin) for ref, pin in pins.items()} == old | moved
    assert objects(open_store()) == before
    shutil.rmtree(up)
    with pytest.raises(FetchError, match=r"cannot list main of .*up"):
        spec_resolver.remote_commit(pins["main"])
    assert spec_resolver.remote_commit(pins[first]) == first


def test_commit_of_an_annotated_tag_in_a_bundle_is_unchanged(tmp_path: Path) -> None:
    """An annotated tag in a bundle has not moved."""
    repository(tmp_path / "up")
    git_command.git(tmp_path / "up", "tag", "-a", "-m", "first", "v1")
    git_command.git(tmp_path / "up", "bundle", "create", "-q", "../x.bundle", "--all")
    release = resolve(f"git:{tmp_path / 'x.bundle'}@v1")
    assert spec_resolver.remote_commit(release) == release.commit


def test_pinned_git_release_is_fetched_again_by_commit(tmp_path: Path) -> None:
    """A pinned git release that the store lost is fetched by its commit."""
    up = tmp_path / "up"
    commit = repository(up)
    spec = f"git:file://{up}@main"
    release = resolve(spec)
    git_command.git(up, "commit", "-q", "--allow-empty", "-m", "more")
    open_store().delete_ref(f"refs/upstream/{release.key}")
    assert fetch.fetch(release).commit == commit
    assert open_store().has(release)
    assert list(lockfile.known()) == [spec]


def test_git_bundle_is_resolved(tmp_path: Path) -> None:
    """A git bundle is a source like a repository."""
    commit = repository(tmp_path / "up")
    git_command.git(tmp_path / "up", "bundle", "create", "-q", "../x.bundle", "HEAD", "main")
    assert resolve(f"git:{tmp_path / 'x.bundle'}@main").commit == commit


def test_two_references_to_one_tree_have_their_own_dates(tmp_path: Path) -> None:
    """A revert restores a tree; the order of releases is that of their commits."""
    up = tmp_path / "up"
    repository(up)
    for name, day in (("old", "1"), ("new", "9")):
        dates = {f"GIT_{who}_DATE": f"2026-01-0{day}T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        git_command.git(up, "commit", "-q", "--allow-empty", "-m", name, env=dates)
        git_command.git(up, "branch", name)
    old, new = (resolve(f"git:{up}@{name}") for name in ("old", "new"))
    assert old.tree == new.tree
    assert (old.date[:10], new.date[:10]) == ("2026-01-01", "2026-01-09")


def test_release_of_a_series_lock_is_known_to_one_call(tmp_path: Path) -> None:
    """A release of a series lock is found by calls that name the lock, and no others."""
    pins = [
        Release(f"git:{tmp_path}@{sign * 40}", "git", sign * 40, "c" * 40, "unified", "2026-01-01")
        for sign in "ab"
    ]
    lockfile.save(tmp_path / "upstream.lock.toml", pins)
    with pytest.raises(UnknownRelease):
        resolve("git-" + "a" * 12)
    assert resolve("git-" + "a" * 12, tmp_path / "upstream.lock.toml") == pins[0]
    assert not lockfile.known()
    assert set(lockfile.bases(tmp_path / "upstream.lock.toml")) > {each.key for each in pins}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("0.3.99", "sdist"), ("0.3.99", "git"), ("git:/x@main", "git"), ("folder", "path")],
)
def test_series_lock_with_another_entry_than_a_commit_is_refused(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    """It must not contain a version or a branch, because a series may be untrusted."""
    lock = tmp_path / "upstream.lock.toml"
    lockfile.save(lock, [Release(name, kind, "a" * 40, "c" * 40, "unified", "2026-01-01")])
    for asks in (lambda: resolve(name, lock), lambda: lockfile.bases(lock)):
        with pytest.raises(LockFileError, match="pins git commits by their ids") as caught:
            asks()
        assert f"{lock}: release {name!r} is not git:URL@{'a' * 40}" in str(caught.value)
    assert not lockfile.added().exists()


def test_a_message_shows_control_characters_of_a_url() -> None:
    """The message is printed to a terminal."""
    with pytest.raises(FetchError) as caught:
        resolve("git:/none\x1b[2J@main")
    assert "\x1b" not in str(caught.value)


def test_unreachable_git_url_raises_fetch_error(tmp_path: Path) -> None:
    """An unreachable URL or reference is a failed fetch, and nothing changes."""
    repository(tmp_path / "up")
    for spec in (f"git:{tmp_path / 'none'}@main", f"git:{tmp_path / 'up'}@nothing"):
        with pytest.raises(FetchError, match="cannot fetch"):
            resolve(spec)
    assert not refs(open_store())
    assert lockfile.known() == {}


def test_short_commit_of_a_remote_is_asked_for_in_full(tmp_path: Path) -> None:
    """Git cannot fetch an abbreviated commit: the message asks for 40 digits."""
    commit = repository(tmp_path / "up")
    with pytest.raises(FetchError, match="by all its 40 digits"):
        resolve(f"git:{tmp_path / 'up'}@{commit[:10]}")
    assert resolve(f"git:{tmp_path / 'up'}@{commit}").commit == commit


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Listen on a port, and never respond."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def ended(server: socket.socket) -> bool:
    """Return whether the client of a connection has ended."""
    connection, _ = server.accept()
    with connection:
        connection.settimeout(20)
        while connection.recv(4096):
            pass
    return True


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["git", "http"])
def test_silent_git_server_is_ended_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, silent: socket.socket, scheme: str
) -> None:
    """Git and the program that it started for the URL are killed after a timeout."""
    monkeypatch.setattr(git_limits, "MAX_NETWORK_SECONDS", 1.0)
    monkeypatch.setattr(git_command, "_has_terminal", lambda: False)
    spec = f"git:{scheme}://127.0.0.1:{silent.getsockname()[1]}/x@main"
    with pytest.raises(FetchError, match="did not end within 1 s; check the network"):
        resolve(spec)
    assert ended(silent)
    assert lockfile.known() == {}
    release = Release(spec, "git", "1" * 40, "2" * 40, "unified", "2025", url=spec[4:])
    with pytest.raises(FetchError, match="did not end within 1 s"):
        fetch.fetch(release)
    assert ended(silent)
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):
        silent.accept()  # there is no second attempt
    with open_store().lock(f"fetch-{release.key}"):
        pass


@pytest.mark.slow
def test_slow_http_transfer_is_ended_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch, silent: socket.socket
) -> None:
    """HTTP ends before the timeout if too few bytes arrive."""
    options = [each.replace("Time=60", "Time=1") for each in git_limits.NETWORK_OPTIONS]
    monkeypatch.setattr(git_limits, "NETWORK_OPTIONS", options)
    monkeypatch.setattr(git_limits, "MAX_NETWORK_SECONDS", 20.0)
    with pytest.raises(FetchError, match=r"cannot fetch main.* too slow"):
        resolve(f"git:http://127.0.0.1:{silent.getsockname()[1]}/x@main")
    assert ended(silent)


def test_git_can_ask_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a terminal, a fetch stays in the process group, from which ssh can ask."""
    script = tmp_path / "ssh.py"
    script.write_text("import os\nopen(__file__ + '.group', 'w').write(str(os.getpgrp()))\n")
    monkeypatch.setenv("GIT_SSH_COMMAND", f"{sys.executable} {script}")
    groups = {}
    for terminal in (True, False):
        monkeypatch.setattr(git_command, "_has_terminal", lambda found=terminal: found)
        with pytest.raises(FetchError):
            resolve("git:ssh://127.0.0.1/x@main")
        groups[terminal] = int((tmp_path / "ssh.py.group").read_text()) == os.getpgrp()
    assert groups == {True: True, False: False}


def test_source_without_llama_h_is_refused(tmp_path: Path) -> None:
    """A source without llama.h is refused, whatever its kind."""
    repository(tmp_path / "other", {"README": b"x"})
    for kind in ("git", "path"):
        with pytest.raises(UnknownRelease, match="has no llama"):
            resolve(f"{kind}:{tmp_path / 'other'}")
    assert not objects(open_store())
    with pytest.raises(UnknownRelease):
        resolve(f"path:{tmp_path / 'none'}")


def test_work_tree_is_read_with_uncommitted_changes(tmp_path: Path) -> None:
    """All files of a work tree that git does not ignore are read, including changed ones."""
    up = tmp_path / "up"
    repository(up, TREE | {".gitignore": b"*.o\nignored/\n"})
    (up / "src/llama.cpp").write_bytes(b"changed")
    fill(up, {"new.h": b"new", "x.o": b"object", "ignored/y": b"y"})
    (up / "scripts/run.sh").unlink()
    release = resolve(f"path:{up}")
    store = open_store()
    assert store.read(release, "src/llama.cpp") == b"changed"
    assert set(store.ls(release)) == set(TREE) - {"scripts/run.sh"} | {"new.h", ".gitignore"}
    assert git_command.git(up, "status", "--porcelain", "-uno").count("\n") == 1
    assert release.date == git_command.DATE


def test_plain_directory_is_read_without_builds_and_git_files(tmp_path: Path) -> None:
    """All files of a plain directory are read, except builds and git's own files."""
    folder = fill(tmp_path / "plain", TREE)
    fill(folder, {"build/x.o": b"", "build-debug/y": b"", "common/build-info.cpp": b""})
    fill(folder, {STAMP: b"", "src/build/z.cpp": b"z", "a/.git": b"gitdir: x\n"})
    (folder / "link.h").symlink_to("include/llama.h")
    release = resolve(f"path:{folder}")
    store = open_store()
    assert set(store.ls(release)) == {*TREE, "src/build/z.cpp", "link.h"}
    modes = {entry.path: entry.mode for entry in store.entries(release)}
    assert modes["link.h"] == "120000"
    assert modes["scripts/run.sh"] == "100755"


def test_directory_commit_depends_on_its_content(tmp_path: Path) -> None:
    """Equal content has the same commit; any change has another one."""
    folder = fill(tmp_path / "plain", TREE)
    first = resolve(f"path:{folder}")
    assert resolve(f"path:{folder}") == first
    fill(folder, {"src/llama.cpp": b"other", "more": b"x"})
    second = resolve(f"path:{folder}")
    assert second.commit != first.commit
    fill(folder, TREE)
    (folder / "more").unlink()
    assert resolve(f"path:{folder}") == first
    twin = fill(tmp_path / "twin", TREE)
    assert resolve(f"path:{twin}").commit == first.commit


@pytest.mark.regression(
    "after a killed git left a lock of the index, a directory could not be read as a source",
    by="faults",
    of="Python",
)
def test_stale_index_lock_does_not_block_a_directory(tmp_path: Path) -> None:
    """A stale lock file does not block the next reader of the directory."""
    folder = fill(tmp_path / "plain", TREE)
    first = resolve(f"path:{folder}")
    (index,) = (p for p in (tmp_path / "home" / "indexes").iterdir() if not p.suffix)
    index.with_name(f"{index.name}.lock").touch()
    assert resolve(f"path:{folder}") == first


@pytest.mark.slow
@pytest.mark.parametrize("where", [".gitignore", ".gitattributes", ".git/include", ".git/HEAD"])
@pytest.mark.regression(
    "a named pipe in a directory blocked git, and the command, forever",
    by="hostile input",
    of="Python",
)
def test_named_pipe_in_a_repository_does_not_block(tmp_path: Path, monkeypatch, where: str) -> None:
    """Git would wait forever for a writer of the pipe."""
    up = tmp_path / "up"
    repository(up)
    with (up / ".git/config").open("a") as config:
        config.write("[include]\n\tpath = include\n")
    (up / where).unlink(missing_ok=True)
    os.mkfifo(up / where)
    monkeypatch.setattr(git_limits, "MAX_SECONDS", 1.0)
    with pytest.raises(SourceError, match="did not end within 1 s"):
        resolve(f"path:{up}")
    if where.startswith(".git/"):
        with pytest.raises(FetchError, match="did not end within 1 s"):
            resolve(f"git:{up}@main")


@pytest.mark.regression(
    "a directory whose HEAD is not a commit raised TypeError as a source",
    by="hostile input",
    of="Python",
)
def test_directory_with_a_head_that_is_no_commit_has_the_default_date(tmp_path: Path) -> None:
    """A folder is used unchanged: an unreadable date is replaced and is no error."""
    up = tmp_path / "up"
    repository(up)
    blob = git_command.git(up, "rev-parse", "HEAD:include/llama.h")
    (up / ".git/HEAD").write_text(f"{blob}\n")
    assert resolve(f"path:{up}").date == git_command.DATE


def test_an_unpacked_sdist_is_a_plain_folder(tmp_path: Path) -> None:
    """A link to a missing repository does not make a directory a work tree."""
    folder = fill(tmp_path / "plain", TREE | {".git": b"gitdir: ../../.git/modules/none\n"})
    assert set(open_store().ls(resolve(f"path:{folder}"))) == set(TREE)


def test_copy_of_a_release_tree_has_its_date(tmp_path: Path) -> None:
    """A directory with the tree of a known release has the date of that release."""
    release = imported(open_store(), "0.1", TREE, "2024-05-05T00:00:00Z")
    up = tmp_path / "up"
    folder = fill(up, {path: data for path, data in TREE.items() if path != "scripts/run.sh"})
    fill(folder, {"scripts/run.sh": b"#!/bin/sh\n"})
    (folder / "scripts/run.sh").chmod(0o644)
    lockfile.save(lockfile.added(), [release])
    assert resolve(f"path:{folder}").date == release.date


@pytest.mark.slow
def test_rewritten_tag_is_refused(tmp_path: Path) -> None:
    """A pinned commit that its tag no longer has is refused, and the store is unchanged."""
    up = tmp_path / "up"
    repository(up)
    git_command.git(up, "tag", "b1")
    spec = f"git:file://{up}@b1"
    release = resolve(spec)
    git_command.git(up, "commit", "-q", "--amend", "--allow-empty", "-m", "another state")
    git_command.git(up, "tag", "-f", "b1")
    git_command.git(up, "reflog", "expire", "--expire=now", "--all")
    git_command.git(up, "gc", "-q", "--prune=now")
    store = open_store()
    assert fetch.fetch(release) == release
    shutil.rmtree(store.path)
    store = open_store()
    with pytest.raises(HashMismatch, match="add it again"):
        fetch.fetch(release)
    assert not refs(store)
    assert not objects(store)
    moved = fetch.add(spec)
    assert moved.commit != release.commit
    assert resolve(spec) == moved


def test_bundle_with_missing_prerequisites_is_refused(tmp_path: Path) -> None:
    """A bundle without its prerequisite commits is refused, and the store is unchanged."""
    up = tmp_path / "up"
    repository(up, commits=3)
    git_command.git(up, "bundle", "create", "-q", "../x.bundle", "main~1..main")
    with pytest.raises(FetchError, match="prerequisite"):
        fetch.add(f"git:{tmp_path / 'x.bundle'}@main")
    assert not refs(open_store())
    assert not objects(open_store())
    assert lockfile.known() == {}


@pytest.mark.slow
def test_bundle_without_the_pinned_commit_is_refused(tmp_path: Path) -> None:
    """A bundle that no longer has the pinned commit is refused, and the store is unchanged."""
    up = tmp_path / "up"
    repository(up)
    git_command.git(up, "bundle", "create", "-q", "../x.bundle", "main")
    spec = f"git:{tmp_path / 'x.bundle'}@main"
    release = resolve(spec)
    git_command.git(up, "commit", "-q", "--amend", "--allow-empty", "-m", "another state")
    git_command.git(up, "bundle", "create", "-q", "../x.bundle", "main")
    shutil.rmtree(open_store().path)
    with pytest.raises(HashMismatch, match="add it again"):
        fetch.fetch(release)
    assert not refs(open_store())
    assert not objects(open_store())
    assert lockfile.known() == {spec: release}


@pytest.mark.slow
def test_bundle_without_the_commit_of_its_reference_is_refused(tmp_path: Path) -> None:
    """A reference to a commit that is not in the pack is refused, and the store is unchanged."""
    up = tmp_path / "up"
    head = repository(up)
    git_command.git(up, "bundle", "create", "-q", "../x.bundle", "main")
    file = tmp_path / "x.bundle"
    file.write_bytes(file.read_bytes().replace(head.encode(), b"1" * 40))
    with pytest.raises(FetchError, match="cannot fetch main"):
        fetch.add(f"git:{file}@main")
    assert not refs(open_store())
    assert not objects(open_store())
    assert lockfile.known() == {}
