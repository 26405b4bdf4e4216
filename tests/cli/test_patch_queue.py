"""Test that a queue of mails is imported and rebased, up to a review branch, by commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes import cell_results
from patching_kit import code, diff, fill, repository

from pyllamakv.cli import main
from pyllamakv.errors import NoPortApplies
from pyllamakv.source import lockfile, spec_resolver
from pyllamakv.source.git_command import git, git_bytes
from pyllamakv.testing.build_under_test import BuildUnderTest
from pyllamakv.verification import cell, result_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]

HEADER = {"include/llama.h": b"// llama.cpp\n", "src/llama.cpp": b"int n;\n"}
TWO = code("two")
OLD = HEADER | {f"src/{name}.cpp": code(name) for name in ("one", "two", "three")}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in its own data directory; verdicts need no build."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lockfile, "shipped", lambda: tmp_path / "none.lock.toml")
    monkeypatch.setattr(result_cache, "key", lambda spec, where="here": None)

    def judge(spec: cell.CellSpec, **_: Any) -> cell.CellResult:
        return cell.CellResult.from_json(cell_results.judge(spec.to_json()))

    monkeypatch.setattr(cell, "verify_cell", judge)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main.main(list(words))
        out, err = capsys.readouterr()
        return (left.value.code if isinstance(left.value.code, int) else 0), out, err

    return call


@pytest.fixture
def upstream(tmp_path: Path) -> str:
    """Return a remote that merged the first of three mails and changed the lines of the second."""
    remote = repository(tmp_path / "llama.cpp", OLD)
    base = git(remote, "rev-parse", "HEAD")
    changed = dict(OLD)
    for name in ("one", "two", "three"):
        fixed = TWO.replace(b"two_9();", b"two_9(a);") if name == "two" else code(name, "fix(a);")
        changed[f"src/{name}.cpp"] = fixed
        fill(remote, changed)
        git(remote, "commit", "-q", "-a", "-m", f"fix {name}")
    (tmp_path / "mails").mkdir()
    mails = git_bytes(remote, "format-patch", "--stdout", f"{base}..HEAD")
    (tmp_path / "mails" / "all.patch").write_bytes(mails)
    git(remote, "checkout", "-q", "-b", "old", base)
    git(remote, "checkout", "-q", "-B", "main", base)
    fill(
        remote,
        {"src/one.cpp": code("one", "fix(a);"), "src/two.cpp": TWO.replace(b"9();", b"9(b);")},
    )
    later = {f"GIT_{who}_DATE": "2026-11-27T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    git(remote, "commit", "-q", "-a", "-m", "upstream: fix one, change two", env=later)
    return f"git:{remote}@main"


@pytest.mark.slow
def test_bisect_finds_the_commit_of_a_local_repository(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the steps are fetched; BAD may be the older one, but must have a common history."""
    remote = repository(tmp_path / "llama.cpp", OLD)
    git(remote, "checkout", "-q", "-B", "main")
    commits = [git(remote, "rev-parse", "HEAD")]
    for number in range(1, 13):
        fill(remote, {"src/one.cpp": b"int n = %d;\n" % number})
        git(remote, "commit", "-q", "-a", "-m", f"change {number}")
        commits.append(git(remote, "rev-parse", "HEAD"))
    verified: list[int] = []

    def judge(spec: cell.CellSpec, **_: Any) -> cell.CellResult:
        found = commits.index(spec_resolver.resolve(spec.release).commit)
        verified.append(found)
        verdict = "untestable" if found == 6 else "needed" if found < 8 else "harmful"
        return cell_results.result(spec.release, verdict, spec=spec)

    monkeypatch.setattr(cell, "verify_cell", judge)
    ends = [f"git:{remote}@{ref}" for ref in (commits[0], "main")]
    (tmp_path / "mine.patch").write_bytes(diff(OLD, OLD | {"src/two.cpp": code("two", "fix(a);")}))
    code_, out, err = run("matrix", "bisect", *ends, "--patches", "mine.patch")
    assert code_ == 0, err
    first, last = (f"git:{remote}@{commits[number]}" for number in (8, 7))
    assert f"{first} is the first release that is harmful; {last} is needed." in out
    assert sorted(verified) == [0, 5, 6, 7, 8, 12]
    assert len(lockfile.known()) == 6
    code_, out, _ = run("matrix", "bisect", *ends[::-1])
    assert f"{last} is the first release that is needed; {first} is harmful." in out

    git(remote, "checkout", "-q", "-b", "side", commits[3])
    fill(remote, {"src/two.cpp": b"int n;\n"})
    git(remote, "commit", "-q", "-a", "-m", "another change")
    code_, _, err = run("matrix", "bisect", f"git:{remote}@side", ends[1])
    assert (code_, "contains the other one" in err) == (2, True)
    other = repository(tmp_path / "other", HEADER)
    code_, _, err = run("matrix", "bisect", f"git:{other}@HEAD", ends[1])
    assert (code_, "contains the other one" in err) == (2, True)


