"""Test accepted verdicts: regressions, improvements, and their file."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.cell_results import result, row

from pyllamakv.errors import UsageError
from pyllamakv.source import lockfile, verified
from pyllamakv.verification.cell import CellSpec
from pyllamakv.verification.expected import Accepted, accept, compare, load, name_of

NAME = "0.3.9+patched cpu"


def outcome(verdict: str, accepted: Accepted | None, *rows) -> str:
    more = {"scenarios": rows} if rows else {"scenarios": ()}
    table = {NAME: accepted} if accepted else {}
    return compare([result(verdict=verdict, **more)], table)[0].outcome


@pytest.mark.parametrize(
    ("found", "accepted", "says"),
    [
        ("needed", "needed", "same"),
        ("redundant", "needed", "changed"),
        ("native", "redundant", "changed"),
        ("needed", None, "new"),
        ("ineffective", None, "worse"),
        ("untestable", "needed", "worse"),
        ("untestable", None, "worse"),
        ("untestable", "untestable", "same"),
        ("needed", "untestable", "better"),
        ("broken-apply", "broken-apply", "same"),
        ("ineffective", "broken-apply", "worse"),
        ("broken-apply", "ineffective", "better"),
        ("harmful", "ineffective", "worse"),
        ("native", "broken-apply", "better"),
    ],
)
def test_verdicts_are_ranked(found: str, accepted: str | None, says: str) -> None:
    """A worse verdict is a regression, a better one is reported, an equal one is a change."""
    assert outcome(found, Accepted(accepted) if accepted else None) == says


def test_accepted_failure_covers_no_other_scenario() -> None:
    """An accepted failure does not cover another one."""
    bad = row("many-moves", "ineffective")
    known = Accepted("ineffective", {"many-moves": "ineffective"})
    assert outcome("ineffective", known, row(), bad) == "same"
    assert outcome("ineffective", known, row(), row("many-moves")) == "better"
    assert outcome("ineffective", known, row("story", "ineffective"), bad) == "worse"
    assert outcome("ineffective", known, row("many-moves", "harmful")) == "worse"
    assert outcome("needed", Accepted("needed"), row(verdict="untestable")) == "same"


def test_regression_line_names_cell_verdicts_and_reason() -> None:
    """The line names the cell, both verdicts and the reason."""
    one = compare([result(verdict="ineffective", scenarios=(row("x", "ineffective"),))], {})[0]
    assert one.regression
    assert str(one).startswith("0.3.9: worse: expected a good verdict, found ineffective: ")


def test_accepted_verdicts_are_written_and_read_back(tmp_path: Path) -> None:
    """Cells are added and changed in place; comments and other cells are kept."""
    path = tmp_path / "expected.toml"
    bad = result("0.3.6", "ineffective", scenarios=(row("many-moves", "ineffective"), row()))
    cuda = result(spec=CellSpec("0.3.9", backend="cuda"))
    alone = result(spec=CellSpec("0.3.9", isolate="full-defrag"))
    assert accept([result(), bad, cuda, alone], path)[1] == "0.3.6: ineffective"
    assert load(path) == {
        NAME: Accepted("needed"),
        "0.3.6+patched cpu": Accepted("ineffective", {"many-moves": "ineffective"}),
        "0.3.9+patched cuda": Accepted("needed"),
        "0.3.9+full-defrag cpu": Accepted("needed"),
    }
    path.write_text(path.read_text().replace("[[cell]]", "# ours\n[[cell]]", 1))
    healed = result("0.3.6", "needed", scenarios=())
    assert accept([result(), healed], path) == ["0.3.6: needed (was ineffective)"]
    assert load(path)["0.3.6+patched cpu"] == Accepted("needed")
    assert "# ours" in path.read_text()
    assert len(load(path)) == 4
    before = path.read_text()
    assert accept([result()], path) == []
    assert path.read_text() == before


def test_accepted_result_is_as_expected(tmp_path: Path) -> None:
    """An accepted result, and no other, is as expected."""
    path = tmp_path / "expected.toml"
    bad = result(verdict="harmful", scenarios=(row("a", "harmful"), row("b", "ineffective")))
    accept([bad], path)
    assert compare([bad], load(path))[0].outcome == "same"


def test_portable_builds_are_accepted_with_tuned_ones() -> None:
    """CI verifies portable builds with the same file."""
    assert name_of(CellSpec("0.3.9", native=False)) == name_of(CellSpec("0.3.9")) == NAME


def test_accept_without_a_checkout_writes_to_the_data_directory(
    monkeypatch, tmp_path: Path
) -> None:
    """Without a checkout, the file of the data directory extends the shipped one."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(verified.home, "checkout", lambda: None)
    monkeypatch.setattr(verified, "shipped", lambda: tmp_path / "shipped.toml")
    accept([result(), result("0.3.6", "ineffective", scenarios=())], tmp_path / "shipped.toml")
    accept([result("0.3.6", "needed", scenarios=())])
    assert (tmp_path / "home" / "expected.toml").is_file()
    assert {name: one.verdict for name, one in load().items()} == {
        NAME: "needed",
        "0.3.6+patched cpu": "needed",
    }


@pytest.mark.parametrize(
    "text",
    [
        "schema = 2",
        "schema = 1\ncell = 3",
        "schema = 1\n[[cell]]\nrelease = '0.3.9'",
        "schema = 1\n[[cell]]\nrelease = '0.3.9'\nverdict = 'splendid'",
        "schema = 1\n[[cell]]\nrelease = '0.3.9'\nverdict = 'needed'\nbad = 3",
        "schema =",
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file."""
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"expected\.toml"):
        load(path)


def test_the_shipped_file_can_be_read() -> None:
    """Every verdict in it is known, and every release is in the lock."""
    for name in load(verified.shipped()):
        assert name.partition("+")[0] in lockfile.known()
