"""The verbs `matrix` and `bisect`: what they print, write and return."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import cell_results
from fakes.cell_results import result

from pyllamakv.cli import main
from pyllamakv.errors import FetchError
from pyllamakv.source import fetch, lockfile, verified, watch
from pyllamakv.source.watch import NewVersion, NewVersions
from pyllamakv.verification import cell, matrix, matrix_reports, result_cache
from pyllamakv.verification.cell import CellSpec

SOME = ("0.3.5", "0.3.6", "0.3.9", "0.3.36")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch, tmp_path: Path, capsys) -> Run:
    """Run the command line over a small lock, with a verifier that needs no build."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    known = {name: each for name, each in lockfile.known().items() if name in SOME}
    monkeypatch.setattr(lockfile, "known", lambda: known)
    monkeypatch.setattr(matrix.spec_resolver, "resolve", lambda name: known[name])
    monkeypatch.setattr(matrix.shipped, "load", cell_results.Series)
    monkeypatch.setattr(result_cache, "key", lambda spec, where="here": spec.name)
    monkeypatch.setattr(verified, "shipped", lambda: tmp_path / "expected.toml")
    monkeypatch.setattr(verified, "local_file", lambda: tmp_path / "expected.toml")

    def judge(spec, **_):
        return cell.CellResult.from_json(cell_results.judge(spec.to_json()))

    monkeypatch.setattr(cell, "verify_cell", judge)

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


def test_an_interrupt_says_how_to_go_on(run: Run, monkeypatch) -> None:
    """Ctrl-C ends with the shell's status and no traceback; the next run verifies the rest."""
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


def test_json_is_the_schema_s(run: Run) -> None:
    """Stdout is one document, and nothing else."""
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


def test_accept_then_all_is_well(run: Run, tmp_path: Path) -> None:
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


def test_accept_takes_what_other_machines_judged(run: Run, tmp_path: Path) -> None:
    """Documents of runs elsewhere are accepted as results of here are."""
    judged = tmp_path / "judged.json"
    judged.write_text(run("matrix", "run", "0.3.9", "--json")[1])
    code, out, _ = run("matrix", "accept", "--json", "--merge", str(judged))
    assert (code, json.loads(out)["changed"]) == (0, ["0.3.9: needed"])
    assert run("matrix", "accept", "--merge", str(tmp_path / "none.json"))[0] == 2


def test_plan(run: Run) -> None:
    """A plan lists what is known; the one for GitHub is a single line."""
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
    """Releases that were not verified are named on stderr."""
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


def test_artefacts_are_merged(run: Run, tmp_path: Path) -> None:
    """A job of each machine writes JSON, and one report reads them all."""
    file = tmp_path / "job.json"
    file.write_text(run("matrix", "run", "0.3.6", "--json")[1])
    code, out, _ = run("matrix", "report", "--merge", str(file), "--github")
    assert code == 0
    assert out.startswith("::error title=pyllamakv 0.3.6::")


def test_github_beside_json_leaves_json_alone(run: Run) -> None:
    """Annotations go to stderr there."""
    code, out, err = run("matrix", "run", "0.3.6", "--json", "--github")
    assert code == 1
    json.loads(out)
    assert "::error" in err


def version(spec: str, source: str = "llama-cpp-python") -> NewVersion:
    """Return a version that an index offers."""
    return NewVersion(source, spec.rpartition("=")[2], spec, "2026-11-01T00:00:00Z")


def offer(monkeypatch: pytest.MonkeyPatch, *parts: tuple[Any, ...]) -> None:
    """Let the indexes offer new and older versions, and lack some; one does not answer."""
    found = NewVersions(*parts, ("npm: no answer",))
    monkeypatch.setattr(watch, "new_versions", lambda: found)


def test_watch(run: Run, monkeypatch) -> None:
    """New versions of all sources are added and verified, and must have a good verdict."""
    known = lockfile.known()
    added = []

    def add(spec, **_):
        added.append(spec)
        name = "b11549" if spec.startswith("xllamacpp") else spec
        known[name] = replace(known["0.3.36"], name=name, commit=name.ljust(40, "0"))
        return known[name]

    monkeypatch.setattr(fetch, "add", add)
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
    run("matrix", "watch", "--unpinned")
    assert added[2:] == ["0.2.3", "0.3.38", "xllamacpp==2026.10.11549"]