@pytest.mark.slow
def test_newest_finds_the_commit_that_ends_a_series(run: Run, tmp_path: Path) -> None:
    """Between two releases of one history, its commits are searched; few are fetched."""
    remote = repository(tmp_path / "llama.cpp", OLD)
    git(remote, "checkout", "-q", "-B", "main")
    commits = [git(remote, "rev-parse", "HEAD")]
    for number in range(1, 17):
        path = "two" if number == 11 else "one"
        fill(remote, {f"src/{path}.cpp": b"int n = %d;\n" % number})
        git(remote, "commit", "-q", "-a", "-m", f"change {number}")
        commits.append(git(remote, "rev-parse", "HEAD"))
    (tmp_path / "mine.patch").write_bytes(diff(OLD, OLD | {"src/two.cpp": code("two", "fix(a);")}))
    ends = [f"git:{remote}@{commits[0]}", f"git:{remote}@main"]
    code_, out, err = run("patch", "newest", *ends, "--patches", "mine.patch")
    assert code_ == 0, err
    assert out.startswith(f"newest: git:{remote}@{commits[10]}: needed")
    assert f"first failure: git:{remote}@{commits[11]}: " in out
    assert len(lockfile.known()) == 2, "those of the search are not pinned"


@pytest.mark.slow
def test_patch_queue_is_rebased_onto_a_new_remote_commit(
    run: Run, upstream: str, tmp_path: Path
) -> None:
    """Import, status, newest, rebase, watch; the branch has the accepted verdict."""
    old = upstream.replace("@main", "@old")
    code_, out, err = run(
        "patch", "import", "mails", "--id", "mine", "--to", "queue", "--base", old
    )
    assert code_ == 0, err
    needs = ["requires" in path.read_text() for path in (tmp_path / "queue").glob("*/patch.toml")]
    assert needs == [False] * 3
    queue = repository(tmp_path / "queue", {})

    file = str(queue / "series.toml")
    code_, _, err = run("patch", "import", "mails", "--id", "other", "--to", file)
    assert (code_, "series.toml is not a directory" in err) == (2, True)

    code_, out, _ = run("patch", "status", old, upstream, "--patches", "queue", "--json")
    found = {(row["release"], row["patch"]): row["state"] for row in json.loads(out)}
    assert code_ == 3
    assert [found[old, f"mine-{n}"] for n in (1, 2, 3)] == ["applies"] * 3
    states = [found[upstream, f"mine-{n}"] for n in (1, 2, 3)]
    assert states == ["contained", "manual", "applies"]
    commit = git(tmp_path / "llama.cpp", "rev-parse", "main")
    reasons = {row["patch"]: row["reason"] for row in json.loads(out) if row["release"] == upstream}
    assert f"it is in {commit[:12]} (upstream: fix one, change two)" in reasons["mine-1"]
    likely = "rewrite the hunk: upstream changed a line that it replaces"
    text = " ".join(run("patch", "status", upstream, "--patches", "queue")[1].split())
    assert text.count(f"likely: {likely}") == 1

    code_, out, err = run("build", upstream, "--patches", "queue")
    assert (code_, out, "1 patches of the series do not apply" in err) == (3, "", True)
    with pytest.raises(NoPortApplies, match="mine-2: "):
        _ = BuildUnderTest(f"{upstream}+patched", patches="queue").variant

    code_, out, _ = run("patch", "newest", old, upstream, "--patches", "queue")
    assert code_ == 0
    assert out.startswith(f"newest: {old}: needed")
    assert "first failure: " + upstream in out and "mine-2: src/two.cpp, hunk 1" in out

    code_, _, err = run("patch", "rebase", "mine-2", "--patches", "queue", "--onto", upstream)
    assert code_ == 3
    assert f"src/two.cpp: resolve the marked places; likely: line 11: {likely}" in err
    (folder,) = (tmp_path / "home" / "rebase").glob("mine-2/tree")
    (folder / "src" / "two.cpp").write_bytes(TWO.replace(b"9();", b"9(b, a);"))
    code_, out, err = run("patch", "rebase", "--continue", "mine-2")
    assert (code_, "resolved" in out) == (0, True), err
    assert f"@{commit}" in (queue / "upstream.lock.toml").read_text()
    git(queue, "add", "-A")
    git(queue, "commit", "-q", "-m", "Port mine-2")
    for words in (["status", upstream], ["drift", upstream, "mine-1"], ["lint"]):
        assert run("patch", *words, "--patches", "queue")[0] == 0

    code_, out, err = run("matrix", "watch", upstream, "--patches", "queue", "--report", "report")
    assert code_ == 0, err
    branch = f"watch/git-{commit[:12]}"
    assert f"branch {branch}" in out
    assert "needed" in git(queue, "show", f"{branch}:expected.toml")
    report = (tmp_path / "report" / "watch.md").read_text()
    assert "### mine-1 is contained" in report
    assert f"drop it for this release; it is in {commit[:12]} (upstream: fix one" in report

    fill(tmp_path / "llama.cpp", {"src/three.cpp": code("three", "new(a);")})
    git(tmp_path / "llama.cpp", "commit", "-q", "-a", "-m", "upstream: change three")
    assert run("patch", "status", commit[:12], "--patches", "queue")[0] == 0
