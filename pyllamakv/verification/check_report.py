"""Show an answer: a table and cell maps for people, JUnit for machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from pyllamakv.scenarios import cell_picture
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.verification.verdict import GOOD, Verdict
from pyllamakv.view import cell_drawing

if TYPE_CHECKING:
    from rich.console import Console

    from pyllamakv.scenarios.frames import Film
    from pyllamakv.scenarios.runner import Run
    from pyllamakv.scenarios.scenario import Scenario
    from pyllamakv.verification.check import Answer

_STYLES = {
    Verdict.HARMFUL: "bold red",
    Verdict.INEFFECTIVE: "red",
    Verdict.BROKEN_APPLY: "red",
    Verdict.BROKEN_BUILD: "red",
    Verdict.NEEDED: "green",
    Verdict.REDUNDANT: "cyan",
    Verdict.NATIVE: "cyan",
    Verdict.UNTESTABLE: "yellow",
}

#: Longest message that the list of failures shows; JSON has all of it.
_LONGEST = 300


def show(answer: Answer, scenarios: dict[str, Scenario], console: Console, maps: bool) -> None:
    """Print the table of scenarios, what patched fails, cell maps and the verdict."""
    from rich.table import Table

    if answer.judgement.scenarios:
        table = Table(box=None, pad_edge=False)
        for head in ("scenario", "kind", "stock", "patched", "verdict"):
            # a narrow terminal may fold the counts, never a name or a verdict
            table.add_column(head, no_wrap=head not in ("stock", "patched"))
        for name, verdict in answer.judgement.scenarios.items():
            mine = [pair for pair in answer.pairs if pair.scenario == name]
            kind = scenarios[name].kind if name in scenarios else mine[0].kind
            table.add_row(
                name,
                kind,
                summary([pair.stock for pair in mine]),
                summary([pair.patched for pair in mine]),
                f"[{_STYLES[verdict]}]{word(verdict, kind)}[/]",
            )
        console.print(table)
    for (name, what), runs in _failing(answer).items():
        console.print(f"\npatched: {name}: {what}", style="red", markup=False)
        console.print(f"  {runs[0][1][:_LONGEST]}", markup=False)
        settings = ", ".join(setting for setting, _ in runs)
        console.print(f"  in {len(runs)}: {settings}", style="dim", markup=False, highlight=False)
    if maps:
        _show_maps(answer, console)
    for run in answer.runs.get("patched", ()):
        if "story" in run.notes:
            console.print(f"the story that patched told ({run.setting}):", style="dim")
            console.print(f"  {' '.join(run.notes['story'].split())}", markup=False)
            break
    for name, reason in answer.skipped.items():
        console.print(f"left out: {name}: {reason}", style="dim", markup=False)
    if answer.patches:
        console.print(f"patches: {', '.join(answer.patches)}", style="dim", markup=False)
    style = _STYLES[answer.judgement.verdict]
    console.print(str(answer.judgement), style=style, markup=False, soft_wrap=True)


def _failing(answer: Answer) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return what patched fails: by scenario and class, for settings mostly fail alike."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for pair in answer.pairs:
        one = pair.patched
        if one is not None and one.status not in ("pass", "skip"):
            key = pair.scenario, one.failure or one.status
            found.setdefault(key, []).append((pair.setting, one.message))
    return found


def word(verdict: Verdict, kind: str) -> str:
    """Return a scenario's verdict as people read it: only a cure can be redundant."""
    if verdict is Verdict.REDUNDANT and kind != "cure":
        return "holds" if kind == "guard" else "works"
    return str(verdict)


def summary(outcomes: list[Outcome | None]) -> str:
    """Return how a scenario's settings ended on one side: ``fails 6/6: claim``."""
    ran = [outcome for outcome in outcomes if outcome is not None]
    if not ran:
        return "not patched"
    counted = [outcome for outcome in ran if outcome.status not in ("skip", "fault")]
    if not counted:
        return "skipped"
    failed = [outcome for outcome in counted if outcome.failed]
    if failed:
        kinds = ", ".join(sorted({outcome.failure for outcome in failed}))
        return f"fails {len(failed)}/{len(counted)}: {kinds}"
    absent = [outcome for outcome in counted if outcome.status == "absent"]
    if absent:
        return f"absent {len(absent)}/{len(counted)}"
    return f"passes {len(counted)}"


def junit(answer: Answer) -> str:
    """Return the answer as a JUnit document: a suite per side, a case per run.

    Failures of stock are what it is there to show, and are kept as output; only failures on
    patched, and a bad verdict, count.
    """
    root = ET.Element("testsuites", name="pyllamakv check")
    for side, runs in answer.runs.items():
        suite = ET.SubElement(root, "testsuite", name=f"{answer.question.release} {side}")
        failures = 0
        for run in runs:
            case = _case(suite, f"{answer.question.release}.{run.scenario}", run)
            if run.outcome.failed and side == "patched":
                failures += 1
                ET.SubElement(
                    case, "failure", type=run.outcome.failure, message=run.outcome.message
                )
            elif run.outcome.failed:
                ET.SubElement(
                    case, "system-out"
                ).text = f"{run.outcome.failure}: {run.outcome.message}"
            elif run.outcome.status != "pass":
                ET.SubElement(case, "skipped", message=run.outcome.message)
        suite.set("tests", str(len(runs)))
        suite.set("failures", str(failures))
    suite = ET.SubElement(root, "testsuite", name=f"{answer.question.release} verdict", tests="1")
    case = ET.SubElement(
        suite, "testcase", classname=answer.question.release, name=str(answer.judgement.verdict)
    )
    good = answer.judgement.verdict in GOOD
    suite.set("failures", str(int(not good)))
    if not good:
        ET.SubElement(case, "failure", message=answer.judgement.reason)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def pictures(answer: Answer) -> Iterator[tuple[str, cell_picture.Picture]]:
    """Yield the pictures of the first run of each side that shows a defragmentation."""
    for side in ("stock", "patched"):
        for run in answer.runs.get(side, ()):
            if run.scenario == "fragmented" and run.pictures:
                for picture in run.pictures:
                    yield side, picture
                break


def films(answer: Answer) -> Iterator[tuple[str, str, Film]]:
    """Yield scenario, side and film of every scenario that was filmed, stock before patched."""
    filmed = {
        (run.scenario, side): run.films[0]
        for side, runs in answer.runs.items()
        for run in reversed(runs)
        if run.films
    }
    for name in dict.fromkeys(name for name, _ in filmed):
        for side in ("stock", "patched"):
            if (name, side) in filmed:
                yield name, side, filmed[name, side]


def _show_maps(answer: Answer, console: Console) -> None:
    for side, picture in pictures(answer):
        console.print()
        console.print(
            cell_drawing.draw(cell_picture.Picture(f"{side}, {picture.label}", picture.owner))
        )
    console.print()


def _case(suite: Any, name: str, run: Run) -> ET.Element:
    return ET.SubElement(
        suite, "testcase", classname=name, name=run.setting, time=f"{run.seconds:.3f}"
    )
