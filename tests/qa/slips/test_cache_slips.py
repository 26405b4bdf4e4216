"""Test that slips in the cache managers apply to their modules, and are tested in a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllamakv.errors import HarnessError, PatchFormatError
from pyllamakv.home import checkout
from qa import slips
from qa.entry import StressOptions
from qa.slips import cache_slips
from qa.slips.cache_slips import CacheSlip


def test_the_slips_apply_to_the_managers() -> None:
    """The text of each occurs once, and the changed module compiles."""
    root = checkout()
    assert root is not None
    modules = cache_slips.modules(root)
    shipped = cache_slips.load()
    assert len(shipped) >= 60
    for slip in shipped:
        assert (root / "tests" / "cache" / f"test_{slip.first}.py").is_file()
        name, text = slip.apply(modules)
        assert text != modules[name]
        compile(text, name, "exec")


@pytest.mark.parametrize(("was", "places"), [("b", "no module"), ("aa", r"f.py \(2\)")])
def test_a_slip_of_the_managers_must_match_once(was: str, places: str) -> None:
    """A missing or repeated text raises an error that names the modules."""
    slip = CacheSlip("off", "eviction", "lost pin", was, "")
    with pytest.raises(HarnessError, match=f"found it in {places}"):
        slip.apply({"f.py": "aa aa"})
    assert slip.apply({"f.py": f"x{was}y", "g.py": "x"}) == ("f.py", "xy")


def test_a_slip_of_the_managers_is_defined_once(tmp_path: Path) -> None:
    """Two slips with the same id are an error."""
    path = tmp_path / "slips.toml"
    slip = '\n[[slip]]\nid = "off"\nfirst = "eviction"\nkind = "lost pin"\nwas = "a"\n'
    path.write_text("schema = 1\n" + slip, "utf-8")
    assert cache_slips.load(path) == (CacheSlip("off", "eviction", "lost pin", "a", ""),)
    path.write_text("schema = 1\n" + 2 * slip, "utf-8")
    with pytest.raises(PatchFormatError, match="off is defined twice"):
        cache_slips.load(path)


@pytest.mark.slow
def test_a_slip_is_detected_and_a_comment_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed import does not count, and the copy is restored after each slip."""
    pinned = next(slip for slip in cache_slips.load() if slip.id == "pinned-branch-is-dropped")
    comment = CacheSlip(
        "comment", "eviction", "none", pinned.was, pinned.was + "  # nothing changes"
    )
    unknown = CacheSlip("unknown", "eviction", "none", pinned.was, pinned.was + "\nUNKNOWN_NAME\n")
    monkeypatch.setattr(cache_slips, "load", lambda: (pinned, comment, unknown))

    def one_file(copy: cache_slips.ManagersCopy, _first: str = "") -> tuple[str, str]:
        # All files take 40 s, and run twice here: for the copy, and for the comment.
        return copy._run_files([copy.root / "tests" / "cache" / "test_allocation.py"])

    monkeypatch.setattr(cache_slips.ManagersCopy, "_run_tests", one_file)
    effort = StressOptions(seconds=600.0, only=(slips.MANAGERS,))
    (entry,) = slips.entries(effort, lambda _: None)
    assert entry.row["caught"] == "1 of 3"
    assert entry.row["by quick tests"] == "1"
    undetected, broken = sorted(entry.defects)
    assert undetected == "none: comment is not detected"
    assert broken == "none: unknown does not compile"


def test_tests_that_fail_without_a_slip_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not detect any slip."""
    failed = ("tests/cache/test_x.py::test_y", "it fails")
    monkeypatch.setattr(cache_slips.ManagersCopy, "_run_tests", lambda *_: failed)
    with pytest.raises(HarnessError, match="test_y fails without a slip: it fails"):
        cache_slips.ManagersCopy()
