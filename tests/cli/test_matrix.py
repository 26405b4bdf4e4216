"""Test the verb `matrix`: output, files and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import cell_results
from fakes.cell_results import result

from pyllamakv import home
from pyllamakv.cli import main
from pyllamakv.errors import BranchRefused, FetchError, Locked, UsageError
from pyllamakv.patching import conflict_report, status
from pyllamakv.patching.conflict_report import HunkConflict, UncarriedPatch
from pyllamakv.source import fetch, lockfile, verified, watch
from pyllamakv.source.releases import Release
from pyllamakv.source.watch import NewVersion, NewVersions
from pyllamakv.verification import (
    cell,
    expected,
    matrix,
    matrix_reports,
    release_watch,
    result_cache,
    review_branch,
)
from pyllamakv.verification.cell import CellSpec
from pyllamakv.verification.review_branch import Checkout, ReviewBranch

SOME = ("0.3.5", "0.3.6", "0.3.9", "0.3.36")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch, tmp_path: Path, capsys) -> Run:
    """Run the command line with a small lock and a verifier that needs no build."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    known = {name: each for name, each in lockfile.known().items() if name in SOME}
    monkeypatch.setattr(lockfile, "known", lambda: known)
    monkeypatch.setattr(matrix.spec_resolver, "resolve", lambda name, *_: known[name])
    monkeypatch.setattr(matrix.port_choice, "load_series", lambda _: cell_results.Series())
    monkeypatch.setattr(result_cache, "key", lambda spec, where="here": spec.name)
    monkeypatch.setattr(verified, "shipped", lambda: tmp_path / "expected.toml")
    monkeypatch.setattr(verified, "local_file", lambda: tmp_path / "expected.toml")

    def judge(spec, **_):
        return cell.CellResult.from_json(cell_results.judge(spec.to_json()))

    monkeypatch.setattr(cell, "verify_cell", judge)
    monkeypatch.setattr(fetch, "fetch", lambda release, **_: release)
    monkeypatch.setattr(review_branch, "repository", lambda _: Checkout(tmp_path, "1" * 40))
    monkeypatch.setattr(review_branch, "check_free", lambda root, name: "")
    monkeypatch.setattr(review_branch, "write", branch_of)
    monkeypatch.setattr(conflict_report, "of_release", lambda release, **_: (UNCARRIED,))
    monkeypatch.setattr(status, "contained", lambda release, *_, **__: ())

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main.main(list(words))
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return call


def test_bare_matrix_runs_everything_then_shows(run: Run) -> None:
    """`make matrix` verifies all releases; a verdict without an accepted one must be good."""
    code, out, err = run("matrix")
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[1:5]] == list(SOME)
    assert "0.3.6: worse: expected a good verdict, found ineffective" in out
    assert "1 of 4 worse than accepted" in out
    assert "0.3.5: needed (1 of 4" in err


def test_interrupted_matrix_names_the_command_that_resumes(run: Run, monkeypatch) -> None:
    """Ctrl-C returns the shell's status without a traceback; the next run verifies the rest."""
    judge = cell.verify_cell

    def stopped(spec, **_):
        if spec.release == "0.3.9":
            raise KeyboardInterrupt
        return judge(spec)

    monkeypatch.setattr(cell, "verify_cell", stopped)
    code, out, err = run("matrix", "run")
    assert (code, out) == (130, "")
    assert err.endswith("continues from there\ninterrupted\n")
    monkeypatch.setattr(cell, "verify_cell", judge)
    _, _, err = run("matrix", "run")
    assert "0.3.5" not in err
    assert "0.3.9: needed (3 of 4" in err


def test_matrix_json_is_valid_against_the_schema(run: Run) -> None:
    """Stdout has one document, and nothing else."""
    jsonschema = pytest.importorskip("jsonschema")
    code, out, _ = run("matrix", "--json")
    assert code == 1
    jsonschema.validate(json.loads(out), matrix_reports.schema())
    assert len(json.loads(out)["cells"]) == 4


