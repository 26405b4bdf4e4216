"""Test that slips apply to the patched releases, and an undetected one is a defect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyllamakv.building import variant
from pyllamakv.errors import HarnessError, PatchFormatError
from pyllamakv.patching import apply, series
from pyllamakv.server import server_patches
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import discovery
from qa import slips
from qa.entry import StressOptions

SLIP = """
[[slip]]
id = "off"
patch = "p"
kind = "lost hunk"
releases = ["0.3.9"]
was = "a"
"""


def fetched() -> list[str]:
    """Return the releases with slips whose sources are in the data directory."""
    found = dict.fromkeys(release for slip in slips.load() for release in slip.releases)
    store = open_store()
    return [name for name in found if store.has(spec_resolver.resolve(name))]


@pytest.mark.slow
def test_shipped_slips_apply_to_each_release() -> None:
    """The text of every slip occurs once in the patch's files of each fetched release."""
    shipped_slips = slips.load()
    assert len({(slip.patch, slip.id) for slip in shipped_slips}) >= 60
    shipped, tried = series.load(), 0
    server = {patch.id for patch in shipped.server}
    for release in fetched():
        known = spec_resolver.resolve(release)
        patched = apply.apply(known, series=shipped)
        for slip in (one for one in shipped_slips if release in one.releases):
            if slip.patch in server:
                sources = server_patches.choose(known, None, series=shipped)
                files = slips.server_files(sources, slip.patch)
            else:
                files = slips.patched_files(patched, slip.patch)
            path, data = slip.apply(files)
            assert path and data
            tried += 1
    assert tried


@pytest.mark.parametrize(("text", "places"), [("b", "no file"), ("aa", r"f \(2\)")])
def test_a_slip_must_match_once(text: str, places: str) -> None:
    """A missing or ambiguous text raises an error that names the files."""
    slip = slips.Slip("off", "p", "lost hunk", ("0.3.9",), "a", "")
    with pytest.raises(HarnessError, match=f"found it in {places}"):
        slip.apply({"f": text.encode()})
    assert slip.apply({"f": b"x\nya\n", "g": b"x"}) == ("f", b"x\ny\n")


def test_a_slip_is_defined_once(tmp_path: Path) -> None:
    """The same slip twice on a release is an error; on two releases it is not."""
    path = tmp_path / "slips.toml"
    path.write_text("schema = 1\n" + SLIP + SLIP.replace("0.3.9", "0.3.12"), "utf-8")
    assert len(slips.load(path)) == 2
    path.write_text("schema = 1\n" + SLIP + SLIP, "utf-8")
    with pytest.raises(PatchFormatError, match=r"0\.3\.9 p off is defined twice"):
        slips.load(path)


class FakeTester:
    """Return predefined results by the slip's id, like `SlipTester`."""

    def __init__(self, results: dict[str, str]) -> None:
        self.results = results
        self.asked: list[str] = []

    def test(self, slip: slips.Slip) -> slips.SlipResult:
        """Return the predefined result."""
        self.asked.append(slip.id)
        return slips.SlipResult(self.results[slip.id], "fragmented")


def slip_named(name: str) -> slips.Slip:
    """Return a slip of a generated patch."""
    return slips.Slip(name, "p", "bound", ("0.3.9",), "x", "y")


@pytest.mark.parametrize(
    ("outcome", "caught"),
    [(slips.SCENARIO, 1), (slips.HEADER_TEST, 1), (slips.UNDETECTED, 0), (slips.COMPILER, 0)],
)
def test_a_slip_that_no_test_catches_is_a_defect(outcome: str, caught: int) -> None:
    """Header tests and scenarios detect a slip; a compile error does not count."""
    tester: Any = FakeTester({"y": outcome})
    results = slips.run([slip_named("y")], tester, float("inf"), lambda _: None)
    entry = slips.entry_of("0.3.9 p", results, 1)
    assert entry.row["caught"] == f"{caught} of 1"
    assert [outcome in defect for defect in entry.defects] == [True] * (1 - caught)


def test_after_the_deadline_a_minimum_of_slips_runs() -> None:
    """The row counts only these."""
    tester: Any = FakeTester(dict.fromkeys("abcd", slips.SCENARIO))
    results = slips.run([slip_named(name) for name in "abcd"], tester, 0.0, lambda _: None)
    assert tester.asked == ["a"]
    assert slips.entry_of("0.3.9 p", results, 1).row["tried"] == "1"


@pytest.mark.native
@pytest.mark.slow
def test_the_patched_tree_with_a_slip_is_built_and_run(
    patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip fails its scenario, a comment passes it, and an error stops the compiler."""
    catalogue = discovery.discover()
    monkeypatch.setattr(
        slips.discovery, "discover", lambda: {"fragmented": catalogue["fragmented"]}
    )
    tester = slips.SlipTester(patched.manifest.release, series.load())
    slip = next(one for one in slips.load() if one.id == "free-cells-counted-in-the-used-part")
    built = {one.folder for one in variant.all_built()}
    found = tester.test(slip)
    assert (found.outcome, found.by) == (slips.SCENARIO, "fragmented")
    comment = replace(slip, now=slip.was + "// nothing changes\n")
    assert tester.test(comment).outcome == slips.UNDETECTED
    found = tester.test(replace(slip, now=slip.was + "\n#error slip\n"))
    assert found.outcome == slips.COMPILER and "slip" in found.message
    assert {one.folder for one in variant.all_built()} == built, "builds of slips are removed"


@pytest.mark.parametrize(
    ("seconds", "built", "why"), [(90.0, True, "a short run"), (3600.0, False, "is not built")]
)
def test_slips_of_other_releases_require_time_and_a_build(
    monkeypatch: pytest.MonkeyPatch, seconds: float, built: bool, why: str
) -> None:
    """A short run skips them, and so does a long one without their build."""
    slip = slips.Slip("off", "p", "lost hunk", ("0.3.12",), "a", "")
    monkeypatch.setattr(slips, "load", lambda: (slip,))
    monkeypatch.setattr(slips.variant, "find", lambda _: built or None)
    managers = slips.skipped_entry(slips.SECTION, slips.MANAGERS, "not tested here")
    monkeypatch.setattr(slips, "_managers", lambda *_: managers)
    _, entry = slips.entries(StressOptions(seconds=seconds), lambda _: None)
    assert entry.name == "0.3.12 p" and not entry.ran and why in entry.skip_reason
