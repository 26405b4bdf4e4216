"""Write the report of a watch as Markdown, for a job summary or a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.printable import printable
from pyllamakv.verification import matrix_reports

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyllamakv.patching.conflict_report import HunkConflict, UncarriedPatch
    from pyllamakv.verification.expected import Comparison
    from pyllamakv.verification.release_watch import FollowedRelease

#: Lines of each side of a conflict that are shown; ``watch.html`` and ``--json`` have all.
SHOWN_LINES = 20


def markdown(
    followed: Sequence[FollowedRelease],
    compared: Sequence[Comparison],
    warnings: Sequence[str] = (),
) -> str:
    """Return the report of the followed releases: verdicts, branches, conflicts and errors."""
    results = [result for each in followed for result in each.results]
    worse = {one.spec.release: str(one) for one in compared if one.regression}
    lines = ["# New releases of llama.cpp", ""]
    lines += [f"Warning: {_text(each)}" for each in warnings]
    lines += [matrix_reports.markdown(results)] if results else ["No release was verified.", ""]
    for each in followed:
        lines += [f"## {_text(each.name)}", ""]
        if each.branch:
            lines += [f"For review: branch {_code(each.branch.name)}, which changes:", ""]
            lines += [f"- {_code(file)}" for file in each.branch.files]
            lines += [f"- note: {_text(note)}" for note in each.branch.notes]
            lines.append("")
        carried = {id_: base for result in each.results for id_, base in result.carried.items()}
        if carried:
            names = ", ".join(f"{id_} from {base}" for id_, base in carried.items())
            lines += [f"Carried: {names}.", ""]
        for patch in each.contained:
            lines += [f"### {_text(patch.id)} is contained", "", f"{_text(patch.reason)}.", ""]
        if each.name in worse and not each.conflicts:
            lines += [_text(worse[each.name]), ""]
        for conflicting in each.conflicts:
            lines += _patch(conflicting)
        if each.error:
            lines += [f"Not completed: {_text(str(each.error))}", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _patch(patch: UncarriedPatch) -> Iterable[str]:
    yield f"### {_text(patch.id)} requires manual work"
    yield ""
    if patch.conflicts:
        yield f"Port {_code(patch.port)} was tried."
    else:
        yield f"{_text(patch.reason)}."
    yield ""
    for conflict in patch.conflicts:
        yield from _conflict(conflict)


def _conflict(conflict: HunkConflict) -> Iterable[str]:
    yield f"{_text(str(conflict))}."
    sides = (
        ("port base", conflict.base),
        ("release", conflict.upstream),
        ("patch", conflict.patch),
    )
    lines = []
    for name, side in sides:
        lines += [f"{name}:", *(f"    {line}".rstrip() for line in side[:SHOWN_LINES])]
        if len(side) > SHOWN_LINES:
            lines.append(f"    ({len(side) - SHOWN_LINES} more lines)")
    block = printable("\n".join(lines), keep="\n\t")
    fence = "```"
    while fence in block:
        fence += "`"
    yield from ("", f"{fence}text", block, fence, "")


def _text(text: str) -> str:
    """Return a text of one line in which nothing is markup."""
    plain = printable(" ".join(text.split()))
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in plain)


def _code(text: str) -> str:
    """Return a name as code."""
    return f"`{printable(text).replace('`', ' ')}`"
