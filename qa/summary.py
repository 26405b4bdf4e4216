"""Store results, and write BENCHMARKS.md and RELIABILITY.md from them: `python -m qa summary`.

``qa/results`` has one record per figure that supports a claim or misses its target, and one per
entry of the stress tests: value, median, interval, samples, hardware, date, commit and command. The
pages have one row per claim.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import typer

import qa
from pyllamakv.errors import UsageError
from pyllamakv.source.files import write_text_atomic
from qa.bench.figure import Figure
from qa.benchmarks import GROUPS
from qa.entry import Entry

app = typer.Typer(add_completion=False)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "qa" / "results"
BENCHMARKS, RELIABILITY = RESULTS / "benchmarks.json", RESULTS / "reliability.json"

Result = TypeVar("Result", Figure, Entry)

_HEAD = "| claim | figure | target | limit | command |\n|---|---|---|---|---|"
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(?: \[(\d+(?:\.\d+)?), (\d+(?:\.\d+)?)\])?")

#: Sentence about the package -> the figures that support it, as regular expressions: for the whole
#: name of a group, and for a part of a figure's name. At least one figure with a target must match.
#: With several figures, a row shows the range of their first numbers, and the target is met if all
#: meet it.
CLAIMS: dict[str, tuple[str, str]] = {
    "Importing the package is fast compared to importing its dependencies": (
        "What Python costs",
        "`import pyllamakv`",
    ),
    "A Python decode call with its logits takes microseconds more than the C call": (
        "What Python costs",
        "one decode call",
    ),
    "A snapshot of 4,096 cells with statistics takes under 200 µs": (
        "What Python costs",
        "a snapshot",
    ),
    "The check for signals adds at most 1 µs to a decode call": (
        "Signals during a decode",
        "a decode call with the check",
    ),
    "A signal takes effect within 0.1 s of CPU time in every long call": (
        "Signals during a decode",
        "n_batch = n_ubatch",
    ),
    "The check for signals adds at most 0.5 % to a prefill": (
        "Signals during a decode",
        "a prefill of 256 tokens",
    ),
    "The default number of threads takes at most twice as long as the best, also on busy CPUs": (
        "Threads on a busy machine",
        "the default over the best",
    ),
    "Decoding from Python is as fast as plain C": (
        "The decode loop",
        r"(greedy|logits only), 8 sequences(, 16 steps a call)?$",
    ),
    "Defragmentation with flash attention is as fast as copying the rows": (
        "A complete defragmentation",
        "with flash attention, .* over a strided copy",
    ),
    "Without flash attention, moving alternating cells takes at most 3 times a memcpy": (
        "A complete defragmentation",
        "no flash attention, alternate cells, over memcpy",
    ),
    "Defragmentation is never slower than the published algorithm": (
        "A complete defragmentation",
        "every workload: the published algorithm over the patch",
    ),
    "Planning takes at most 2 % of a defragmentation": (
        "A complete defragmentation",
        "the plan, as a fraction",
    ),
    "A patched library decodes as fast as stock if nothing is defragmented": (
        "A complete defragmentation",
        "decode without defragmentation, patched over stock",
    ),
    "Compaction restores the decode speed of a fresh cache": (
        "A sparse cache",
        "32768 cells, 200 live at the end, no flash",
    ),
    "Compaction restores the decode speed of a fresh cache on a GPU": (
        "On a device: cuda, .*",
        "live at the end",
    ),
    "On a GPU, patched passes the scenarios of the newest verified release that stock fails": (
        "On a device: cuda, b.*",
        "^scenarios on",
    ),
    "The cache managers add at most 5 % to the time of the same decodes by hand": (
        "Cache managers",
        "",
    ),
    "`Batcher` generates as many tokens per CPU second as llama-cpp-python, or more": (
        "Generation",
        "client",
    ),
    "A prefix cache with enough room reuses all that earlier prompts of real traffic had": (
        "Eviction",
        "unlimited",
    ),
    "In recorded chats, `adaptive` reuses at least 1.4 times as much as LRU at 1 and 2 %": (
        "Eviction",
        "^mooncake_conversation, [12] %, `adaptive`",
    ),
    "In recorded chats, `adaptive` reuses at least 1.05 times as much as LRU at 5 %": (
        "Eviction",
        "^mooncake_conversation, 5 %, `adaptive`",
    ),
    "In larger caches, and in generated traffic, `adaptive` reuses about as much as LRU or more": (
        "Eviction",
        r"^(mooncake_conversation, \d0|(agents|shifting), \d+) %, `adaptive`",
    ),
    "A known prefix of 1,000 tokens takes at most 5 % of the time of evaluating it": (
        "Peers",
        "over evaluating them",
    ),
    "A known prefix of 1,000 tokens is continued as soon as by llama-server of the same build": (
        "Peers",
        "over llama-server",
    ),
    "A memory-mapped cache decodes as fast as one on the heap": ("Mapped memory", "decoding after"),
    "A kept cache replaces the evaluation of a prompt after a restart": (
        "Mapped memory",
        "the next token after a prompt",
    ),
    "A patched llama-server loses no request of a load that aborts stock": (
        "llama-server 0.3.9, shift",
        "^patched",
    ),
    "A patched llama-server loses no request of this load on later releases": (
        r"llama-server (?!0\.3\.9,).*, shift",
        "^patched",
    ),
    "A patched llama-server loses no request of recorded traffic, scaled down": (
        "llama-server .*, trace",
        "^patched",
    ),
    "A patched llama-server loses no request whose answer fits into its slot": (
        "llama-server .*, fits(, .*)?",
        "^patched",
    ),
    "A patched llama-server answers four chats that fit alone but not together": (
        "llama-server .*, chats",
        "^patched",
    ),
    "A patched llama-server answers all requests whose slots need up to 8 times its cells": (
        r"llama-server .*, overcommit-\d(, .*)?",
        "^patched",
    ),
    "At N times the cells, no request takes longer than 3 N times the p99 of enough cells": (
        r"llama-server .*, overcommit-\d(, .*)?",
        "^longest request",
    ),
    "A patched llama-server needs no more CPU time per token than stock": (
        "llama-server .*, (fits|shift|trace|overcommit-1)(, .*)?",
        "^CPU per token, patched",
    ),
    "A patched llama-server has the latency of stock, by 95th percentiles": (
        "llama-server .*, (fits|shift|trace|overcommit-1)(, .*)?",
        "^p95 .*, patched",
    ),
    "`Batcher` needs no more CPU time per token than llama-server of the same build": (
        "llama-server .*, fits(, .*)?",
        "^CPU per token, batcher",
    ),
    "`Batcher` generates as many tokens per second as llama-server of the same build": (
        "llama-server .*, fits(, .*)?",
        "^tokens per second, batcher",
    ),
    "`pyllamakv serve` needs at most 5 % more CPU time per token of SmolLM2 than llama-server": (
        "llama-server .*, overcommit-1, smollm2.*",
        "^CPU per token, serve",
    ),
    "`pyllamakv serve` generates as many tokens of SmolLM2 per second as llama-server": (
        "llama-server .*, overcommit-1, smollm2.*",
        "^tokens per second, serve",
    ),
    "`pyllamakv serve` has the first token of SmolLM2 as soon as llama-server, by the p95": (
        "llama-server .*, overcommit-1, smollm2.*",
        "^p95 of the first token, serve",
    ),
    "HTTP takes at most 5 % of the CPU time of a token of SmolLM2 in `pyllamakv serve`": (
        "llama-server .*, overcommit-1",
        "^CPU per token of HTTP",
    ),
    "`pyllamakv serve` answers all requests whose sequences need 4 times its cells": (
        "llama-server .*, overcommit-4(, .*)?",
        "^serve, ",
    ),
    "The digest that identifies a model adds nothing to saves and restores in one process": (
        "The identity of a model",
        "^save and restore",
    ),
    "The first digest of a model is computed once per content": (
        "The identity of a model",
        "^the digest of a file",
    ),
    "A digest that the data directory has takes at most a millisecond": (
        "The identity of a model",
        "^a digest that",
    ),
    "A patched llama-server with a threshold halves the CPU time per token of a sparse cache": (
        "llama-server, a sparse cache",
        "",
    ),
}

#: Section of `python -m qa stress` -> its claim, the column that counts the cases and its unit, and
#: the section's limits.
SECTIONS: dict[str, tuple[str, str, str, str]] = {
    "random_operations": (
        "Operations in any order lose no K/V bytes, cells or logits",
        "operations",
        "operations",
        "does not cover shifts in sliding windows and partial states",
    ),
    "slips": (
        "Quick scenarios, header tests and quick tests detect the slips of a maintainer",
        "tried",
        "slips",
        "the slips that qa/slips lists",
    ),
    "fuzzing": (
        "No input of a parser ends or hangs the process",
        "inputs",
        "inputs",
        "random inputs, guided by coverage",
    ),
    "native_calls": (
        "No native call on any kind of memory ends the process",
        "calls",
        "calls",
        "generated models; a part of the calls, and all settings of contexts",
    ),
    "faults": (
        "Kills, full disks and I/O errors leave a state that the next run repairs",
        "faults",
        "faults",
        "Linux only; faults in file system calls of one process tree",
    ),
    "interrupts": (
        "A signal in any operation loses no token, and leaves no cell, memory or descriptor",
        "in an operation",
        "interrupted operations",
        "generated models; the signals of one handler, which raises",
    ),
    "sanitizers": (
        "Sanitizers report nothing in the shim and in the patches",
        "",
        "planted faults, test groups, rounds and runs",
        "gcc on Linux; without OpenMP, like every build",
    ),
    "leaks": (
        "Memory, file descriptors and threads do not grow",
        "operations",
        "operations",
        "all results list the bounds per operation",
    ),
    "servers": (
        "A patched llama-server loses no request of the scenarios and changes no text",
        "requests",
        "requests",
        "generated models, four or five slots, on CPUs; the releases whose servers are built",
    ),
}


@app.command()
def summary() -> None:
    """Write BENCHMARKS.md and RELIABILITY.md from qa/results."""
    for name, text in pages().items():
        write_text_atomic(ROOT / name, text)
        sys.stdout.write(f"{name}\n")


def read(path: Path, kind: type[Result]) -> list[Result]:
    """Return the results stored in a file; empty if it does not exist.

    Raises UsageError for a path that is no JSON file, and for a file of another format.
    """
    if path.suffix != ".json" or path.is_dir() or path.parent.is_file():
        raise UsageError(f"expected a path such as results.json, got {path}")
    if not path.exists():
        return []
    try:
        items: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
        for item in items:
            item |= {name: tuple(value) for name, value in item.items() if isinstance(value, list)}
        found = [kind(**item) for item in items]
        strange = [
            item["section"] for item in items if item.get("section", "leaks") not in SECTIONS
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        strange = [f"{type(error).__name__}: {error}"]
    if strange:
        raise UsageError(f"{path} has no results of `python -m qa` ({strange[0]}): choose another")
    return found


def store(path: Path, new: Sequence[Figure] | Sequence[Entry]) -> None:
    """Add results to a file, and renew the pages if it is one of ``qa/results``.

    Figures replace all of their group, those of loads only equal ones: another number of clients is
    another command. An entry replaces that of its name, unless it did not run.
    """
    merged: list[Any] = []
    if new and isinstance(new[0], Figure):
        merged = _merged_figures(read(path, Figure), new)  # type: ignore[arg-type]
    elif new:
        merged = _merged_entries(read(path, Entry), new)  # type: ignore[arg-type]
    items = [
        {name: value for name, value in asdict(each).items() if value not in ("", None, {}, ())}
        for each in merged
    ]
    lines = ",\n".join(json.dumps(item) for item in items)
    write_text_atomic(path, f'{{"results": [\n{lines}\n]}}\n')
    if path.resolve().parent == RESULTS:
        for name, text in pages().items():
            write_text_atomic(ROOT / name, text)


def _merged_figures(old: list[Figure], new: Iterable[Figure]) -> list[Figure]:
    fresh = [_summarized(each) for each in new]
    order = list(dict.fromkeys(each.group for each in (*old, *fresh)))
    replaced = {_replaces(each) for each in fresh}
    merged = [
        *(each for each in old if _replaces(each) not in replaced), *filter(_is_kept, fresh)
    ]  # fmt: skip
    return sorted(merged, key=lambda each: order.index(each.group))


def _replaces(figure: Figure) -> tuple[str, str]:
    """Return the same for figures of which a new one replaces the others."""
    return figure.group, figure.name if figure.name.endswith(" clients") else ""


def _is_kept(figure: Figure) -> bool:
    claimed = any(_supports(figure, *patterns) for patterns in CLAIMS.values())
    return claimed or figure.met is False or "lost" in figure.data


def _summarized(figure: Figure) -> Figure:
    """Return a figure with its median, interval and samples as numbers, and only counts as data."""
    number = _NUMBER.search(figure.value)
    median, low, high = map(_float, number.groups()) if number else (None, None, None)
    samples = figure.samples or max(_sample_counts(figure.data), default=None)
    counts = {name: value for name, value in figure.data.items() if type(value) is int}
    return replace(
        figure, median=median, low=low, high=high, samples=samples, data=counts, how="", table="",
        row={},
    )  # fmt: skip


def _float(text: str | None) -> float | None:
    return None if text is None else float(text)


def _sample_counts(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _sample_counts(part)
    elif isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
        yield len(value)


def _merged_entries(old: list[Entry], new: Iterable[Entry]) -> list[Entry]:
    found = {(entry.section, entry.name): entry for entry in old}
    for entry in new:
        if entry.ran or not found.get((entry.section, entry.name), entry).ran:
            found[entry.section, entry.name] = replace(entry, data={})
    order = list(SECTIONS)
    return sorted(found.values(), key=lambda entry: order.index(entry.section))


def report(figures: list[Figure], path: Path | None, *, as_json: bool) -> None:
    """Write figures to a file, if ``path`` names one, and print them."""
    if path is not None:
        store(path, figures)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in figures], indent=1) + "\n")
    else:
        sys.stdout.write(table(figures))


def table(results: Sequence[Figure | Entry]) -> str:
    """Return results as tables for a terminal, with the commands."""
    parts: dict[str, list[dict[str, str]]] = {}
    for each in results:
        if isinstance(each, Entry):
            wrong = "; ".join(each.defects) or each.skip_reason or "none"
            row = {"what": each.name, **each.row, "defects": wrong}
            parts.setdefault(each.section.replace("_", " ").capitalize(), []).append(row)
        elif each.row:
            parts.setdefault(f"{each.group}. {each.table}".strip(), []).append(each.row)
        else:
            met = {None: "", True: "met", False: "**missed**"}[each.met]
            row = {"what": each.name, "measured": each.value, "target": each.target, "": met}
            row |= {"limit": each.limit, "how": each.how}
            parts.setdefault(each.group, []).append(row)
    text = ""
    for name, rows in parts.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [columns, ["---"] * len(columns)]
        lines += [[row.get(column, "") for column in columns] for row in rows]
        text += f"\n## {name}\n\n" + "".join(_line(*cells) + "\n" for cells in lines)
    runs = {(each.date, each.hardware, each.command): None for each in results if each.date}
    measured = "".join(f"\nMeasured {day}, {where}, `{how}`.\n" for day, where, how in runs)
    return text + measured


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "BENCHMARKS.md": benchmarks(read(BENCHMARKS, Figure)),
        "RELIABILITY.md": reliability(read(RELIABILITY, Entry)),
    }


def benchmarks(figures: Iterable[Figure], claims: dict[str, tuple[str, str]] = CLAIMS) -> str:
    """Return the page of performance claims; raises UsageError for a claim without a figure."""
    known = list(figures)
    found = {text: _figures(text, patterns, known) for text, patterns in claims.items()}
    commands = list(dict.fromkeys(_command(e) for each in found.values() for e in each))
    rows = [_row(text, each, commands) for text, each in found.items()]
    missed = [each for each in known if each.met is False]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `python -m qa summary` from [the results](qa/results/benchmarks.json),",
            "which have the hardware of each figure, and the number of samples of most.",
            "Ratios are measured side by side in one run; brackets are 95 % confidence intervals.",
            "A range covers several settings. `A over B` is the time of A divided by that of B.",
            "The published algorithm copies runs of cells in compute graphs (the mover `graph`).",
            "The limit is a physical limit, a reference, or a condition of the measurement.",
            "The last column has the numbers of the [commands](#commands), with their modules.",
            "`make bench` repeats the main groups.",
            "",
            _HEAD,
            *rows,
            "",
            "## Missed targets",
            "",
            "| figure | measured | target | limit |",
            "|---|---|---|---|",
            *(_line(f"{e.group}: {e.name}", e.value, e.target, e.limit) for e in missed),
            "",
            "## Commands",
            "",
            *(f"{number}. {each} in {_source(each)}" for number, each in enumerate(commands, 1)),
            "",
        ]
    )


def _supports(figure: Figure, group: str, name: str) -> bool:
    matches = re.fullmatch(group, figure.group) and re.search(name, figure.name)
    return bool(figure.target and matches)


def _figures(text: str, patterns: tuple[str, str], figures: list[Figure]) -> list[Figure]:
    found = [each for each in figures if _supports(each, *patterns)]
    if not found:
        raise UsageError(f"no figure with a target supports {text!r} ({': '.join(patterns)})")
    return found


def _command(figure: Figure) -> str:
    return f"{figure.date}: `{figure.command}`"


def _source(command: str) -> str:
    """Return a link to the module that measures, for a command of `_command`."""
    found = re.search(r"python -m qa (load|replay|bench (\w+))", command)
    if found is None:
        raise UsageError(f"{command} is no command of a benchmark")
    places = {"load": "load/load_cells.py", "replay": "replay/replay_figures.py"}
    place = places.get(found[1]) or f"bench/{GROUPS[found[2]][0]}.py"
    return f"[{place}](qa/{place})"


def _row(text: str, figures: list[Figure], commands: list[str]) -> str:
    first = figures[0]
    value, limit = first.value, first.limit
    if len(figures) > 1:
        values = sorted((each.median or 0.0, each.value) for each in figures)
        value = f"{_short(values[0][1])} to {_short(values[-1][1])}"
        if len({_short(each) for _, each in values}) == 1:
            value = "; ".join(dict.fromkeys(each for _, each in values))
        limit = limit if {each.limit for each in figures} == {limit} else ""  # of one setting alone
    missed = sum(each.met is False for each in figures)
    result = f"**{missed} of {len(figures)} missed**" if missed else "met"
    target = first.target if all(e.met is None for e in figures) else f"{first.target} ({result})"
    numbers = sorted({commands.index(_command(each)) + 1 for each in figures})
    return _line(text, value, target, limit, ", ".join(map(str, numbers)))


def _short(text: str) -> str:
    """Return the first number of a value, with its interval and unit."""
    found = re.match(r"\d+(?:\.\d+)?(?: \[[^]]*\])?(?: (?:x|us|ms|s)\b)?", text)
    return found.group() if found else text


def reliability(entries: Iterable[Entry]) -> str:
    """Return the page of reliability claims."""
    known = list(entries)
    rows = [
        _line(claim, _counted(members, column, unit), _verdict(members), limit, _last(members))
        for section, (claim, column, unit, limit) in SECTIONS.items()
        if (members := [each for each in known if each.section == section])
    ]
    return "\n".join(
        [
            "# Reliability",
            "",
            "Written by `python -m qa summary` from [the results](qa/results/reliability.json).",
            "`make qa` runs a short version.",
            "",
            _HEAD.replace("target", "defects (target: none)"),
            *rows,
            "",
            "What each section does:",
            "",
            *(f"- *{section}*: {qa.SECTIONS[section]}" for section in SECTIONS),
            "",
            *_open(known),
        ]
    )


def _counted(members: list[Entry], column: str, unit: str) -> str:
    if not column:
        total = sum(int(found[0]) for e in members if (found := re.findall(r"\d+", e.row["ran"])))
    else:
        total = sum(int(e.row[column].replace(",", "")) for e in members if column in e.row)
    return f"{total:,} {unit} ({len(members)} entries)"


def _verdict(members: list[Entry]) -> str:
    found = sum(len(each.defects) for each in members)
    open_ = sum(bool(each.skip_reason) for each in members)
    return f"{found or 'none'}" + (f"; {open_} undecided" if open_ else "")


def _open(entries: list[Entry]) -> Iterator[str]:
    lines = [
        f"- {each.section}, {each.name}: {text}"
        for each in entries
        for text in (*each.defects, *([each.skip_reason] if each.skip_reason else []))
    ]
    if lines:
        yield from ("## Open", "", *lines, "")


def _last(members: list[Entry]) -> str:
    newest = max(members, key=lambda entry: (entry.date, entry.command))
    return f"{newest.date}: `{newest.command}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in cells) + " |"