def test_a_version_that_cannot_be_fetched(run: Run, monkeypatch) -> None:
    """The others are verified, and the exit status is that of the error."""
    known = lockfile.known()

    def add(spec, **_):
        if spec == "0.3.39":
            raise FetchError("the archive is cut off")
        known[spec] = replace(known["0.3.36"], name=spec, commit=spec.ljust(40, "0"))
        return known[spec]

    monkeypatch.setattr(fetch, "add", add)
    offer(monkeypatch, (version("0.3.38"), version("0.3.39")), (), ())
    code, out, err = run("matrix", "watch")
    assert code == FetchError.exit_code
    assert "0.3.39: the archive is cut off" in err
    assert "0.3.38" in out


def test_a_watch_that_was_ended_goes_on(run: Run, monkeypatch) -> None:
    """A release that was added but not verified is verified the next time, and once."""
    known = lockfile.known()
    added = replace(known["0.3.36"], name="b11549", kind="xllamacpp", commit="7" * 40)
    known["b11549"] = added
    lockfile.save(lockfile.added(), [added])
    offer(monkeypatch, (), (), ())
    assert json.loads(run("matrix", "watch", "--dry-run", "--json")[1])["verify"] == ["b11549"]
    code, out, _ = run("matrix", "watch")
    assert code == 0
    assert out.splitlines()[1].split()[0] == "b11549"
    assert run("matrix", "watch")[:2] == (0, "")


def test_watch_without_network(run: Run, monkeypatch) -> None:
    """A silent index is exit status 4, not "nothing new"."""

    def silent():
        raise FetchError("no index answers")

    monkeypatch.setattr(watch, "new_versions", silent)
    assert run("matrix", "watch")[0] == 4


def test_bisect(run: Run) -> None:
    """The change is named, with the steps that led to it."""
    code, out, _ = run("bisect", "0.3.9", "0.3.36")
    assert code == 0
    assert "0.3.36 is the first release that is native; 0.3.9 is needed." in out
    code, out, _ = run("bisect", "0.3.9", "0.3.5")
    assert code == 2
    code, out, _ = run("bisect", "0.3.9", "0.3.36", "--json", "--scenario", "fragmented")
    assert json.loads(out)["first"]["release"] == "0.3.36"


def test_the_memory_of_a_whole_matrix_serves_bisect(run: Run) -> None:
    """A verdict that contradicts a single change is reported, also outside of the search."""
    code, out, _ = run("matrix", "run")
    code, out, _ = run("bisect", "0.3.5", "0.3.36")
    assert code == 0
    assert "0.3.6 is the first release that is ineffective" in out
    assert "more than one change: 0.3.9 is needed" in out


def test_no_scheduler(run: Run) -> None:
    """A scheduler that does not answer is reported with a remedy."""
    pytest.importorskip("distributed")
    from pyllamakv.verification import cluster

    old, cluster._PATIENCE = cluster._PATIENCE, 1
    try:
        code, _out, err = run("matrix", "run", "--scheduler", "tcp://127.0.0.1:9")
    finally:
        cluster._PATIENCE = old
    assert code == 2
    assert "no scheduler responds at tcp://127.0.0.1:9" in err


def test_stale_results_are_not_accepted_by_themselves(run: Run, monkeypatch) -> None:
    """A verdict on other inputs is shown as old, and accepted only on request."""
    run("matrix", "run", "0.3.9")
    monkeypatch.setattr(result_cache, "key", lambda spec, where="here": f"new {spec.name}")
    assert "(old)" in run("matrix", "show", "0.3.9")[1]
    assert "outdated (needed)" in run("matrix", "plan", "0.3.9")[1]
    assert run("matrix", "accept", "0.3.9")[0] == 2
    assert run("matrix", "accept", "0.3.9", "--stale")[0] == 0
    assert result().verdict == "needed"
