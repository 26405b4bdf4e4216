"""Test that repositories, URLs and references cannot make git run a program."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from source_kit import TREE, refs, repository

from pyllamakv.cli import main
from pyllamakv.errors import FetchError, KvError, LockFileError, UsageError
from pyllamakv.patching import foreign_series
from pyllamakv.source import fetch, git_command, lockfile, spec_resolver
from pyllamakv.source.releases import is_safe_name
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

FILTER = TREE | {".gitattributes": b"* filter=evil diff=evil merge=evil\n"}
MODULES = b'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c touch% %s\n\tupdate = !touch %s\n'
CONFIG = """
[core]
\tfsmonitor = touch {trace}-fsmonitor; false
\thooksPath = {hooks}
\tsshCommand = touch {trace}-ssh; false
\tpager = touch {trace}-pager
\teditor = touch {trace}-editor
[pager]
\tls-files = touch {trace}-pager
[alias]
\tls-files = !touch {trace}-alias
[filter "evil"]
\tclean = touch {trace}-clean
\tsmudge = touch {trace}-smudge
\tprocess = touch {trace}-process
\trequired = true
[diff]
\texternal = touch {trace}-diff
[diff "evil"]
\ttextconv = touch {trace}-textconv
[uploadpack]
\tpackObjectsHook = touch {trace}-pack; false
[gpg]
\tprogram = {hooks}/gpg
[log]
\tshowSignature = true
[commit]
\tgpgSign = true
[credential]
\thelper = !touch {trace}-credential
"""
HOOKS = ("post-checkout", "post-index-change", "reference-transaction", "pre-commit")
LAZY = """
[core]
\trepositoryformatversion = 1
[extensions]
\tpartialClone = origin
[remote "origin"]
\turl = {url}
\tpromisor = true
\tuploadpack = touch {trace}-lazy; false
"""


pytestmark = pytest.mark.usefixtures("home")


def hostile(folder: Path, config: str) -> Path:
    """Create a work tree whose config and hooks would create files ``ran-…`` beside it.

    Its second commit adds the files, and its signature would be verified by a program.
    """
    commit = repository(folder, FILTER)
    text = git_command.git(folder, "cat-file", "commit", commit)
    signature = "\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n -----END PGP SIGNATURE-----\n\n"
    signed = text.replace("\n\n", signature, 1) + "\n"
    words = ("hash-object", "-t", "commit", "-w", "--stdin")
    git_command.git(folder, "update-ref", "HEAD", git_command.git(folder, *words, input=signed))
    trace = folder.parent / "ran"
    hooks = folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (*HOOKS, "gpg"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {trace}-{name}\n")
        (hooks / name).chmod(0o755)
    with (folder / ".git" / "config").open("a") as file:
        file.write(config.format(trace=trace, hooks=hooks, url=f"file://{folder.parent}/nothing"))
    (folder / ".gitmodules").write_bytes(MODULES.replace(b"%s", str(trace).encode()))
    (folder / "src" / "changed.cpp").write_text("changed\n")
    return folder


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ran-*"))


def test_config_and_hooks_of_a_folder_never_run(tmp_path: Path) -> None:
    """A work tree is read without running programs that its config names."""
    folder = hostile(tmp_path / "up", CONFIG)
    release = fetch.add(f"path:{folder}")
    store = open_store()
    assert store.read(release.commit, "src/changed.cpp") == b"changed\n"
    store.export(release, tmp_path / "tree")
    assert not ran(tmp_path)


def test_config_and_hooks_of_a_repository_never_run(tmp_path: Path) -> None:
    """They do not run if the directory is named as a git source either."""
    folder = hostile(tmp_path / "up", CONFIG)
    release = fetch.add(f"git:{folder}@main")
    open_store().export(release, tmp_path / "tree")
    assert not ran(tmp_path)


@pytest.mark.parametrize("source", ["path:{}", "git:{}@main"])
@pytest.mark.regression(
    "`patch status` of a contained patch ran the program for signatures of the source's own git "
    "configuration",
    by="hostile input",
    of="Python",
)
def test_status_of_a_contained_patch_runs_nothing(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit of a contained patch is found without running programs of the repository."""
    folder = hostile(tmp_path / "up", CONFIG)
    file = tmp_path / "mine.patch"
    added = FILTER["src/llama.cpp"]
    head = b"--- /dev/null\n+++ b/src/llama.cpp\n@@ -0,0 +1 @@\n+"
    file.write_bytes(head + added)
    with pytest.raises(SystemExit):
        main.main(["patch", "status", source.format(folder), "--patches", str(file), "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    commit = git_command.git(folder, "rev-parse", "HEAD")
    assert row["state"] == "contained"
    assert f"it is in {commit[:12]} (state)" in row["reason"]
    assert not ran(tmp_path)


def test_commits_of_a_repository_are_read_without_its_programs(tmp_path: Path) -> None:
    """Neither does `git:REPOSITORY@FROM..TO` as a series of patches."""
    folder = hostile(tmp_path / "up", CONFIG)
    (patch,) = foreign_series.load(f"git:{folder}@main~1..main")
    assert "src/llama.cpp" in patch.ports[0].patch.paths
    with pytest.raises(UsageError, match="no known release"):
        foreign_series.load(f"git:{folder}@main")
    assert not ran(tmp_path)


@pytest.mark.parametrize("url", ["{url}", "ssh://h/x", "ext::sh -c touch% {trace}-ext"])
@pytest.mark.regression(
    "the git configuration of a directory could start a program through a promisor remote",
    by="hostile input",
    of="Python",
)
def test_promisor_remote_of_a_repository_is_not_used(tmp_path: Path, url: str) -> None:
    """A promisor remote of a directory is ignored, because it could run a program."""
    folder = hostile(tmp_path / "up", CONFIG + LAZY.replace("{url}", url))
    (folder / ".git" / "HEAD").write_text("1" * 40 + "\n")
    fetch.add(f"path:{folder}")
    with pytest.raises(FetchError):
        fetch.add(f"git:{folder}")
    # Neither is possible where git may access other repositories: there are two checks.
    assert git_command.run(folder, "cat-file", "-e", "1" * 40, network=True).returncode != 0
    assert not ran(tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c touch% {trace}-ext",
        "fd::17",
        "--upload-pack=touch {trace}-up",
        "-oProxyCommand=touch {trace}-proxy",
        "ssh://-oProxyCommand=touch {trace}-proxy/x",
        "-x@h:o/r",
        "file:///nothing --upload-pack=touch {trace}-up",
        "file:///nothing\n--upload-pack=touch {trace}-up",
        "$(touch {trace}-shell)",
        ";touch {trace}-shell",
        "a b c",
    ],
)
@pytest.mark.parametrize("ref", ["main", "--upload-pack=x", "a b", "a\nb", "+x:refs/heads/y", ""])
def test_urls_are_never_options_or_programs(tmp_path: Path, url: str, ref: str) -> None:
    """Any unsafe URL or reference is refused; no program runs and no file is left."""
    spec = f"git:{url.format(trace=tmp_path / 'ran')}@{ref}"
    with pytest.raises((UsageError, FetchError)):
        spec_resolver.fetch_git(spec)
    assert not ran(tmp_path)
    assert not refs(open_store())


def test_a_reference_of_a_good_url_is_no_option(tmp_path: Path) -> None:
    """An unsafe reference after a valid URL is treated as part of the URL, which then fails."""
    repository(tmp_path / "up")
    for ref in ("--upload-pack=x", "-x", "a b", "main:refs/heads/x", "../x", "a\nb"):
        with pytest.raises((UsageError, FetchError)):
            spec_resolver.fetch_git(f"git:file://{tmp_path / 'up'}@{ref}")
    assert not refs(open_store())


@pytest.mark.parametrize(
    "name", ["-x", "--help", "../x", "a b", "a\n", "", ".", "a/b", "x.lock", f"1.{'0' * 300}"]
)
@pytest.mark.regression(
    "names of sources that are invalid as paths raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_unsafe_release_names_are_refused_everywhere(tmp_path: Path, name: str) -> None:
    """Release names become refs and files, so unsafe ones are refused from every source."""
    assert not is_safe_name(name)
    with pytest.raises(KvError):
        resolve(name)
    with pytest.raises(KvError):
        fetch.add(name)
    kept = tmp_path / "own.lock.toml"
    table = f'name = {name!r}\nkind = "sdist"\ncommit = "{"1" * 40}"\ntree = "{"2" * 40}"\n'
    text = f'version = 1\n[[release]]\n{table}era = "rows"\ndate = "2025"\narchive = "x"\n'
    kept.write_text(text.replace("'", '"'))
    with pytest.raises(LockFileError):
        lockfile.load(kept)
    kept.write_text(text.replace(repr(name), '"1.0"').replace('"x"', repr(name)).replace("'", '"'))
    with pytest.raises(LockFileError):
        lockfile.load(kept)


@pytest.mark.regression(
    "git could access other repositories without an explicit fetch",
    by="hostile input",
    of="Python",
)
def test_git_accesses_other_repositories_only_on_request(tmp_path: Path) -> None:
    """Only an explicit fetch may access a repository outside of the store."""
    repository(tmp_path / "up")
    store = open_store()
    arguments = ("fetch", "-q", str(tmp_path / "up"), "main")
    assert git_command.run(store.path, *arguments).returncode != 0
    assert git_command.run(store.path, *arguments, network=True).returncode == 0
