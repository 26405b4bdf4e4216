"""Format the result of a check: text, JUnit, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from pyllamakv.scenarios import cell_picture
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.verification.verdict import GOOD, Verdict, is_harmful

if TYPE_CHECKING:
    from pyllamakv.scenarios.frames import Timeline
    from pyllamakv.scenarios.runner import Run
    from pyllamakv.verification.check import CheckResult
    from pyllamakv.verification.verdict import Pair


def word(verdict: Verdict, pairs: Sequence[Pair]) -> str:
    """Return a scenario's verdict for display.

    A guard without a difference *holds*. A scenario that both sides fail alike, and that the patch
    does not claim, is *unchanged*.
    """
    if verdict is not Verdict.HARMLESS:
        return str(verdict)
    if any(pair.broken for pair in pairs):
        return "unchanged"
    return "holds" if pairs[0].kind == "guard" else str(verdict)


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


def junit(answer: CheckResult) -> str:
    """Return the result as a JUnit document: a suite per side, a case per run.

    Failures on stock, and those that patched shares without a claim to fix them, are stored as
    output. Only the other failures on patched, and a bad verdict, count.
    """
    pairs = {(pair.scenario, pair.setting): pair for pair in answer.pairs}
    root = ET.Element("testsuites", name="pyllamakv check")
    for side, runs in answer.runs.items():
        suite = ET.SubElement(root, "testsuite", name=f"{answer.question.release} {side}")
        failures = 0
        for run in runs:
            case = _case(suite, f"{answer.question.release}.{run.scenario}", run)
            pair = pairs.get((run.scenario, run.setting)) if side == "patched" else None
            ended = pair.patched if pair and pair.patched else run.outcome
            if pair and ended.failed and (pair.claimed or is_harmful(pair)):
                failures += 1
                ET.SubElement(case, "failure", type=ended.failure, message=ended.message)
            elif ended.failed:
                ET.SubElement(case, "system-out").text = f"{ended.failure}: {ended.message}"
            elif ended.status != "pass":
                ET.SubElement(case, "skipped", message=ended.message)
        suite.set("tests", str(len(runs)))
        suite.set("failures", str(failures))
    suite = ET.SubElement(root, "testsuite", name=f"{answer.question.release} verdict", tests="1")
    case = ET.SubElement(
        suite, "testcase", classname=answer.question.release, name=str(answer.decision.verdict)
    )
    good = answer.decision.verdict in GOOD
    suite.set("failures", str(int(not good)))
    if not good:
        ET.SubElement(case, "failure", message=answer.decision.reason)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def pictures(answer: CheckResult) -> Iterator[tuple[str, cell_picture.Picture]]:
    """Yield the pictures of the first run of each side that shows a defragmentation."""
    for side in ("stock", "patched"):
        for run in answer.runs.get(side, ()):
            if run.scenario == "fragmented" and run.pictures:
                for picture in run.pictures:
                    yield side, picture
                break


def timelines(answer: CheckResult) -> Iterator[tuple[str, str, Timeline]]:
    """Yield scenario, side and timeline of each scenario with recorded frames, stock first.

    A scenario with several contexts shows the last one if it failed, since the failure is there.
    """
    recorded = {
        (run.scenario, side): run.timelines[-1 if run.outcome.failed else 0]
        for side, runs in answer.runs.items()
        for run in reversed(runs)
        if run.timelines
    }
    for name in dict.fromkeys(name for name, _ in recorded):
        for side in ("stock", "patched"):
            if (name, side) in recorded:
                yield name, side, recorded[name, side]


def _case(suite: Any, name: str, run: Run) -> ET.Element:
    return ET.SubElement(
        suite, "testcase", classname=name, name=run.setting, time=f"{run.seconds:.3f}"
    )