def test_verbose_shows_reasons(run: Run) -> None:
    """With -v, each verdict has its reason, and each failure its message."""
    run("matrix", "run")
    plain, verbose = run("matrix", "show")[1], run("matrix", "show", "-v")[1]
    assert len(verbose) > len(plain)
    for line in ("0.3.9: needed: stock fails", "skipped patch kv-counters: requires"):
        assert line in verbose and line not in plain


def test_accepted_verdicts_exit_with_0(run: Run, tmp_path: Path) -> None:
    """An accepted verdict passes; a better one passes and is reported."""
    run("matrix", "run")
    code, out, err = run("matrix", "accept")
    assert code == 0
    assert out.splitlines()[1] == "0.3.6: ineffective"
    assert "expected.toml" in err
    assert run("matrix", "accept")[1] == "nothing changed\n"
    code, out, _ = run("matrix", "run")
    assert code == 0
    assert out.splitlines()[-1] == "as accepted"
    file = tmp_path / "expected.toml"
    file.write_text(file.read_text().replace('"needed"', '"harmful"'))
    code, out, _ = run("matrix", "show")
    assert code == 0
    assert "0.3.9: better: expected harmful, found needed" in out
    code, out, _ = run("matrix", "accept", "--json", "0.3.9")
    assert json.loads(out)["changed"] == ["0.3.9: needed (was harmful)"]


def test_accept_merges_results_of_other_machines(run: Run, tmp_path: Path) -> None:
    """Documents of other runs are accepted like results of this machine."""
    judged = tmp_path / "judged.json"
    judged.write_text(run("matrix", "run", "0.3.9", "--json")[1])
    code, out, _ = run("matrix", "accept", "--json", "--merge", str(judged))
    assert (code, json.loads(out)["changed"]) == (0, ["0.3.9: needed"])
    assert run("matrix", "accept", "--merge", str(tmp_path / "none.json"))[0] == 2


def test_plan_lists_releases_with_their_state(run: Run) -> None:
    """A plan lists stored results; the one for GitHub is a single line."""
    run("matrix", "run", "0.3.9")
    code, out, _ = run("matrix", "plan")
    assert code == 0
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [
        ["0.3.5", "to verify"],
        ["0.3.6", "to verify"],
        ["0.3.9", "verified (needed)"],
        ["0.3.36", "to verify"],
    ]
    code, out, _ = run("matrix", "plan", "--github", "--backend", "cuda", "0.3.9")
    assert out.count("\n") == 1
    assert json.loads(out)["include"][0]["args"] == "0.3.9 --backend cuda"
    cells = json.loads(run("matrix", "plan", "--json", "--each", "0.3.9")[1])["cells"]
    assert CellSpec.from_json(cells[0]["spec"]) == CellSpec("0.3.9")
    assert len(cells) > 1
    sampled = json.loads(run("matrix", "plan", "--json", "--sample")[1])["cells"]
    assert [each["spec"]["release"] for each in sampled] == ["0.3.5", "0.3.6", "0.3.9", "0.3.36"]
    assert run("matrix", "plan", "--series", "full-defrag", "--each")[0] == 2


def test_show_and_report_run_nothing(run: Run, tmp_path: Path) -> None:
    """Releases that were not verified are listed on stderr."""
    code, out, err = run("matrix", "show")
    assert (code, out) == (0, "")
    assert "no results yet: 0.3.5" in err
    assert run("matrix", "report")[0] == 2
    run("matrix", "run", "0.3.9")
    code, out, err = run("matrix", "report", "--markdown")
    assert code == 0
    assert out.splitlines()[0] == "| release | era | backend | verdict | measured | fixed |"
    assert len(out.splitlines()) == 3
    page, suite = tmp_path / "page.html", tmp_path / "suite.xml"
    code, out, _ = run("matrix", "report", "--html", str(page), "--junit", str(suite))
    assert (code, out) == (0, "")
    assert "<svg" in page.read_text() and "<testsuites" in suite.read_text()
    code, out, err = run("matrix", "report")
    assert "matrix.html" in err
    assert (tmp_path / "home" / "results" / "matrix.html").is_file()


