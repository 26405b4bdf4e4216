"""Print the reports of `pyllamakv patch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyllamakv.patching.conflict_help import decision
from pyllamakv.patching.drift import changed_text
from pyllamakv.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyllamakv.patching.definition import Definition
    from pyllamakv.patching.drift import Drift, HunkDrift
    from pyllamakv.patching.port_comparison import PortComparison
    from pyllamakv.patching.status import PatchStatus

_COLOURS = {"applies": "green", "offset": "green", "carried": "cyan", "contained": "cyan",
            "manual": "red",
            "fails": "red", "blocked": "yellow", "not-applicable": "dim",
            "unknown": "magenta"}  # fmt: skip


def _safe(text: str) -> str:
    """Escape control characters and markup in the text of an untrusted patch."""
    return escape(printable(text, keep="\n\t"))


def status(found: Sequence[PatchStatus], *, verbose: bool = False) -> None:
    """Draw the patches of each release by state, and why one does not apply.

    With ``verbose`` one row per patch, then the reason and every hunk.
    """
    console = Console()
    console.print(_detailed(found) if verbose else _grouped(found))
    if verbose:
        for one in found:
            if one.state != "not-applicable":
                reason = one.reason or "applies"
                console.print(f"[bold]{_safe(one.id)} on {one.release}[/]: {_safe(reason)}")
                _hunks(console, one)
                _conflicts(console, one)
        return
    for line in (causes := _causes(found)):
        console.print(line)
    used = {one.id for one in found if one.state != "not-applicable"}
    left = dict.fromkeys(_safe(one.id) for one in found if one.id not in used)
    if left and used:
        console.print(f"no part of these releases: {', '.join(left)}; -v shows the reasons")
    if causes:
        console.print("-v shows each hunk", style="dim")


def _causes(found: Sequence[PatchStatus]) -> list[str]:
    """Return each reason for which patches are no part of releases once, with the releases.

    A patch is named with the last release that it is part of before, and those that it blocks.
    """
    groups: dict[tuple[str, str], list[PatchStatus]] = {}
    for one in found:
        if one.bad or one.state in ("unknown", "contained"):
            reason = one.reason.splitlines()[0].rstrip(".").replace(one.release, "the release")
            reason = reason.replace("(the release)", f"({one.release})")  # the base of the port
            groups.setdefault((one.id, reason), []).append(one)
    lines = []
    for (id_, reason), those in groups.items():
        names = list(dict.fromkeys(one.release for one in those))
        shown = names if len(names) < 4 else [names[0], "…", names[-1]]
        where = ", ".join(shown) + (f" ({len(names)} releases)" if len(names) > 3 else "")
        line = f"[bold]{_safe(id_)} on {where}[/]: {_safe(reason)}"
        before = [one.release for one in found if one.id == id_ and one.good]
        if those[0].bad and before:
            line += f"; it is part of {before[-1]}"
        if likely := _decisions(those[0]):
            line += f"; likely: {_safe('; '.join(likely))}"
        blocked = [
            one.id
            for one in found
            if one.release == names[0]
            and one.state == "blocked"
            and f"requires {id_}," in one.reason
        ]
        if blocked:
            line += f"; this blocks {_safe(', '.join(blocked))}"
        lines.append(line)
    return lines


def _decisions(one: PatchStatus) -> list[str]:
    """Return the likely decisions for the conflicts with the nearest port, each once."""
    conflicts = one.manual[0].conflicts if one.bad and one.manual else ()
    found = (decision(each.upstream, each.base, each.patch) for each in conflicts if each.line)
    return list(dict.fromkeys(found))


def _grouped(found: Sequence[PatchStatus]) -> Table:
    table = Table("release", "state", "patches", box=None, pad_edge=False)
    groups: dict[tuple[str, str], list[str]] = {}
    for one in found:
        if one.state != "not-applicable":
            groups.setdefault((one.release, one.state), []).append(_safe(one.id))
    shown = {release for release, _ in groups}
    for release in dict.fromkeys(one.release for one in found):
        if release not in shown:
            groups[release, "not-applicable"] = ["all patches; -v shows the reasons"]
    for (release, state), names in groups.items():
        table.add_row(release, f"[{_COLOURS[state]}]{state}[/]", ", ".join(names))
    return table


def _detailed(found: Sequence[PatchStatus]) -> Table:
    table = Table("release", "patch", "state", "port", "hunks")
    for one in found:
        colour = _COLOURS[one.state]
        name, text = _safe(one.id), _safe(one.port)
        table.add_row(one.release, name, f"[{colour}]{one.state}[/]", text, _safe(_summary(one)))
    return table


def _hunks(console: Console, one: PatchStatus) -> None:
    best = one.best
    for place in best.placements if best else ():
        offset = f" ({place.offset:+d} lines)" if place.offset else ""
        console.print(
            f"  {_safe(place.file)}#{place.hunk} line {place.line}: {place.state}{offset}",
            highlight=False,
        )


def _conflicts(console: Console, one: PatchStatus) -> None:
    for base in one.manual:
        for place in base.conflicts:
            console.print(f"  {_safe(place.file)}:{place.line}, merging port {_safe(base.base)}")
            for side in ("base", "upstream", "patch"):
                for line in getattr(place, side):
                    console.print(f"    {side:8} {_safe(line)}", highlight=False)


def _summary(one: PatchStatus) -> str:
    best = one.best
    if best is None or one.state == "not-applicable":
        return one.reason
    total = len(best.placements)
    if one.state == "carried":
        return one.reason
    if not one.good:
        port = f" (port for {best.base})" if best.base else ""
        return f"{len(best.failed)} of {total} fail{port}"
    moved = [place.offset for place in best.placements if place.offset]
    if not moved:
        return f"{total}"
    return f"{total}, {len(moved)} moved by {_span(min(moved), max(moved))} lines"


def facts(patch: Definition) -> dict[str, Any]:
    """Return the facts of a patch as plain data."""
    return {
        "id": patch.id,
        "title": patch.title,
        "why": patch.why,
        "origin": patch.origin,
        "upstream": patch.upstream,
        "releases": patch.meant_for,
        "target": patch.target,
        "requires": list(patch.requires),
        "scenarios": list(patch.scenarios),
        "ports": [
            {
                "base": text.base,
                "era": text.era,
                "requires": list(text.requires),
                "markers": [str(marker) for marker in text.markers],
                "files": list(text.patch.paths),
                "digest": text.digest,
            }
            for text in patch.ports
        ],
    }


def series(found: Sequence[dict[str, Any]]) -> None:
    """Draw the series, one row per patch."""
    table = Table("patch", "title", "releases", "ports")
    for one in found:
        bases = ", ".join(port["base"] for port in one["ports"])
        words = (one["id"], one["title"], one["releases"] or "all", bases)
        table.add_row(*map(_safe, words))
    Console().print(table)


def patch(definition: Definition) -> None:
    """Print the purpose of a patch and its releases."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{_safe(definition.id)}[/]: {_safe(definition.title)}\n")
    console.print(_safe(definition.why) + "\n")
    pairs = {
        "origin": definition.origin,
        "upstream": definition.upstream,
        "releases": definition.meant_for or "all",
        "changes": definition.target,
        "requires": ", ".join(definition.requires) or "nothing",
        "scenarios": ", ".join(definition.scenarios) or "none",
    }
    for key, value in pairs.items():
        console.print(f"{key}: {_safe(value)}")
    for text in definition.ports:
        touched = ", ".join(text.patch.paths)
        port = f"port {text.base} ({text.era})" if text.base else "changes"
        console.print(_safe(f"{port}: {touched}"))
        for marker in text.markers:
            console.print(f"  where {_safe(str(marker))}")


