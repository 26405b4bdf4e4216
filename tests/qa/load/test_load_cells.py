"""Test that a cell is measured once, systems are interleaved, and options identify cells."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv.scenarios import synthetic_models
from qa.load import load_cells
from qa.load.load_cells import LoadCell, LoadPlan
from qa.load.load_result import LoadResult, RequestTiming

if TYPE_CHECKING:
    from pathlib import Path

PLAN = LoadPlan(("0.3.9",), ("fits", "shift"), (4, 8), requests=3, rounds=2)


def every(plan: LoadPlan) -> list[LoadCell]:
    """Return the cells of all rounds."""
    return [cell for cells in plan.rounds_of_cells() for cell in cells]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Replace servers and batchers; return the systems that ran."""
    ran: list[tuple[str, object]] = []

    def result(requests: list[Any]) -> LoadResult:
        return LoadResult(tuple(RequestTiming(each.at, 1.0, 2.0, 3) for each in requests), 1.0)

    def send(
        _start: object, requests: list[Any], clients: int, _tick: object, *, openai: bool = False
    ) -> LoadResult:
        ran.append(("serve" if openai else "server", clients))
        return result(requests)

    def serve(
        _library: object,
        _model: object,
        requests: list[Any],
        *_: object,
        cells: int | None,
    ) -> LoadResult:
        assert cells is None
        ran.append(("batcher", len(requests)))
        return result(requests)

    def find_server(spec: str) -> Any:
        return SimpleNamespace(id=spec, variant=SimpleNamespace(folder=tmp_path))

    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setenv(synthetic_models.VARIABLE, str(model))
    monkeypatch.setattr(load_cells, "find_server", find_server)
    monkeypatch.setattr(load_cells.ServerLab, "sharing", ())
    monkeypatch.setattr(load_cells.server_load, "send", send)
    monkeypatch.setattr(load_cells.batcher_load, "serve", serve)
    return ran


def test_systems_alternate() -> None:
    """A drift of the machine then affects them alike."""
    cells = every(PLAN)
    assert len(cells) == 2 * 2 * 2 * 3
    assert [each.system for each in cells[:6]] == [
        *("stock", "patched", "batcher"),
        *("batcher", "patched", "stock"),
    ]
    assert [each.round for each in cells[:6]] == [0, 0, 0, 1, 1, 1]
    assert str(cells[0]) == "0.3.9 stock, fits, 4 clients"


def test_a_cell_is_measured_once(runs: list[tuple[str, object]]) -> None:
    """Its result is read from its file; a damaged file is ignored."""
    for cell in every(PLAN)[:3]:
        assert cell.read() is None
        found = cell.measure(lambda _done: None)
        assert cell.read() == found
        assert len(found.timings) == 3
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.day)
    LoadCell(PLAN, "0.3.9", "fits", 4, "serve", 0).measure(lambda _done: None)
    assert runs == [("server", 4), ("server", 4), ("batcher", 3), ("serve", 4)]
    cell.file.write_text("{", encoding="utf-8")
    assert cell.read() is None


def test_servers_of_a_round_have_the_same_layout_of_the_heap(
    runs: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has another one: the time of a graph depends on it."""
    assert runs == []
    names: list[tuple[object, ...]] = []

    def send(start: Any, *_: object) -> LoadResult:
        names.append(start.args[start.args.index("--alias") :])
        return LoadResult((), 1.0)

    monkeypatch.setattr(load_cells.server_load, "send", send)
    cells = [cell for cell in every(PLAN) if cell.workload == "fits" and cell.clients == 4]
    for cell in cells:
        if cell.system != "batcher":
            cell.measure(lambda _done: None)
    assert [*map(len, names)] == [2] * 4
    assert names[0] == names[1] != names[2] == names[3]


def test_code_of_the_batcher_is_part_of_its_cells(
    runs: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So are the options of its context; a server uses neither."""
    assert runs == []
    cells = every(PLAN)[:3]
    assert [cell.system for cell in cells] == ["stock", "patched", "batcher"]
    before = [cell.file for cell in cells]
    setting = tmp_path / "batcher_load.py"
    setting.write_text("# other options", encoding="utf-8")
    for place, name, value in (
        (load_cells.variant, "files_digest", lambda roots: f"{sorted(roots)}"),
        (load_cells.batcher_load, "__file__", str(setting)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            same = [cell.file == file for cell, file in zip(cells, before, strict=True)]
        assert same == [True, True, False], name


def test_changed_options_select_another_cell(
    runs: list[tuple[str, object]], tmp_path: Path
) -> None:
    """So does another build, model or trace."""
    assert runs == []
    trace = tmp_path / "trace"
    trace.write_text("1", encoding="utf-8")
    cell = LoadCell(PLAN, "0.3.9", "trace", 4, "stock", 0)
    others = [
        cell,
        replace(cell, release="0.3.16"),
        replace(cell, workload="fits"),
        replace(cell, clients=8),
        replace(cell, system="patched"),
        replace(cell, system="batcher"),
        replace(cell, round=1),
        *(
            replace(cell, plan=replace(PLAN, **change))
            for change in ({"requests": 4}, {"rate": 1.0}, {"threads": 2}, {"trace": trace})
        ),
        replace(cell, plan=replace(PLAN, model="tiny")),
    ]
    assert len({each.file for each in others}) == len(others)
    # The other cells of a plan do not matter.
    assert replace(cell, plan=replace(PLAN, rounds=5)).file == cell.file


@pytest.mark.parametrize(
    ("module", "systems"),
    [
        ("server_load", ["stock", "patched", "serve"]),
        ("server_client", ["stock", "patched", "serve"]),
        ("server_process", ["stock", "patched", "serve"]),
        ("server_lab", [*load_cells.SYSTEMS]),
        ("request_schedule", [*load_cells.SYSTEMS]),
    ],
)
def test_a_cell_is_measured_again_after_a_change_of_its_code(
    runs: list[tuple[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    systems: list[str],
) -> None:
    """Results of other code are not combined with new ones."""
    assert runs == []
    cells = [LoadCell(PLAN, "0.3.9", "fits", 4, system, 0) for system in load_cells.SYSTEMS]
    before = [each.file for each in cells]
    changed = tmp_path / "changed.py"
    changed.write_text("# changed\n", encoding="utf-8")
    monkeypatch.setattr(getattr(load_cells, module), "__file__", str(changed))
    other = [cell.system for cell, file in zip(cells, before, strict=True) if cell.file != file]
    assert other == systems


def test_another_machine_has_other_cells(
    runs: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data directory can be copied."""
    assert runs == []
    cell = every(PLAN)[0]
    before = cell.file
    monkeypatch.setattr(load_cells, "machine", lambda: "another one")
    assert cell.file != before


def test_a_round_is_compared_within_a_day(
    runs: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete round of one day is read; of any other, only the cells of today."""
    cells = next(PLAN.rounds_of_cells())
    monkeypatch.setattr(load_cells, "_today", lambda: "2026-01-02")
    for cell in cells[:2]:
        cell.measure(lambda _done: None)
    assert [*load_cells.stored(cells)] == cells[:2]
    monkeypatch.setattr(load_cells, "_today", lambda: "2026-01-03")
    assert load_cells.stored(cells) == {}
    cells[2].measure(lambda _done: None)
    assert [*load_cells.stored(cells)] == cells[2:]
    for cell in cells[:2]:
        cell.measure(lambda _done: None)
    monkeypatch.setattr(load_cells, "_today", lambda: "2026-01-04")
    assert [*load_cells.stored(cells)] == cells
    assert len(runs) == 5
