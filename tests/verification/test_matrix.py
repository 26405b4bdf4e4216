"""Test the matrix: planning, executors, and the results after a killed run."""

from __future__ import annotations

import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from fakes import cell_results

from pyllamakv.errors import UnknownRelease, UsageError
from pyllamakv.source import lockfile, releases
from pyllamakv.verification import matrix, result_cache
from pyllamakv.verification.cell import CellSpec
from pyllamakv.verification.matrix import MatrixSelection, ProgressEstimate, plan

SOME = ("0.3.5", "0.3.6", "b4980", "0.3.9", "0.3.36")


@pytest.fixture(autouse=True)
def trace(monkeypatch, tmp_path: Path) -> Path:
    """Give every test its own data directory, and a directory that records verified cells."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    folder = tmp_path / "trace"
    folder.mkdir()
    monkeypatch.setenv(cell_results.TRACE, str(folder))
    # Keys read every source; tests of the key itself are with `remembered`.
    monkeypatch.setattr(result_cache, "key", lambda spec, where="here": f"{spec.release}-{where}")
    monkeypatch.setattr(matrix.port_choice, "load_series", lambda _: cell_results.Series())
    return folder


def judged(trace: Path) -> list[str]:
    return sorted(file.read_text() for file in trace.iterdir())


def specs(*names: str) -> tuple[CellSpec, ...]:
    return tuple(CellSpec(name) for name in names or SOME)


def test_plan_has_every_release_once() -> None:
    """The default is the whole lock, oldest first, one cell per upstream commit."""
    cells = plan()
    known = lockfile.known()
    names = [cell.release for cell in cells]
    assert names == [n for n in known if n in names]
    assert {known[n].commit for n in names} == {r.commit for r in known.values()}
    assert len(names) == len({known[n].commit for n in names})


def test_plan_is_filtered_by_release_era_backend_and_patch() -> None:
    """The plan is filtered by each of them."""
    assert [c.release for c in plan(MatrixSelection(("0.3.10", "0.3.9")))] == ["0.3.9", "0.3.10"]
    assert [c.quick for c in plan(MatrixSelection(("0.3.9",), quick=True))] == [True]
    assert [c.quick for c in plan(MatrixSelection(("0.3.9",)))] == [False]
    eras = {lockfile.known()[c.release].era for c in plan(MatrixSelection(eras=("split",)))}
    assert eras == {"split"}
    assert [c.backend for c in plan(MatrixSelection(("0.3.9",), backends=("cpu", "cuda")))] == [
        "cpu",
        "cuda",
    ]
    alone = plan(MatrixSelection(("0.3.9",), each=True))
    assert alone[0].isolate == ""
    assert "full-defrag" in [c.isolate for c in alone]
    assert [c.isolate for c in plan(MatrixSelection(("0.3.9",), isolate=("full-defrag",)))] == [
        "full-defrag"
    ]
    assert plan(MatrixSelection(("0.3.9",), series=("full-defrag",)))[0].series == ("full-defrag",)


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        (MatrixSelection(("0.3.99",)), UnknownRelease),
        (MatrixSelection(eras=("bronze",)), UsageError),
        (MatrixSelection(("0.3.9",), eras=("split",)), UsageError),
        (MatrixSelection(backends=("abacus",)), UsageError),
        (MatrixSelection(series=("nonsense",)), UsageError),
        (MatrixSelection(isolate=("nonsense",)), UsageError),
    ],
)
def test_a_wrong_plan_is_refused(choice: MatrixSelection, error: type[Exception]) -> None:
    """Names are checked before anything is built."""
    with pytest.raises(error):
        plan(choice)


def test_matrix_without_an_executor_runs_in_order() -> None:
    """Cells are verified one by one, in order."""
    messages = []
    found = matrix.run(
        specs(), judge=cell_results.judge, progress=lambda what, done, total: messages.append(what)
    )
    assert [r.spec.release for r in found] == list(SOME)
    assert [r.verdict for r in found] == ["needed", "ineffective", "untestable", "needed", "native"]
    assert messages[0].startswith("0.3.5: needed (1 of 5")
    assert messages[-1] == "0.3.36: native (5 of 5)"


@pytest.mark.slow
def test_matrix_on_threads_and_processes_keeps_the_order(trace: Path) -> None:
    """The order of results is that of the cells, with any executor."""
    with ThreadPoolExecutor(3) as pool:
        first = matrix.run(specs(), executor=pool, judge=cell_results.judge)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        second = matrix.run(specs(), executor=pool, judge=cell_results.judge, fresh=True)
    assert first == second
    assert [r.spec.release for r in second] == list(SOME)
    assert len(judged(trace)) == 10


def test_verified_cells_are_not_verified_again(trace: Path) -> None:
    """A second run verifies only untestable cells; --fresh verifies all."""
    first = matrix.run(specs(), judge=cell_results.judge)
    assert matrix.run(specs(), judge=cell_results.judge) == first
    assert judged(trace) == sorted([*SOME, "b4980"])
    matrix.run(specs("0.3.9"), judge=cell_results.judge, fresh=True)
    assert judged(trace).count("0.3.9") == 2


def test_results_of_other_machines_are_kept_apart(trace: Path) -> None:
    """A result of another kind of machine is not used."""
    with ThreadPoolExecutor(1) as pool:
        matrix.run(specs("0.3.9"), executor=pool, judge=cell_results.judge)
    matrix.run(specs("0.3.9"), judge=cell_results.judge)
    assert judged(trace) == ["0.3.9", "0.3.9"]


def test_repeated_matrix_verifies_only_missing_cells(trace: Path) -> None:
    """Each result is stored when it is complete; the next run verifies the rest."""
    with pytest.raises(KeyboardInterrupt):
        matrix.run(specs(), judge=cell_results.judge_then_be_killed)
    assert judged(trace) == ["0.3.5"]
    matrix.run(specs(), judge=cell_results.judge)
    assert judged(trace) == sorted(SOME)


def test_concurrent_matrices_verify_each_cell_once(trace: Path) -> None:
    """A cell that another run verifies is skipped, and its result is used."""
    first, *others = cells = specs("0.3.5", "0.3.8", "0.3.9")
    begun, go_on = threading.Event(), threading.Event()

    def slowly(raw, fresh):
        begun.set()
        assert go_on.wait(120)
        return cell_results.judge(raw, fresh)

    results = []
    one = threading.Thread(target=lambda: results.extend(matrix.run([first], judge=slowly)))
    one.start()
    assert begun.wait(120)

    def let_go(raw, fresh):
        if raw == others[-1].to_json():
            go_on.set()
        return cell_results.judge(raw, fresh)

    found = matrix.run(cells, judge=let_go)
    one.join(120)
    assert found[0] == results[0]
    assert judged(trace) == sorted(spec.name for spec in cells)


@pytest.mark.slow
def test_cells_of_a_lost_worker_are_untestable() -> None:
    """They have the reason, and the next run verifies them again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = matrix.run(specs(), executor=pool, judge=cell_results.judge_and_die)
    lost = {r.spec.release: r for r in found}["0.3.9"]
    assert lost.verdict == "untestable"
    assert lost.reason.startswith("a worker was lost: BrokenProcessPool")
    again = matrix.run(specs("0.3.9"), judge=cell_results.judge)
    assert again[0].verdict == "needed"