def comparison(found: PortComparison) -> None:
    """Print the losses and gains of the second of two ports."""
    console = Console(soft_wrap=True, highlight=False)
    between = _safe(f"{found.id}: {found.one} to {found.other}")
    console.print(f"{between}: [bold]{found.change}[/]")
    for title, losses in (("lost", found.lost), ("gained", found.gained)):
        for loss in losses:
            colour = "red" if title == "lost" and loss.whole else "dim"
            console.print(f"  [{colour}]{title}[/] {_safe(str(loss))}")
            if title == "lost" and loss.whole:
                for line in loss.lines[:6]:
                    console.print(f"      {_safe(line)}")
    for each in found.changed:
        console.print(f"  changed {_safe(str(each))}")
        for line in each.lines:
            console.print(f"      {_safe(line)}")


#: The columns and lines of a report of drift, which fits a screen with the prompt below it.
_COLUMNS, _LINES = 80, 22


def drift(found: Sequence[Drift], named: Sequence[str] = (), *, verbose: bool = False) -> None:
    """Print the state of each patch, then the hunks that fail, on one screen.

    Patches of other releases are only counted, unless they are named. With ``verbose``, every hunk
    that is not exact is printed, in lines of any length.
    """
    console = Console(soft_wrap=True, highlight=False)
    if verbose:
        _whole_drift(console, found, named)
        return
    shown = [one for one in found if one.state != "not-applicable" or one.id in named]
    lines = _drift_rows(shown)
    if len(shown) < len(found):
        lines.append(f"{_count(len(found) - len(shown), 'patch', 'patches')} for other releases")
    lines += [f"[bold]{_line(line)}[/]" if first else _line(line) for first, line in _fails(shown)]
    inexact = any(hunk.placement.state != "exact" for one in shown for hunk in one.hunks)
    end = ["-v shows each hunk"] if inexact else []
    if len(lines) + len(end) > _LINES:
        hidden = len(lines) - _LINES + 1
        lines, end = lines[: _LINES - 1], [f"{hidden} more lines; -v shows each hunk"]
    for line in lines:
        console.print(line)
    for line in end:
        console.print(line, style="dim")


