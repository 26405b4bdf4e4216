"""Hand-written slips apply to the patched releases, and an undetected one is a defect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mutation_kit import some

from pyllamakv.errors import HarnessError, PatchFormatError
from pyllamakv.patching import apply, series
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store
from qa import semantic_mutation
from qa.entry import StressOptions
from qa.mutation.mutant_results import MutantResult

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
    found = dict.fromkeys(name.split()[0] for name in semantic_mutation.names())
    store = open_store()
    return [name for name in found if store.has(spec_resolver.resolve(name))]


@pytest.mark.slow
def test_the_shipped_slips_apply() -> None:
    """The text of every slip occurs once in the patch's files of each fetched release."""
    slips = semantic_mutation.load()
    assert len({(each.patch, each.id) for each in slips}) >= 60
    shipped, tried = series.load(), 0
    for release in fetched():
        patched = apply.apply(spec_resolver.resolve(release), series=shipped)
        for slip in (each for each in slips if release in each.releases):
            mutant = slip.apply(semantic_mutation.patched_files(patched, slip.patch))
            assert mutant.files[mutant.file]
            tried += 1
    assert tried


@pytest.mark.parametrize(("text", "places"), [("b", "no file"), ("aa", r"f \(2\)")])
def test_a_slip_must_match_once(text: str, places: str) -> None:
    """A slip whose text is missing or ambiguous raises an error that names the files."""
    slip = semantic_mutation.Slip("off", "p", "lost hunk", ("0.3.9",), "a", "")
    with pytest.raises(HarnessError, match=f"found it in {places}"):
        slip.apply({"f": text.encode()})
    mutant = slip.apply({"f": b"x\nya\n", "g": b"x"})
    assert (mutant.file, mutant.line, mutant.files) == ("f", 2, {"f": b"x\ny\n"})


def test_a_slip_is_defined_once(tmp_path: Path) -> None:
    """The same slip twice on a release is an error; on two releases it is not."""
    path = tmp_path / "slips.toml"
    path.write_text("schema = 1\n" + SLIP + SLIP.replace("0.3.9", "0.3.12"), "utf-8")
    assert len(semantic_mutation.load(path)) == 2
    path.write_text("schema = 1\n" + SLIP + SLIP, "utf-8")
    with pytest.raises(PatchFormatError, match=r"0\.3\.9 p off is defined twice"):
        semantic_mutation.load(path)


class Evaluator:
    """Return given results by the mutated text, as a `MutantEvaluator` does."""

    def __init__(self, results: dict[str, str]) -> None:
        self.results = results
        self.own: tuple[str, ...] = ()
        self.asked: list[str] = []

    def recall(self, mutant: Any) -> MutantResult | None:
        """Return no stored result."""
        return None

    def answer(self, mutant: Any, deadline: float) -> MutantResult:
        """Return the given result."""
        self.asked.append(mutant.now)
        return MutantResult(self.results[mutant.now], "fragmented")


@pytest.mark.parametrize(
    ("outcome", "defect"),
    [
        ("scenario", ""),
        ("driver", ""),
        ("survivor", "is not detected"),
        ("compiler", "does not compile"),
        ("same code", "changes no code"),
        ("unfinished", "unfinished"),
    ],
)
def test_a_slip_must_be_detected_by_a_test(
    monkeypatch: pytest.MonkeyPatch, outcome: str, defect: str
) -> None:
    """Header tests and scenarios detect a slip; the compiler does not count."""
    evaluator = Evaluator({"y": outcome})
    results = semantic_mutation.run([some("y")], evaluator, float("inf"), lambda _: None)  # type: ignore[arg-type]
    entry = semantic_mutation.entry_of("0.3.9 p", results, 1)
    assert entry.row["caught"] == f"{int(not defect)} of 1"
    assert [defect in each for each in entry.defects] == ([True] if defect else [])


def test_the_time_limit_leaves_a_minimum() -> None:
    """After the deadline, `LEAST` slips run all the same, and the row counts only these."""
    evaluator = Evaluator(dict.fromkeys("abcd", "scenario"))
    results = semantic_mutation.run(
        [some(name) for name in "abcd"],
        evaluator,  # type: ignore[arg-type]
        0.0,
        lambda _: None,
    )
    assert evaluator.asked == ["a"]
    assert semantic_mutation.entry_of("0.3.9 p", results, 1).row["tried"] == "1"


@pytest.mark.parametrize(
    ("seconds", "built", "why"), [(90.0, True, "a short run"), (3600.0, False, "is not built")]
)
def test_other_releases_need_time_and_a_build(
    monkeypatch: pytest.MonkeyPatch, seconds: float, built: bool, why: str
) -> None:
    """A short run skips them, and so does a long one without their build."""
    slip = semantic_mutation.Slip("off", "p", "lost hunk", ("0.3.12",), "a", "")
    monkeypatch.setattr(semantic_mutation, "load", lambda: (slip,))
    monkeypatch.setattr(semantic_mutation.variant, "find", lambda _: built or None)
    (entry,) = semantic_mutation.entries(StressOptions(seconds=seconds), lambda _: None)
    assert entry.name == "0.3.12 p" and not entry.ran and why in entry.skip_reason