def test_report_merges_json_of_other_jobs(run: Run, tmp_path: Path) -> None:
    """Each job writes JSON, and one report reads all files."""
    file = tmp_path / "job.json"
    file.write_text(run("matrix", "run", "0.3.6", "--json")[1])
    code, out, _ = run("matrix", "report", "--merge", str(file), "--github")
    assert code == 0
    assert out.startswith("::error title=pyllamakv 0.3.6::")


def test_github_annotations_are_not_in_the_json(run: Run) -> None:
    """Annotations are written to stderr."""
    code, out, err = run("matrix", "run", "0.3.6", "--json", "--github")
    assert code == 1
    json.loads(out)
    assert "::error" in err


CONFLICT = HunkConflict(
    "src/a.cpp", 4, "bool find", 120, ("new <`` ``` lines;",), (), ("mine;",), "0.3.36", "b11549"
)
UNCARRIED = UncarriedPatch("compaction", "manual", "0.3.36", "a conflict", (CONFLICT,))


def branch_of(start: Any, name: str, release: Release, results: Any, **_: Any) -> ReviewBranch:
    """Return the branch that would be written."""
    assert [each.spec.release for each in results] == [release.name]
    return ReviewBranch(name, "1" * 40, ("vendor/upstream.lock.toml",), ("look at <it>",))


