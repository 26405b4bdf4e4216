"""BENCHMARKS.md and RELIABILITY.md agree with the results."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pyllamakv.errors import UsageError
from qa import SECTIONS, main, summary
from qa.bench.figure import Figure
from qa.entry import Entry

CLAIM = summary.Claim("Fast", "Loop", "greedy")


def test_the_pages_are_current() -> None:
    """A result that was written without `python -m qa summary` fails here."""
    for name, text in summary.pages().items():
        assert (summary.ROOT / name).read_text("utf-8") == text, "run `python -m qa summary`"


def test_check_reports_a_stale_page(monkeypatch, tmp_path, capsys) -> None:
    """`--check` writes nothing; without it the page is written, and then it is current."""
    monkeypatch.setattr(summary, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "pages", lambda: {"PAGE.md": "new\n"})
    (tmp_path / "PAGE.md").write_text("old\n", "utf-8")
    for words, code, after in (
        (["--check"], 1, "old\n"),
        ([], 0, "new\n"),
        (["--check"], 0, "new\n"),
    ):
        with pytest.raises(SystemExit) as leaving:
            main.main(["summary", *words])
        assert (leaving.value.code, (tmp_path / "PAGE.md").read_text("utf-8")) == (code, after)
    assert "stale: PAGE.md" in capsys.readouterr().out


def test_new_results_renew_the_pages(monkeypatch, tmp_path) -> None:
    """What `--write` puts among the results does; a document elsewhere changes no page."""
    monkeypatch.setattr(summary, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(summary, "pages", lambda: {"PAGE.md": "new\n"})
    summary.written(tmp_path / "elsewhere" / "reliability.md")
    assert not (tmp_path / "PAGE.md").exists()
    summary.written(tmp_path / "results" / "reliability.md")
    assert (tmp_path / "PAGE.md").read_text("utf-8") == "new\n"


def test_figures_are_written_and_printed(monkeypatch, tmp_path, capsys) -> None:
    """As a document or as JSON; results renew the pages, and no file is written without a path."""
    monkeypatch.setattr(summary, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    monkeypatch.setattr(summary, "pages", lambda: {"PAGE.md": "new\n"})
    figures = [Figure("Loop", "greedy", "1 x")]
    summary.report(figures, None, as_json=True)
    assert json.loads(capsys.readouterr().out) == [dataclasses.asdict(figures[0])]
    assert not [*tmp_path.iterdir()]
    summary.report(figures, tmp_path / "figures.md", as_json=False)
    assert capsys.readouterr().out == (tmp_path / "figures.md").read_text("utf-8")
    assert {each.name for each in tmp_path.iterdir()} == {"figures.md", "figures.json", "PAGE.md"}


def test_a_missed_target_is_always_listed() -> None:
    """A row has the number of missed figures; a figure without a claim is listed as well."""
    measured = "2026-11-24, a machine, `python -m qa bench loop`"
    good = Figure("Loop", "greedy, 1", "0.9 [0.8, 1.0] x", "<= 1", True, "C: 1", measured=measured)
    bad = dataclasses.replace(good, name="greedy, 8", value="1.2 [1.1, 1.3] x", met=False)
    other = dataclasses.replace(bad, group="Other", name="slow")
    page = summary.benchmarks([good, bad, other], [CLAIM])
    row = next(line for line in page.splitlines() if line.startswith("| Fast"))
    assert "0.9 [0.8, 1.0] x to 1.2 [1.1, 1.3] x" in row
    assert "**1 of 2 missed**" in row
    assert "2026-11-24: `python -m qa bench loop`" in row
    assert "| C: 1 |" in row, "the limit of both"
    apart = summary.benchmarks([good, dataclasses.replace(bad, limit="C: 2")], [CLAIM])
    assert "C: 1" not in apart.partition("## Missed targets")[0], "a limit of one of two settings"
    missed = page.partition("## Missed targets")[2]
    assert "Loop: greedy, 8" in missed
    assert "Other: slow" in missed
    assert "greedy, 1" not in missed


def test_a_claim_can_have_several_groups() -> None:
    """The row has the command of each. Equal numbers are no range."""
    lost = Figure("Loop 1", "greedy", "0 of 9 lost", "0", True, measured="2026-11-24, a, `x`")
    more = dataclasses.replace(
        lost, group="Loop 2", value="0 of 3 lost", measured="2026-11-23, a, `y`"
    )
    other = dataclasses.replace(lost, group="Loop 3 more", value="5 lost")
    page = summary.benchmarks([lost, more, other], [summary.Claim("Fast", r"Loop \d", "greedy")])
    row = next(line for line in page.splitlines() if line.startswith("| Fast"))
    assert "| 0 of 3 lost; 0 of 9 lost | 0 (met) |" in row
    assert row.endswith("| 2026-11-23: `y`; 2026-11-24: `x` |")


def test_a_claim_needs_a_figure() -> None:
    """A claim whose figures were renamed or lost their target is an error, not an empty row."""
    for lacking in ([], [Figure("Loop", "greedy", "1 x")]):
        with pytest.raises(UsageError, match="no figure with a target supports 'Fast'"):
            summary.benchmarks(lacking, [CLAIM])


def test_defects_and_undecided_entries_are_open() -> None:
    """A defect is counted and named; an entry that proves nothing is named as well."""
    entries = [
        Entry("leaks", "good", {"operations": "1,000"}, measured="2026-11-24, a, `x`"),
        Entry("leaks", "bad", {"operations": "10"}, ("it leaks",), measured="2026-11-23, a, `y`"),
        Entry("leaks", "short", {"operations": "1"}, skip_reason="too few", measured=""),
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