def test_result_of_inputs_changed_during_the_run_is_not_cached(monkeypatch, trace: Path) -> None:
    """A result is never stored with other inputs than its own."""
    keys = iter(["before", "after"])
    monkeypatch.setattr(result_cache, "key", lambda *_: next(keys))
    matrix.run(specs("0.3.9"), judge=cell_results.judge)
    assert result_cache.load_result("before") is None
    assert result_cache.load_result("after") is None


def test_remaining_time_is_estimated_from_completed_cells() -> None:
    """The estimate is the mean of the completed cells, and absent before the first one."""
    pace = ProgressEstimate(10, 4, started=100.0)
    assert pace.left(160.0) is None
    assert str(pace) == "4 of 10"
    pace.done = 2
    assert pace.left(220.0) == 240.0
    pace.done = 6
    assert str(pace) == "10 of 10"


def test_sample_is_one_release_per_era() -> None:
    """The sample has the test release for its era, and the newest of every other."""
    names = [spec.release for spec in plan(MatrixSelection(sample=True))]
    known = lockfile.known()
    eras = [known[name].era for name in names]
    assert sorted(eras) == sorted({release.era for release in known.values()})
    assert releases.TEST_RELEASE in names
    newest = max(known.values(), key=lambda release: release.order)
    assert newest.name in names
