"""Test the exported series of mails: git applies it, with the same tree as this package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from patching_kit import SeriesSandbox, git, numbered

from pyllamakv.cli import main
from pyllamakv.errors import UsageError
from pyllamakv.patching import apply, foreign_series, patch_export, series
from pyllamakv.source import git_command, lockfile, releases, spec_resolver
from pyllamakv.source.store import Store, open_store

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20), "src/gone.cpp": b"x\n"}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y"), "src/new.h": b"// new\n"}
TWO = {k: v for k, v in ONE.items() if k != "src/gone.cpp"} | {"src/b.cpp": numbered(20, l2="z")}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a release with two patches, the second on top of the first."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_release("0.3.2", {"src/other.cpp": b"\n"})
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    bench.add_patch("two", {"0.3.1": (ONE, TWO)}, requires=("one",))
    monkeypatch.setattr(spec_resolver, "resolve", lambda name, *_: bench.releases[name])
    return bench


def run(*words: str) -> int:
    """Run the command line and return its exit status."""
    with pytest.raises(SystemExit) as leaving:
        main.main(["patch", "export-series", *words])
    return int(leaving.value.code or 0)


def taken(store: Store, commit: str, files: list[Path], folder: Path) -> str:
    """Apply mails with git in a repository at a commit of the store; return the new commit.

    The objects are the store's; the work tree contains only the files that a mail changes.
    """
    folder.mkdir()
    git_command.git(folder, "init", "-q", ".")
    info = folder / ".git" / "objects" / "info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "alternates").write_text(f"{store.path / 'objects'}\n", encoding="utf-8")
    (folder / ".git" / "shallow").write_text(f"{commit}\n", encoding="ascii")
    git_command.git(folder, "update-ref", "HEAD", commit)
    git_command.git(folder, "read-tree", "HEAD")
    named = {
        line[len("--- a/") :]
        for file in files
        for line in file.read_text("utf-8").splitlines()
        if line.startswith("--- a/")
    }
    there = sorted(named & set(store.ls(commit)))
    git_command.git(folder, "checkout-index", "--", *there)
    done = git(folder, "am", "--keep-cr", *map(str, files))
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return git_command.git(folder, "rev-parse", "HEAD")


@pytest.mark.slow
def test_git_am_makes_the_patched_commit(bench: SeriesSandbox, tmp_path: Path, capfd) -> None:
    """There is a numbered mail per patch; git am makes the same commits."""
    assert run("0.3.1", "--to", str(tmp_path / "out"), "--patches", str(bench.folder)) == 0
    output = capfd.readouterr().out
    files = sorted((tmp_path / "out").glob("*.patch"))
    assert [file.name for file in files] == ["0001-one.patch", "0002-two.patch"]
    assert all(str(file) in output for file in files)
    assert b"Subject: [PATCH 2/2] Do what two does\n\nBecause two is" in files[1].read_bytes()
    base = bench.releases["0.3.1"]
    patched = apply.apply(base, series=series.load(bench.folder), store=bench.store)
    assert taken(bench.store, base.commit, files, tmp_path / "r") == patched.commit


@pytest.mark.slow
def test_without_a_folder_the_mails_go_to_stdout(
    bench: SeriesSandbox, tmp_path: Path, capfdbinary
) -> None:
    """The output is a mailbox, which git accepts as well."""
    assert run("0.3.1", "--patches", str(bench.folder)) == 0
    printed = capfdbinary.readouterr().out
    assert run("0.3.1", "--to", str(tmp_path / "out"), "--patches", str(bench.folder)) == 0
    files = sorted((tmp_path / "out").glob("*.patch"))
    assert printed == b"".join(file.read_bytes() for file in files)
    box = tmp_path / "box"
    box.write_bytes(printed)
    assert taken(bench.store, bench.releases["0.3.1"].commit, [box], tmp_path / "r")
    assert run("0.3.1", "--json", "--patches", str(bench.folder)) == UsageError.exit_code


def test_exported_directory_is_a_quilt_series(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The series file has the mails in order, so that quilt and this package can read it."""
    assert run("0.3.1", "--to", str(tmp_path / "out"), "--patches", str(bench.folder)) == 0
    head, *names = (tmp_path / "out" / "series").read_text("utf-8").splitlines()
    assert bench.releases["0.3.1"].commit in head
    assert names == ["0001-one.patch", "0002-two.patch"]
    again = foreign_series.load(tmp_path / "out")
    assert again.order == ("one", "two")


