"""Test that the report of a watch has tables, branches and conflicts, and escapes markup."""

from __future__ import annotations

from fakes import cell_results

from pyllamakv.errors import BranchRefused
from pyllamakv.patching.conflict_report import HunkConflict, UncarriedPatch
from pyllamakv.patching.status import PatchStatus
from pyllamakv.verification import expected, watch_report
from pyllamakv.verification.release_watch import FollowedRelease
from pyllamakv.verification.review_branch import ReviewBranch

FEW = HunkConflict("src/a.cpp", 4, "find", 120, ("new;",), ("old;",), ("mine;",), "b1", "b2")
MANY = HunkConflict("src/<b>.cpp", 0, "", 7, ("x\x1b", "````", *["y"] * 40), (), (), "0.3.36", "b2")


def report(*followed: FollowedRelease, warnings: tuple[str, ...] = ()) -> str:
    """Return the report of releases without accepted verdicts."""
    results = [result for each in followed for result in each.results]
    return watch_report.markdown(followed, expected.compare(results, {}), warnings)


def test_report_lists_branch_files_and_notes() -> None:
    """The table has the verdict; the branch is listed with its files and notes for the review."""
    result = cell_results.result("b2", carried={"fix": "0.3.36"})
    branch = ReviewBranch("watch/b2", "1" * 40, ("patches/fix/b2.patch",), ("look at <it>",))
    text = report(FollowedRelease("b2", (result,), branch=branch), warnings=("npm: *no* answer",))
    assert text.startswith("# New releases of llama.cpp\n\nWarning: npm: \\*no\\* answer\n")
    assert "| b2 | unified | cpu | needed (1 carried) |" in text
    wanted = """\
## b2

For review: branch `watch/b2`, which changes:

- `patches/fix/b2.patch`
- note: look at \\<it\\>

Carried: fix from 0.3.36.
"""
    assert text.endswith(wanted)


def test_report_shows_both_sides_of_a_conflict() -> None:
    """Each conflict has its place, the releases, and both sides in a block of plain text."""
    result = cell_results.result("b2", "broken-apply", reason="no port applies")
    patch = UncarriedPatch("fix", "manual", "0.3.36", "a conflict", (FEW, MANY))
    blocked = UncarriedPatch("next", "blocked", "", "requires fix")
    text = report(FollowedRelease("b2", (result,), (patch, blocked)))
    assert "| broken-apply |" in text
    assert "worse: expected" not in text, "the conflicts say it"
    wanted = """\
### fix requires manual work

Port `0.3.36` was tried.

src/a.cpp, hunk 4 in find, line 120: changed between b1 and b2.

```text
port base:
    old;
release:
    new;
patch:
    mine;
```

src/\\<b\\>.cpp, line 7: changed between 0.3.36 and b2.

`````text
port base:
release:
    x\\x1b
    ````
"""
    assert wanted in text
    assert f"    ({42 - watch_report.SHOWN_LINES} more lines)\n" in text
    assert text.endswith("### next requires manual work\n\nrequires fix.\n")


def test_report_names_contained_patches_with_the_advice() -> None:
    """The advice to drop a patch has the commit that contains it; also with a good verdict."""
    patch = PatchStatus("b2", "fix", "contained", reason="b2 has it: drop it; it is in 12 (<a>)")
    text = report(FollowedRelease("b2", (cell_results.result("b2"),), contained=(patch,)))
    assert text.endswith("### fix is contained\n\nb2 has it: drop it; it is in 12 (\\<a\\>).\n")


def test_report_of_a_failed_release_has_the_reason() -> None:
    """The reason is reported; without results there is no table."""
    text = report(FollowedRelease("0.3.39", error=BranchRefused("branch x has\ncommits")))
    assert "|" not in text
    assert text.endswith("## 0.3.39\n\nNot completed: branch x has commits\n")


def test_report_of_a_broken_carry_has_the_compiler_error() -> None:
    """The report has the first compiler error."""
    reason = "carried fix from 0.3.36: src/a.cpp:7: error: no member 'head'"
    result = cell_results.result("b2", "broken-carry", reason=reason, carried={"fix": "0.3.36"})
    text = report(FollowedRelease("b2", (result,)))
    assert f"b2: worse: expected a good verdict, found broken-carry: {reason}\n" in text