def _line(text: str, width: int = _COLUMNS) -> str:
    """Return a text for the console that is cut at a width."""
    text = printable(text)
    return escape(text if len(text) <= width else f"{text[: width - 1]}…")


def _drift_rows(found: Sequence[Drift]) -> list[str]:
    """Return a line for each patch; of many, those that fail come first."""
    if len(found) > _LINES // 2:
        found = sorted(found, key=lambda one: not one.bad)
    width = max((min(30, len(one.id)) for one in found), default=0)
    rows = []
    for one in found:
        id_ = _line(one.id, width) + " " * (width - len(one.id))
        state = f"[{_COLOURS[one.state]}]{one.state:<7}[/]"
        facts = _line(_drift_row(one), _COLUMNS - width - max(7, len(one.state)) - 2)
        rows.append(f"[bold]{id_}[/] {state} {facts}")
    return rows


def _drift_row(one: Drift) -> str:
    """Return the state of a patch's hunks in one line."""
    if not one.hunks:
        return one.reason.split("; ")[0]
    parts = [f"port {one.base}"] if one.base else []
    moved = [hunk.placement.offset for hunk in one.hunks if hunk.placement.offset]
    if one.bad:
        parts.append(f"{len(one.bad)} of {_count(len(one.hunks), 'hunk')} fail")
    else:
        parts.append(_count(len(one.hunks), "hunk"))
    if moved:
        parts.append(f"{len(moved)} moved by {_span(min(moved), max(moved))}")
    return ", ".join(parts)


def _span(first: int, last: int) -> str:
    return f"{first:+d}" if first == last else f"{first:+d} to {last:+d}"


def _fails(found: Sequence[Drift]) -> Iterator[tuple[bool, str]]:
    """Yield the lines about hunks that fail, and whether a line begins a patch."""
    for one in found:
        gone: set[str] = set()
        if one.bad:
            yield True, f"{one.id}, port {one.base}" if one.base else one.id
        for hunk in one.bad:
            place = hunk.placement
            if place.state == "missing":
                if place.file in gone:
                    continue
                gone.add(place.file)
                yield False, f"  {place.file}: the file does not exist"
            else:
                # The end of a signature is the function's name.
                name = hunk.function.rsplit(" ", 1)[-1]
                yield False, f"  {place.file}#{place.hunk} {name}".rstrip() + f": {place.state}"
            if place.state in ("function", "already"):
                yield False, f"    found {place.found}"
            if hunk.whitespace_only:
                yield False, "    only blanks differ"
            for reason in _went(hunk):
                yield False, f"    {reason}"


def _whole_drift(console: Console, found: Sequence[Drift], named: Sequence[str]) -> None:
    for one in found:
        against = _safe(f", port {one.base}" if one.base else "")
        state = f"[{_COLOURS[one.state]}]{one.state}[/]"
        console.print(f"[bold]{_safe(one.id)}[/] on {one.release}: {state}{against}")
        if one.state == "not-applicable" and one.id not in named:
            console.print(f"  {_safe(one.reason.split('; ')[0])}")
            continue
        inexact = [hunk for hunk in one.hunks if hunk.placement.state != "exact"]
        for line in _moved_or_failing(inexact):
            console.print(f"  {_safe(line)}")
        exact = len(one.hunks) - len(inexact)
        if exact:
            console.print(f"  {_count(exact, 'other hunk' if inexact else 'hunk')} exact")


def _moved_or_failing(hunks: Sequence[HunkDrift]) -> Iterator[str]:
    """Yield a line per hunk, and one for all those of a file that is gone."""
    gone: set[str] = set()
    for hunk in hunks:
        file = hunk.placement.file
        if hunk.placement.state != "missing":
            yield _drifted(hunk)
        elif file not in gone:
            gone.add(file)
            count = sum(other.placement.file == file for other in hunks)
            parts = [f"{file}, {_count(count, 'hunk')}: the file does not exist", *_went(hunk)]
            yield ", ".join(parts)


def _count(number: int, what: str, many: str = "") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {many or f'{what}s'}"


def _drifted(hunk: HunkDrift) -> str:
    place = hunk.placement
    parts = [f"{place.file}#{place.hunk} {hunk.function}".rstrip() + f": {place.state}"]
    if place.offset:
        parts.append(f"{place.offset:+d} lines")
    if place.state in ("function", "already"):
        parts.append(f"expected {place.expected or 'the old lines'}, found {place.found}")
    elif not place.good:
        parts.append(
            f"requires fuzz {hunk.fuzz}" if hunk.fuzz is not None else "fails with any fuzz"
        )
        if hunk.whitespace_only:
            parts.append("only whitespace differs")
    if not place.good:
        parts += _went(hunk)
    return ", ".join(parts)


def _went(hunk: HunkDrift) -> Iterator[str]:
    if hunk.moved:
        there = hunk.moved[0]
        yield f"similar lines are in {there.path} ({there.similarity:.0%})"
    if hunk.changed_in:
        yield changed_text(hunk.changed_after, hunk.changed_in)