@pytest.mark.slow
def test_second_export_replaces_only_the_earlier_series(
    bench: SeriesSandbox, tmp_path: Path
) -> None:
    """A directory with any other file is not changed."""
    out = tmp_path / "out"
    assert run("0.3.1", "--to", str(out), "--patches", str(bench.folder)) == 0
    assert run("0.3.1", "one", "--to", str(out), "--patches", str(bench.folder)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0001-one.patch", "series"]
    (out / "mine.patch").write_text("mine\n", encoding="utf-8")
    before = (out / "0001-one.patch").read_bytes()
    assert run("0.3.1", "--to", str(out), "--patches", str(bench.folder)) == UsageError.exit_code
    assert sorted(path.name for path in out.iterdir()) == [
        "0001-one.patch",
        "mine.patch",
        "series",
    ]
    assert (out / "0001-one.patch").read_bytes() == before
    file = tmp_path / "file"
    file.touch()
    assert run("0.3.1", "--to", str(file), "--patches", str(bench.folder)) == UsageError.exit_code
    quilt = tmp_path / "quilt"
    quilt.mkdir()
    (quilt / "series").write_text("theirs.patch\n", encoding="utf-8")
    with pytest.raises(UsageError, match="holds series"):
        patch_export.write_mails((), quilt, base="", release="")


def test_an_export_without_patches_names_the_reasons(
    bench: SeriesSandbox, tmp_path: Path, capfd
) -> None:
    """If no patch applies, the reasons are reported, and nothing is written."""
    out = tmp_path / "out"
    assert run("0.3.2", "--to", str(out), "--patches", str(bench.folder)) != 0
    assert "one" in capfd.readouterr().err
    assert not out.exists()


PINNED = lockfile.load(lockfile.shipped())


@pytest.mark.slow
@pytest.mark.parametrize("release", PINNED, ids=lambda release: release.name)
def test_mails_make_the_patched_commit_on_every_pinned_release(
    release: releases.Release, tmp_path: Path
) -> None:
    """On the upstream commit of each release, git am makes exactly the patched commit."""
    store = open_store()
    if not store.has(release):
        pytest.skip(f"{release.name} is not fetched here: pyllamakv upstream fetch {release.name}")
    patched = apply.apply(release, store=store)
    found = patch_export.mail_series(store, release.commit, patched)
    assert len(found) == len(patched.patches) > 0
    assert patch_export.mail_series(store, release.commit, patched) == found
    files = patch_export.write_mails(
        found, tmp_path / "out", base=release.commit, release=release.name
    )
    assert taken(store, release.commit, list(files), tmp_path / "r") == patched.commit


@pytest.mark.slow
@pytest.mark.native
def test_a_plain_git_takes_the_series_on_a_plain_tree(stock, tmp_path: Path) -> None:
    """On an exported tree without history, git makes the patched tree."""
    store, release = open_store(), spec_resolver.resolve("0.3.9")
    patched = apply.apply(release, store=store)
    files = patch_export.write_mails(
        patch_export.mail_series(store, release.commit, patched),
        tmp_path / "out",
        base="",
        release="0.3.9",
    )
    tree = tmp_path / "tree"
    store.export(release.commit, tree)
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": "/"}
    who = ("-c", "user.name=A Stranger", "-c", "user.email=stranger@example.org")
    for words in (
        ("init", "-q", "."),
        ("add", "-A", "-f", "."),
        (*who, "commit", "-q", "-m", "upstream"),
        (*who, "am", *map(str, files)),
    ):
        done = subprocess.run(
            ["git", *words],
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    differs = store.compare(patched.commit, tree, keep=(".git", ".pyllamakv-tree"))
    assert not differs, differs.lines()
