"""Test that BENCHMARKS.md and RELIABILITY.md agree with the results."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import UsageError
from qa import SECTIONS, main, selection, summary
from qa.bench.figure import Figure
from qa.entry import Entry, skipped_entry

if TYPE_CHECKING:
    from pathlib import Path

CLAIM = {"Fast": ("Loop", "greedy")}


def test_the_pages_are_current() -> None:
    """A result that was written without `python -m qa summary` fails here."""
    for name, text in summary.pages().items():
        assert (summary.ROOT / name).read_text("utf-8") == text, "run `python -m qa summary`"


def test_single_samples_have_no_interval() -> None:
    """The value of one sample has no brackets."""
    figures = summary.read(summary.BENCHMARKS, Figure)
    single = [each.value for each in figures if each.samples == 1]
    assert single
    assert not [value for value in single if re.search(r"\[[\d.]+, [\d.]+\]", value)]


def test_the_command_writes_the_pages(monkeypatch, tmp_path, capsys) -> None:
    """It names them."""
    monkeypatch.setattr(summary, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "pages", lambda: {"PAGE.md": "new\n"})
    with pytest.raises(SystemExit) as leaving:
        main.main(["summary"])
    assert (leaving.value.code, (tmp_path / "PAGE.md").read_text("utf-8")) == (0, "new\n")
    assert capsys.readouterr().out == "PAGE.md\n"


def test_results_among_the_results_renew_the_pages(monkeypatch, tmp_path, capsys) -> None:
    """Figures are printed as a table or as JSON; without a path, no file is written."""
    monkeypatch.setattr(summary, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    monkeypatch.setattr(summary, "pages", lambda: {"PAGE.md": "new\n"})
    figures = [Figure("Loop", "greedy", "1 x", "2 x", met=False)]
    summary.report(figures, None, as_json=True)
    assert json.loads(capsys.readouterr().out) == [dataclasses.asdict(figures[0])]
    assert not [*tmp_path.iterdir()]
    (tmp_path / "elsewhere").mkdir()
    summary.report(figures, tmp_path / "elsewhere" / "figures.json", as_json=False)
    assert "| greedy | 1 x | 2 x | **missed** |" in capsys.readouterr().out
    assert not (tmp_path / "PAGE.md").exists()
    summary.report(figures, tmp_path / "figures.json", as_json=False)
    assert (tmp_path / "PAGE.md").read_text("utf-8") == "new\n"


def test_a_stored_figure_has_numbers_and_no_samples(tmp_path) -> None:
    """Median, interval, samples and the commit are stored; figures without a claim are not."""
    path = tmp_path / "figures.json"
    data = {"run": {"times": [5.0, 1.0, 2.0]}, "lost": 0}
    one = Figure("Loop", "greedy", "1.5 [1, 2.0] x", data=data, how="text").dated("x")
    summary.store(path, [one, Figure("Loop", "other", "3 s")])
    (kept,) = summary.read(path, Figure)
    assert (kept.median, kept.low, kept.high, kept.samples) == (1.5, 1.0, 2.0, 3)
    assert (kept.data, kept.how, kept.command) == ({"lost": 0}, "", "x")
    assert kept.date and kept.hardware and kept.commit == one.commit
    summary.store(path, [Figure("Cost", "a", "1 s", "2 s", met=False)])
    assert [each.group for each in summary.read(path, Figure)] == ["Loop", "Cost"]
    summary.store(path, [Figure("Loop", "greedy", "9 x", "1 x", met=False)])
    assert [each.value for each in summary.read(path, Figure)] == ["9 x", "1 s"]


def entry(name: str, count: str, *defects: str, section: str = "faults") -> Entry:
    """Return an entry of a section."""
    return Entry(section, name, {"faults": count}, defects, seed=3, date="2026-11-24")


def test_entries_that_did_not_run_again_stay(tmp_path) -> None:
    """Entries are replaced by section and name; a skipped one replaces none."""
    path = tmp_path / "reliability.json"
    summary.store(path, [entry("kill", "10"), entry("disk", "4")])
    summary.store(path, [entry("kill", "20"), entry("rate", "9", section="random_operations")])
    summary.store(path, [skipped_entry("faults", name, "no clang") for name in ("kill", "full")])
    *kept, full = summary.read(path, Entry)
    assert kept == [
        entry("rate", "9", section="random_operations"),
        entry("kill", "20"),
        entry("disk", "4"),
    ]
    assert (full.name, full.ran) == ("full", False)
    summary.store(path, [entry("full", "4")])
    assert summary.read(path, Entry)[-1] == entry("full", "4")


def test_skipped_entry_names_no_directory() -> None:
    """Its reason may be an error with the path of a file of this machine."""
    found = skipped_entry("faults", "x", "load /home/me/hybrid.gguf: build it: pyllamakv build 1")
    assert found.skip_reason == "skipped: load hybrid.gguf: build it: pyllamakv build 1"


def test_a_table_has_defects_and_escapes_bars() -> None:
    """A row lists its defects, or "none"; bars and newlines are escaped."""
    text = summary.table([entry("kill", "10"), entry("disk", "4", "half|a\nstate")])
    assert "| kill | 10 | none |" in text
    assert "| disk | 4 | half\\|a state |" in text


@pytest.mark.parametrize("section", SECTIONS)
def test_stored_entries_have_names_that_exist(section: str) -> None:
    """An entry that was renamed or removed is not kept in the results."""
    names = {e.name for e in summary.read(summary.RELIABILITY, Entry) if e.section == section}
    assert names
    assert names <= set(selection.module(section).names())


def test_a_missed_target_is_always_listed() -> None:
    """A row has the number of missed figures; a figure without a claim is listed as well."""
    run = {"date": "2026-11-24", "command": "python -m qa bench loop"}
    good = Figure("Loop", "greedy, 1", "0.9 [0.8, 1.0] x", "<= 1", True, "C: 1", **run)
    bad = dataclasses.replace(good, name="greedy, 8", value="1.2 [1.1, 1.3] x", met=False)
    other = dataclasses.replace(bad, group="Other", name="slow")
    good, bad, other = (summary._summarized(each) for each in (good, bad, other))
    page = summary.benchmarks([good, bad, other], CLAIM)
    row = next(line for line in page.splitlines() if line.startswith("| Fast"))
    assert "0.9 [0.8, 1.0] x to 1.2 [1.1, 1.3] x" in row
    assert "**1 of 2 missed**" in row
    assert row.endswith("| 1 |")
    assert (
        "\n1. 2026-11-24: `python -m qa bench loop` in [bench/loop.py](qa/bench/loop.py)\n" in page
    )
    assert "| C: 1 |" in row, "the limit of both"
    apart = summary.benchmarks([good, dataclasses.replace(bad, limit="C: 2")], CLAIM)
    assert "C: 1" not in apart.partition("## Missed targets")[0], "a limit of one of two settings"
    missed = page.partition("## Missed targets")[2]
    assert "Loop: greedy, 8" in missed
    assert "Other: slow" in missed
    assert "greedy, 1" not in missed


def test_a_claim_can_have_several_groups() -> None:
    """The row has the number of each command, which has its module; equal values are no range."""
    first, second = "python -m qa load x", "python -m qa replay"
    lost = Figure("Loop 1", "greedy", "0 of 9 lost", "0", True, date="2026-11-24", command=first)
    more = dataclasses.replace(
        lost, group="Loop 2", value="0 of 3 lost", date="2026-11-23", command=second
    )
    other = dataclasses.replace(lost, group="Loop 3 more", value="5 lost")
    page = summary.benchmarks([lost, more, other], {"Fast": (r"Loop \d", "greedy")})
    row = next(line for line in page.splitlines() if line.startswith("| Fast"))
    assert "| 0 of 3 lost; 0 of 9 lost | 0 (met) |" in row
    assert row.endswith("| 1, 2 |")
    assert page.endswith(
        "## Commands\n\n"
        f"1. 2026-11-24: `{first}` in [load/load_cells.py](qa/load/load_cells.py)\n"
        f"2. 2026-11-23: `{second}` in [replay/replay_figures.py](qa/replay/replay_figures.py)\n"
    )


def test_loads_with_other_clients_stay(tmp_path: Path) -> None:
    """A load replaces figures of its number of clients, a benchmark all of its group."""
    path = tmp_path / "results.json"
    load = Figure("llama-server x, fits", "CPU per token, 4 clients", "1.0", "", met=False)
    other = Figure("Loop", "greedy", "1 x", "", met=False)
    summary.store(path, [load, other])
    more = dataclasses.replace(load, name="CPU per token, 16 clients")
    again = dataclasses.replace(load, value="2.0")
    summary.store(path, [again, more, dataclasses.replace(other, name="sampled")])
    names = [(each.name, each.value) for each in summary.read(path, Figure)]
    assert names == [(again.name, "2.0"), (more.name, "1.0"), ("sampled", "1 x")]


def test_a_claim_needs_a_figure() -> None:
    """If its figures were renamed or have no target, the claim is an error."""
    for lacking in ([], [Figure("Loop", "greedy", "1 x")]):
        with pytest.raises(UsageError, match="no figure with a target supports 'Fast'"):
            summary.benchmarks(lacking, CLAIM)


@pytest.mark.parametrize("claim", summary.CLAIMS)
def test_figures_of_a_claim_have_the_same_target(claim: str) -> None:
    """Except for the number: others would be counted among the missed figures of the claim."""
    figures = summary.read(summary.BENCHMARKS, Figure)
    found = [each for each in figures if summary._supports(each, *summary.CLAIMS[claim])]
    assert len({re.sub(r"\d+", "N", each.target) for each in found}) == 1


def test_defects_and_undecided_entries_are_open() -> None:
    """A defect is counted and named; an entry without enough data is named as well."""
    entries = [
        Entry("leaks", "good", {"operations": "1,000"}, date="2026-11-24", command="x"),
        Entry("leaks", "bad", {"operations": "10"}, ("it leaks",), date="2026-11-23", command="y"),
        Entry("leaks", "short", {"operations": "1"}, skip_reason="too few"),
    ]
    page = summary.reliability(entries)
    row = next(line for line in page.splitlines() if line.startswith("| Memory"))
    assert "| 1,011 operations (3 entries) | 1; 1 undecided |" in row
    assert "2026-11-24: `x`" in row
    assert "- leaks, bad: it leaks" in page
    assert "- leaks, short: too few" in page


def test_every_section_has_a_claim() -> None:
    """A new section needs one."""
    assert set(summary.SECTIONS) == set(SECTIONS)
