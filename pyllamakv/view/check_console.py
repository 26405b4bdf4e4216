"""Show the result of a check in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.scenarios import cell_picture
from pyllamakv.verification import check_report
from pyllamakv.verification.parallel_runs import MAX_HANGS
from pyllamakv.verification.verdict import Verdict, is_harmful
from pyllamakv.view import cell_drawing

if TYPE_CHECKING:
    from rich.console import Console

    from pyllamakv.scenarios.scenario import Scenario
    from pyllamakv.verification.check import CheckResult

_STYLES = {
    Verdict.HARMFUL: "bold red",
    Verdict.INEFFECTIVE: "red",
    Verdict.BROKEN_APPLY: "red",
    Verdict.BROKEN_BUILD: "red",
    Verdict.BROKEN_CARRY: "red",
    Verdict.NEEDED: "green",
    Verdict.WORKS: "green",
    Verdict.REDUNDANT: "cyan",
    Verdict.HARMLESS: "cyan",
    Verdict.NATIVE: "cyan",
    Verdict.UNTESTABLE: "yellow",
}
#: Longest message that the list of failures shows; JSON has all of it.
_LONGEST = 300


def show(
    answer: CheckResult,
    scenarios: dict[str, Scenario],
    console: Console,
    *,
    pictures: bool = False,
    verbose: bool = False,
) -> None:
    """Print the table of scenarios, what patched fails, and the verdict.

    Scenarios that both sides pass are counted unless ``verbose``, which also prints settings,
    whole messages and the reasons for skipped patches.
    """
    from rich.table import Table

    equal = [] if verbose else [name for name in answer.decision.scenarios if _equal(answer, name)]
    shown = {n: v for n, v in answer.decision.scenarios.items() if n not in equal}
    if shown:
        table = Table(box=None, pad_edge=False)
        for head in ("scenario", "kind", "stock", "patched", "verdict"):
            # a narrow terminal may fold the counts, never a name or a verdict
            table.add_column(head, no_wrap=head not in ("stock", "patched"))
        for name, verdict in shown.items():
            mine = [pair for pair in answer.pairs if pair.scenario == name]
            kind = scenarios[name].kind if name in scenarios else mine[0].kind
            table.add_row(
                name,
                kind,
                check_report.summary([pair.stock for pair in mine]),
                check_report.summary([pair.patched for pair in mine]),
                f"[{_STYLES[verdict]}]{check_report.word(verdict, mine)}[/]",
            )
        console.print(table)
    if equal:
        count = f"{len(equal)} scenario{'s' if len(equal) > 1 else ''}"
        console.print(f"{count} with equal results on stock and patched; -v lists them")
    if answer.stopped:
        text = f"{answer.stopped} runs were not made, because {MAX_HANGS} earlier runs hung"
        console.print(text, style="yellow", markup=False)
    shared = answer.decision.shared
    if shared and not all(pair.claimed for pair in answer.pairs):
        text = f"{shared} runs fail alike on stock and patched, and are not charged to the patch"
        console.print(text, style="dim", markup=False)
    for (name, what), runs in _failing(answer).items():
        console.print(f"\npatched: {name}: {what}", style="red", markup=False)
        message = runs[0][1]
        console.print(f"  {message if verbose else message[:_LONGEST]}", markup=False)
        if not verbose:
            console.print(f"  in {len(runs)} settings", style="dim", markup=False)
            continue
        settings = ", ".join(setting for setting, _ in runs)
        console.print(f"  in {len(runs)}: {settings}", style="dim", markup=False, highlight=False)
    if pictures:
        _show_maps(answer, console)
    for run in answer.runs.get("patched", ()):
        if verbose and "story" in run.notes:
            console.print(f"the text that patched generated ({run.setting}):", style="dim")
            console.print(f"  {' '.join(run.notes['story'].split())}", markup=False)
            break
    for name, reason in answer.skipped.items() if verbose else ():
        console.print(f"skipped {name}: {reason}", style="dim", markup=False)
    for header in answer.headers:
        if header.problem:
            console.print(header.problem, style="red", markup=False)
    if answer.headers and not any(header.problem for header in answer.headers):
        console.print(f"{len(answer.headers)} header tests pass", style="dim")
    if answer.patches:
        named = [
            f"{id_} (carried from {answer.carried[id_]})" if id_ in answer.carried else id_
            for id_ in answer.patches
        ]
        console.print(f"patches: {', '.join(named)}", style="dim", markup=False)
    style = _STYLES[answer.decision.verdict]
    console.print(str(answer.decision), style=style, markup=False, soft_wrap=True)


def _equal(answer: CheckResult, name: str) -> bool:
    """Return whether stock and patched end alike in each setting, and no run fails."""
    pairs = [pair for pair in answer.pairs if pair.scenario == name]
    return all(
        pair.stock is not None
        and pair.patched is not None
        and pair.stock.status == pair.patched.status != "fail"
        for pair in pairs
    )


def _failing(answer: CheckResult) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return the failures of patched by scenario and class, because settings mostly fail alike.

    Failures that stock shares are omitted, unless the patch claims to fix them.
    """
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for pair in answer.pairs:
        one = pair.patched
        charged = pair.claimed or is_harmful(pair)
        if one is not None and charged and one.status not in ("pass", "skip"):
            key = pair.scenario, one.failure or one.status
            found.setdefault(key, []).append((pair.setting, one.message))
    return found


def _show_maps(answer: CheckResult, console: Console) -> None:
    for side, picture in check_report.pictures(answer):
        console.print()
        console.print(
            cell_drawing.draw(cell_picture.Picture(f"{side}, {picture.label}", picture.owner))
        )
    console.print()