def adding(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> list[str]:
    """Add releases to the lock without an archive; return the list of added ones."""
    known = lockfile.known()
    added = []

    def add(spec, **_):
        if spec == failing:
            raise FetchError("the archive is cut off")
        added.append(spec)
        name = "b11549" if spec.startswith("xllamacpp") else spec
        known[name] = replace(known["0.3.36"], name=name, commit=f"{len(known):040x}")
        lockfile.save(lockfile.added(), [known[name]])
        return known[name]

    monkeypatch.setattr(fetch, "add", add)
    return added


def version(spec: str, source: str = "llama-cpp-python") -> NewVersion:
    """Return a version of an index."""
    return NewVersion(source, spec.rpartition("=")[2], spec, "2026-11-01T00:00:00Z")


def offer(monkeypatch: pytest.MonkeyPatch, *parts: tuple[Any, ...]) -> None:
    """Make the indexes offer new and older versions, and lack some; one is unreachable."""
    found = NewVersions(*parts, ("npm: no answer",))
    monkeypatch.setattr(watch, "new_versions", lambda: found)


def test_watch_pins_a_moved_git_reference(run: Run, monkeypatch) -> None:
    """It is pinned to its present commit, and its branch is named for the commit."""
    known = lockfile.known()
    name = "git:/up@main"
    known[name] = replace(known["0.3.36"], name=name, kind="git")
    monkeypatch.setattr(watch, "new_versions", lambda: NewVersions((), (), (), (), (name,)))
    monkeypatch.setattr(release_watch.spec_resolver, "remote_commit", lambda _: "7" * 40)

    def pin(spec: str) -> Any:
        known[spec] = replace(known[spec], commit="7" * 40)
        return known[spec]

    monkeypatch.setattr(release_watch.spec_resolver, "pin_git", pin)
    code, out, err = run("matrix", "watch")
    assert code == 0, err
    assert f"{name}: branch watch/git-777777777777" in out
    assert f"{name} is at another commit" in err
    monkeypatch.setattr(release_watch.spec_resolver, "remote_commit", lambda _: "7" * 40)
    assert run("matrix", "watch", name)[0] == 0


def test_watch_adds_and_verifies_new_versions(run: Run, monkeypatch) -> None:
    """New versions of all sources are added and verified, and must have a good verdict."""
    added = adding(monkeypatch)
    offer(monkeypatch, (), (), ("0.2.1",))
    code, out, err = run("matrix", "watch")
    assert (code, out) == (0, "")
    assert "no new version" in err and "0.2.1" in err and "npm: no answer" in err
    new = version("xllamacpp==2026.10.11549", "xllamacpp"), version("0.3.38")
    offer(monkeypatch, new, (version("0.2.3"),), ())
    listed = json.loads(run("matrix", "watch", "--dry-run", "--json")[1])
    assert [each["spec"] for each in listed["new"]] == ["xllamacpp==2026.10.11549", "0.3.38"]
    assert not added
    monkeypatch.setitem(cell_results.VERDICTS, "b11549", "broken-apply")
    code, out, err = run("matrix", "watch")
    assert code == 1
    assert added == ["0.3.38", "xllamacpp==2026.10.11549"]
    assert "b11549: worse: expected a good verdict, found broken-apply" in out
    assert "0.3.5" not in out
    assert out.splitlines()[-2:] == [
        "b11549: compaction requires manual work: src/a.cpp, hunk 4 in find, line 120: "
        "changed between 0.3.36 and b11549",
        "0.3.38: branch watch/0.3.38",
    ]
    offer(monkeypatch, (), (version("0.2.3"),), ())
    assert run("matrix", "watch")[:2] == (0, ""), "every release is finished"
    run("matrix", "watch", "--unpinned")
    assert added[2:] == ["0.2.3"]


@pytest.mark.slow
def test_watch_writes_a_report(run: Run, monkeypatch, tmp_path: Path) -> None:
    """Both files have verdicts, branches, conflicts with both sides, and failures."""
    adding(monkeypatch, failing="0.3.39")
    offers = version("xllamacpp==2026.10.11549", "xllamacpp"), version("0.3.38"), version("0.3.39")
    offer(monkeypatch, offers, (), ())
    monkeypatch.setitem(cell_results.VERDICTS, "b11549", "broken-apply")
    code, out, err = run("matrix", "watch", "--json", "--report", str(tmp_path / "to"))
    assert code == FetchError.exit_code
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(out)
    jsonschema.validate(document, matrix_reports.schema())
    followed = {each["release"]: each for each in document["watched"]}
    assert list(followed) == ["0.3.39", "b11549", "0.3.38"]
    assert followed["0.3.39"]["error"] == "the archive is cut off"
    assert document["warnings"][0] == "npm: no answer"
    assert followed["0.3.38"]["branch"]["name"] == "watch/0.3.38"
    assert followed["b11549"]["conflicts"][0]["conflicts"][0]["hunk"] == 4
    text, page = ((tmp_path / "to" / f"watch.{end}").read_text() for end in ("md", "html"))
    for written in (text, page):
        for wanted in ("watch/0.3.38", "the archive is cut off", "npm: no answer", "mine;"):
            assert wanted in written
        assert "src/a.cpp, hunk 4 in find, line 120: changed between 0.3.36 and b11549" in written
    assert "new &lt;`` ``` lines;" in page and "new <`` ``` lines;" in text
    assert "report: " in err


def test_watch_of_named_releases_reads_no_index(run: Run, monkeypatch) -> None:
    """Only the named ones are verified, and the indexes are not read."""
    added = adding(monkeypatch)
    monkeypatch.setattr(watch, "new_versions", lambda: pytest.fail("the indexes were read"))
    names = ("0.3.9", "0.3.38", "v0.3.9")
    code, out, _ = run("matrix", "watch", *names, "--branch", "review/{release}/x")
    assert code == 0, "two names of one release"
    assert added == ["0.3.38"]
    assert out.splitlines()[-2:] == [
        "0.3.9: branch review/0.3.9/x",
        "0.3.38: branch review/0.3.38/x",
    ]
    code, out, _ = run("matrix", "watch", "0.3.9", "--branch", "")
    assert (code, "branch" in out) == (0, False)
    assert run("matrix", "watch", "0.3.9", "--branch", "a b")[0] == 2


def test_watch_with_a_repeated_backend_verifies_once(run: Run, monkeypatch) -> None:
    """Its cell is verified once, and the release is complete."""
    offer(monkeypatch, (), (), ())
    twice = ("--backend", "cpu", "--backend", "cpu")
    code, out, _ = run("matrix", "watch", "0.3.9", *twice)
    assert (code, out.count("needed")) == (0, 1)
    assert out.splitlines()[-1] == "0.3.9: branch watch/0.3.9"


def test_watch_outside_of_a_checkout_fetches_nothing(run: Run, monkeypatch) -> None:
    """If branches cannot be written, nothing is fetched."""
    added = adding(monkeypatch)
    offer(monkeypatch, (version("0.3.38"),), (), ())

    def nowhere(_):
        raise UsageError("not a checkout")

    monkeypatch.setattr(review_branch, "repository", nowhere)
    assert run("matrix", "watch")[0] == 2
    assert not added
    assert run("matrix", "watch", "--branch", "")[0] == 0


def test_watch_without_a_checkout_verifies_and_names_the_missing_branches(
    run: Run, monkeypatch, tmp_path: Path
) -> None:
    """Only a branch that is requested by name is an error there."""
    offer(monkeypatch, (), (), ())
    monkeypatch.setattr(home, "checkout", lambda: None)
    code, out, err = run("matrix", "watch", "0.3.9", "--report", str(tmp_path))
    assert (code, "branch watch" in out) == (0, False)
    assert "warning: no branches for review: pyllamakv is not in a git checkout" in err
    assert "Warning: no branches for review" in (tmp_path / "watch.md").read_text()
    monkeypatch.undo()
    (tmp_path / "mine.patch").write_bytes(b"")
    assert review_branch.root_of(str(tmp_path / "mine.patch")) is None
    with pytest.raises(UsageError, match=r"requires a git checkout of .*mine\.patch"):
        review_branch.repository(str(tmp_path / "mine.patch"))


@pytest.mark.parametrize(
    ("patches", "place"),
    [
        ("queue", "queue/expected.toml"),
        ("mine.patch", "mine.patch.expected.toml"),
        ("git:queue@main", ""),
    ],
)
def test_verdicts_of_any_series_are_compared_without_an_option(
    run: Run, monkeypatch, tmp_path: Path, patches: str, place: str
) -> None:
    """They are accepted beside the series; without a file, a good verdict is expected."""
    offer(monkeypatch, (), (), ())
    monkeypatch.setattr(release_watch.port_choice, "lock_of", lambda _: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue").mkdir()
    (tmp_path / "mine.patch").write_bytes(b"")
    # The verdict of the shipped series is not that of another one.
    shipped = replace(cell_results.result("0.3.6"), spec=CellSpec("0.3.6"), verdict="harmful")
    expected.accept([shipped])
    chosen = ("0.3.6", "--patches", patches)
    for verb in ("run", "show", "watch"):
        code, out, err = run("matrix", verb, *chosen)
        assert (code, "0.3.6" in out) == (0 if verb == "show" else 1, True), err
        assert "worse: expected a good verdict, found ineffective" in out
    code, _, err = run("matrix", "accept", *chosen)
    assert (code, "--expected" in err) == ((0, False) if place else (2, True))
    if place:
        assert (tmp_path / place).is_file()
        assert run("matrix", "run", *chosen)[0] == 0


def test_second_concurrent_watch_is_refused(run: Run, monkeypatch) -> None:
    """The second one ends with the name of the lock; a list of versions does not wait."""
    added = adding(monkeypatch)
    offer(monkeypatch, (version("0.3.38"),), (), ())
    with release_watch.only_one():
        code, out, err = run("matrix", "watch")
        assert (code, out) == (Locked.exit_code, "")
        assert "another `pyllamakv matrix watch` uses this data directory" in err
        assert "watch.lock" in err
        assert run("matrix", "watch", "--dry-run")[0] == 0
    assert not added
    assert run("matrix", "watch")[0] == 0


def test_watch_verifies_the_others_after_a_failed_fetch(run: Run, monkeypatch) -> None:
    """The others are verified, and the exit status is that of the error."""
    adding(monkeypatch, failing="0.3.39")
    offer(monkeypatch, (version("0.3.38"), version("0.3.39")), (), ())
    code, out, err = run("matrix", "watch")
    assert code == FetchError.exit_code
    assert "0.3.39: the archive is cut off" in err
    assert err.count("the archive is cut off") == 1
    assert "0.3.38" in out


def test_interrupted_watch_verifies_added_releases_once(run: Run, monkeypatch) -> None:
    """A release that was added but not verified is verified once by the next watch."""
    known = lockfile.known()
    date = "2026-11-01T00:00:00Z"
    added = replace(known["0.3.36"], name="b99999", kind="xllamacpp", commit="7" * 40, date=date)
    known["b99999"] = added
    lockfile.save(lockfile.added(), [added])
    offer(monkeypatch, (), (), ())
    assert json.loads(run("matrix", "watch", "--dry-run", "--json")[1])["verify"] == ["b99999"]
    code, out, _ = run("matrix", "watch")
    assert code == 0
    assert out.splitlines()[1].split()[0] == "b99999"
    assert run("matrix", "watch")[:2] == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["verify", "branch"])
def test_repeated_watch_keeps_the_results_of_an_interrupted_one(
    run: Run, monkeypatch, tmp_path: Path, step: str
) -> None:
    """Verdicts are not computed again, and the missing branch is written."""
    adding(monkeypatch)
    offer(monkeypatch, (version("0.3.39"), version("0.3.38")), (), ())
    verify, verified = cell.verify_cell, []

    def ended(spec, **_):
        verified.append(spec.release)
        if step == "verify" and spec.release == "0.3.39":
            raise KeyboardInterrupt
        return verify(spec)

    def end(start, name, *_, **__):
        if step == "branch" and name == "watch/0.3.39":
            raise KeyboardInterrupt
        return branch_of(start, name, *_, **__)

    monkeypatch.setattr(cell, "verify_cell", ended)
    monkeypatch.setattr(review_branch, "write", end)
    code, _, err = run("matrix", "watch", "--report", str(tmp_path))
    assert code == 130
    assert "the same command continues from there" in err
    assert "watch/0.3.38" in (tmp_path / "watch.md").read_text(), "what is done is reported"
    monkeypatch.setattr(review_branch, "write", branch_of)
    offer(monkeypatch, (), (), ())
    if step == "verify":
        monkeypatch.setattr(cell, "verify_cell", verify)
    code, out, _ = run("matrix", "watch")
    assert (code, out.splitlines()[-1]) == (0, "0.3.39: branch watch/0.3.39")
    assert "0.3.38" not in out
    assert verified == ["0.3.38", "0.3.39"]
    assert run("matrix", "watch")[:2] == (0, "")


def test_watch_skips_a_release_with_a_branch_under_review(run: Run, monkeypatch) -> None:
    """Its release is not verified, and the others are; the exit status is that of the error."""
    adding(monkeypatch)
    offer(monkeypatch, (version("0.3.39"), version("0.3.38")), (), ())

    def refuse(root, name):
        if name == "watch/0.3.39":
            raise BranchRefused("it has commits of Ada")

    monkeypatch.setattr(review_branch, "check_free", refuse)
    code, out, err = run("matrix", "watch")
    assert code == BranchRefused.exit_code
    assert "0.3.39: it has commits of Ada" in err
    assert out.splitlines()[1].split()[0] == "0.3.38"
    assert "0.3.39" not in out


def test_watch_without_network_exits_with_4(run: Run, monkeypatch) -> None:
    """An unreachable index is exit status 4, not "nothing new"."""

    def silent():
        raise FetchError("no index answers")

    monkeypatch.setattr(watch, "new_versions", silent)
    assert run("matrix", "watch")[0] == 4
    code, out, _ = run("matrix", "watch", "--dry-run", "--json")
    assert (code, json.loads(out)["unreachable"]) == (4, ["no index answers"])


def test_watch_without_network_verifies_pending_releases(
    run: Run, monkeypatch, tmp_path: Path
) -> None:
    """Releases of an interrupted watch are verified, and the error is in the report."""
    adding(monkeypatch)
    fetch.add("0.3.38")
    assert release_watch.ReleaseWatch("").start(lockfile.known()["0.3.38"])

    def silent():
        raise FetchError("no index answers")

    monkeypatch.setattr(watch, "new_versions", silent)
    code, out, err = run("matrix", "watch", "--report", str(tmp_path / "to"))
    assert (code, out.splitlines()[-1]) == (4, "0.3.38: branch watch/0.3.38")
    assert err.count("no index answers") == 1
    assert "Warning: no index answers" in (tmp_path / "to" / "watch.md").read_text()


def test_watch_report_without_a_new_version_has_warnings(
    run: Run, monkeypatch, tmp_path: Path
) -> None:
    """Warnings are reported if nothing is new, also outside of a checkout."""
    offer(monkeypatch, (), (), ())

    def nowhere(_):
        raise UsageError("not a checkout")

    monkeypatch.setattr(review_branch, "repository", nowhere)
    junit, folder = tmp_path / "watch.xml", tmp_path / "to"
    code, out, _ = run("matrix", "watch", "--json", "--report", str(folder), "--junit", str(junit))
    assert (code, json.loads(out)["unreachable"]) == (0, ["npm: no answer"])
    assert "Warning: npm: no answer" in (folder / "watch.md").read_text()
    assert "npm: no answer" in (folder / "watch.html").read_text()
    assert "<testsuites" in junit.read_text()


def test_bisect_names_the_first_changed_release(run: Run) -> None:
    """The output has the change and the steps that led to it."""
    code, out, _ = run("matrix", "bisect", "0.3.9", "0.3.36")
    assert code == 0
    assert "0.3.36 is the first release that is native; 0.3.9 is needed." in out
    code, out, _ = run("matrix", "bisect", "0.3.9", "0.3.5")
    assert code == 2
    code, out, _ = run("matrix", "bisect", "0.3.9", "0.3.36", "--json", "--scenario", "fragmented")
    assert json.loads(out)["first"]["release"] == "0.3.36"


def test_bisect_reports_contradicting_cached_verdicts(run: Run) -> None:
    """A verdict that contradicts a single change is reported, also outside of the search."""
    code, out, _ = run("matrix", "run")
    code, out, _ = run("matrix", "bisect", "0.3.5", "0.3.36")
    assert code == 0
    assert "0.3.6 is the first release that is ineffective" in out
    assert "more than one change: 0.3.9 is needed" in out


def test_unreachable_scheduler_is_reported(run: Run) -> None:
    """The error has a remedy."""
    pytest.importorskip("distributed")
    from pyllamakv.verification import cluster

    old, cluster._PATIENCE = cluster._PATIENCE, 1
    try:
        code, _out, err = run("matrix", "run", "--scheduler", "tcp://127.0.0.1:9")
    finally:
        cluster._PATIENCE = old
    assert code == 2
    assert "no scheduler responds at tcp://127.0.0.1:9" in err


def test_stale_results_are_accepted_only_on_request(run: Run, monkeypatch) -> None:
    """A verdict of other inputs is marked, and accepted only on request."""
    run("matrix", "run", "0.3.9")
    monkeypatch.setattr(result_cache, "key", lambda spec, where="here": f"new {spec.name}")
    assert "(old)" in run("matrix", "show", "0.3.9")[1]
    assert "outdated (needed)" in run("matrix", "plan", "0.3.9")[1]
    assert run("matrix", "accept", "0.3.9")[0] == 2
    assert run("matrix", "accept", "0.3.9", "--stale")[0] == 0
    assert result().verdict == "needed"
