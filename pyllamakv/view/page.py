"""Write the matrix as one self-contained HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.patching.drift import changed_text
from pyllamakv.scenarios import cell_picture
from pyllamakv.scenarios.frames import Timeline
from pyllamakv.verification.verdict import GOOD, Verdict
from pyllamakv.view import cell_drawing, drawing, timeline_drawing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.verification.cell import CellResult, FailedRun
    from pyllamakv.verification.expected import Comparison
    from pyllamakv.verification.release_watch import FollowedRelease

TEMPLATE = Path(__file__).with_name("page.html.j2")

#: Columns of a cell map: wide enough to see, narrow enough for a phone.
_COLUMNS = 32

#: Meanings of the verdicts, in the order in which people read them.
WORDS = {
    Verdict.NEEDED: "stock fails, patched passes",
    Verdict.WORKS: "patched has a feature that stock lacks",
    Verdict.REDUNDANT: "the patch applies, stock passes every fix scenario",
    Verdict.HARMLESS: "the patch claims nothing and changes no outcome",
    Verdict.NATIVE: "no port applies, stock passes every fix scenario",
    Verdict.INEFFECTIVE: "patched still fails what stock fails",
    Verdict.HARMFUL: "patched fails in a way that stock does not",
    Verdict.BROKEN_APPLY: "no port applies, and stock fails: a port is due",
    Verdict.BROKEN_BUILD: "the patched tree does not build",
    Verdict.BROKEN_CARRY: "a patch that was merged from another release fails",
    Verdict.UNTESTABLE: "cannot be verified here",
}


@dataclass(frozen=True)
class CellSection:
    """One cell as the page shows it."""

    result: CellResult
    compared: Comparison
    anchor: str
    failing: tuple[tuple[FailedRun, list[str]], ...]
    maps: tuple[tuple[str, str], ...]
    timelines: tuple[tuple[str, str], ...]
    #: Drift of the patches that concern the release: applied ones first, then failing ones.
    drift: tuple[dict[str, Any], ...]
    #: Drift of the patches that are for other releases.
    others: tuple[dict[str, Any], ...]

    @property
    def tone(self) -> str:
        """Return the class of the verdict's colour."""
        return css_class(self.result.verdict)


def render(
    results: Sequence[CellResult],
    compared: Sequence[Comparison],
    followed: Sequence[FollowedRelease] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Return the page for results and their comparison with accepted verdicts.

    ``followed`` are the releases of a watch, and ``warnings`` those about the indexes.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    pairs = zip(results, compared, strict=True)
    parts = [_part(number, *pair) for number, pair in enumerate(pairs, 1)]
    verdicts = [result.verdict for result in results]
    return template.render(
        parts=parts,
        followed=followed,
        warnings=warnings,
        counts=[
            (str(word), verdicts.count(word), css_class(word)) for word in WORDS if word in verdicts
        ],
        words=[(str(word), meaning, css_class(word)) for word, meaning in WORDS.items()],
        regressions=[one for one in compared if one.regression],
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tone=css_class,
        colours=drawing.style(),
    )


def css_class(verdict: str) -> str:
    """Return the CSS class for the word of a verdict: good, idle, bad or dim."""
    if verdict in ("needed", "holds", "works"):
        return "good"
    if verdict in GOOD or verdict == "unchanged":
        return "idle"
    return "dim" if verdict == Verdict.UNTESTABLE else "bad"


def _part(number: int, result: CellResult, compared: Comparison) -> CellSection:
    drift = sorted(_drift(result), key=lambda one: one["patch"] not in result.patches)
    others = tuple(one for one in drift if one["state"] == "not-applicable")
    return CellSection(
        result,
        compared,
        f"cell-{number}",
        tuple(_failing(result)),
        tuple(_maps(result)),
        tuple(_timelines(result)),
        tuple(one for one in drift if one not in others),
        others,
    )


def _failing(result: CellResult) -> Iterable[tuple[FailedRun, list[str]]]:
    """Yield what patched fails, by scenario and class: the first run, and all the settings."""
    found: dict[tuple[str, str], list[FailedRun]] = {}
    for run in result.failing:
        found.setdefault((run.scenario, run.failure), []).append(run)
    return ((runs[0], [run.setting for run in runs]) for runs in found.values())


def _maps(result: CellResult) -> Iterable[tuple[str, str]]:
    """Yield caption and map of each picture; the caption is text, so that it can wrap."""
    for raw in result.pictures:
        picture = cell_picture.Picture.from_json(raw)
        label = f"{raw['side']}, {picture.label}" if picture.label else str(raw["side"])
        named = cell_picture.Picture(label, picture.owner)
        step, _ = named.scaled(_COLUMNS * _COLUMNS)
        more = f", {step} cells to a place" if step > 1 else ""
        made = cell_drawing.paint(named, _COLUMNS, caption=False)
        yield named.caption() + more, drawing.svg(made, inside=True)


def _timelines(result: CellResult) -> Iterable[tuple[str, str]]:
    """Yield caption and timeline of each timeline."""
    for raw in result.timelines:
        timeline = Timeline.from_json(raw)
        if timeline.cells:
            made = timeline_drawing.paint(timeline, f"{raw['scenario']}, {raw['side']}")
            failed = next((frame for frame in timeline.frames if frame.failed), None)
            moved = sum(frame.moved for frame in timeline.frames)
            caption = f"{raw['side']}: {f'{moved} cells moved' if moved else 'nothing moved'}"
            if failed:
                caption += f", and operation {failed.number} ended with {failed.failed}"
            yield caption, drawing.svg(made, inside=True)


def _drift(result: CellResult) -> Iterable[dict[str, Any]]:
    """Yield each patch's drift, its hunks by file and in words."""
    for one in result.drift:
        files: dict[str, list[dict[str, Any]]] = {}
        for hunk in one["hunks"]:
            files.setdefault(hunk["file"], []).append({**hunk, "words": _words(hunk)})
        bad = sum(hunk["state"] not in _PLACED for hunk in one["hunks"])
        yield {**one, "files": files, "bad": bad}


#: States of a hunk that has a certain place.
_PLACED = ("exact", "offset")


def _words(hunk: dict[str, Any]) -> str:
    said = []
    if hunk["offset"]:
        said.append(f"moved by {hunk['offset']:+d} lines")
    if hunk["fuzz"]:
        said.append(f"would need fuzz {hunk['fuzz']}")
    if hunk["blanks"]:
        said.append("only blanks differ")
    if hunk["changed_in"]:
        said.append(changed_text(hunk.get("changed_after") or "", hunk["changed_in"]))
    for moved in hunk["moved_to"]:
        said.append(f"similar lines are in {moved['file']} ({moved['likeness']:.0%})")
    return ", ".join(said)
