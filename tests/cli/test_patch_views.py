"""Test that reports of drift fit on a screen, for any text of a patch or a release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyllamakv.cli import patch_views
from pyllamakv.patching.drift import Drift, HunkDrift
from pyllamakv.patching.rename_detection import Successor
from pyllamakv.patching.status import PatchStatus, State
from pyllamakv.patching.strict_apply import Placement

LONG = "static std::vector<std::unique_ptr<llama_kv_cache_context>> llama_kv_cache::find_slot"


def hunk(number: int, state: str = "exact", **more: object) -> HunkDrift:
    """Return the drift of a hunk; one that fails was changed between two releases."""
    facts = {"offset": 0 if state == "exact" else None, "expected": "", "found": ""} | more
    place = Placement("src/llama-kv-cache.cpp", number, 10 * number, state, **facts)  # type: ignore[arg-type]
    good = state in ("exact", "offset")
    changed = {} if good else {"changed_in": "b11549", "changed_after": "0.3.36"}
    return HunkDrift(place, LONG, **changed)


def patch(id_: str, state: State, *hunks: HunkDrift) -> Drift:
    """Return the drift of a patch."""
    return Drift("b11549", id_, state, "0.3.36", hunks, "requires something; and more")


def printed(
    capsys: pytest.CaptureFixture[str], *found: Drift, named: tuple[str, ...] = ()
) -> list[str]:
    """Return the lines of a report, and check that they fit on a screen."""
    capsys.readouterr()
    patch_views.drift(found, named)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines), default=0) <= 80
    return lines


def test_drift_view_lists_patches_before_failing_hunks(capsys: pytest.CaptureFixture[str]) -> None:
    """Patches come first, then failing hunks with the releases that changed them."""
    lines = printed(
        capsys,
        patch("one", "offset", hunk(1), hunk(2, "offset", offset=3), hunk(3, "offset", offset=-2)),
        patch("fix", "manual", hunk(1), hunk(2, "conflict")),
        patch("next", "blocked"),
        patch("old", "not-applicable", hunk(1, "conflict")),
    )
    assert lines == [
        "one  offset  port 0.3.36, 3 hunks, 2 moved by -2 to +3",
        "fix  manual  port 0.3.36, 1 of 2 hunks fail",
        "next blocked requires something",
        "1 patch for other releases",
        "fix, port 0.3.36",
        "  src/llama-kv-cache.cpp#2 llama_kv_cache::find_slot: conflict",
        "    changed between 0.3.36 and b11549",
        "-v shows each hunk",
    ]


@pytest.mark.parametrize(
    ("offsets", "text"),
    [([5], "1, 1 moved by +5 lines"), ([0, -2, 3], "3, 2 moved by -2 to +3 lines")],
)
def test_equal_offsets_are_one_number(offsets: list[int], text: str) -> None:
    """The column of hunks states a range only if the offsets differ."""
    places = [SimpleNamespace(offset=offset) for offset in offsets]
    status: Any = SimpleNamespace(
        best=SimpleNamespace(placements=places), state="offset", good=True
    )
    assert patch_views._summary(status) == text


def test_view_of_exact_patches_has_no_hunk_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A named patch of other releases has its reason; nothing else is shown."""
    one, other = patch("one", "applies", hunk(1)), patch("two", "not-applicable")
    assert printed(capsys, one, other, named=("two",)) == [
        "one applies port 0.3.36, 1 hunk",
        "two not-applicable requires something",
    ]


def test_long_view_is_cut_with_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Failing patches come first; omitted lines are counted."""
    fails = patch("fails", "manual", *(hunk(number, "conflict") for number in range(40)))
    many = [patch(f"patch-{number}", "applies", hunk(1)) for number in range(30)]
    lines = printed(capsys, *many, fails)
    assert lines[0].startswith("fails ")
    assert lines[-1] == f"{31 + 1 + 80 - 21} more lines; -v shows each hunk"
    lines = printed(capsys, *many[:3], fails)
    assert lines[4] == "fails, port 0.3.36"
    patch_views.drift([fails], verbose=True)
    assert len(capsys.readouterr().out.splitlines()) == 41


def test_missing_file_is_named_once_with_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    """It is listed once, with the file that has its code now."""
    one = hunk(1, "missing")
    moved = (Successor("src/llama-memory.cpp", 0.61),)
    gone = [HunkDrift(one.placement, one.function, None, moved=moved), hunk(2, "missing")]
    lines = printed(capsys, patch("one", "manual", *gone))
    assert lines[2:4] == [
        "  src/llama-kv-cache.cpp: the file does not exist",
        "    similar lines are in src/llama-memory.cpp (61%)",
    ]
    assert len(lines) == 5


def test_view_escapes_control_characters_and_cuts_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Markup and control characters are escaped, and long lines are truncated."""
    found = "[bold]\x1b[2J " + "x" * 200
    bad = hunk(1, "already", found=found, expected="old")
    lines = printed(capsys, patch("a" * 60, "manual", bad))
    assert lines[0].startswith("a" * 29 + "… manual  port 0.3.36, 1 of 1 hunk fail")
    assert "    found [bold]\\x1b[2J xxx" in lines[3]
    assert lines[3].endswith("…")


def test_release_without_an_applicable_patch_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """A release without a patch has a line, and so have the patches of no release."""
    patch_views.status(
        [
            PatchStatus("b1", "one", "applies"),
            PatchStatus("b1", "two", "not-applicable"),
            PatchStatus("path:half", "one", "not-applicable"),
            PatchStatus("path:half", "two", "not-applicable"),
        ]
    )
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        "b1 applies one",
        "path:half not-applicable all patches; -v shows the reasons",
        "no part of these releases: two; -v shows the reasons",
    ]
