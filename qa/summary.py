"""`python -m qa summary`: write BENCHMARKS.md and RELIABILITY.md from the results.

Each page has one row per claim: the figure, its target, the physical limit or the scope, and the
command that measured it. All figures are in ``qa/results``. BENCHMARKS.md lists all missed targets,
also those of figures that no claim covers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

import qa
from pyllamakv.errors import UsageError
from pyllamakv.source.files import write_text_atomic
from qa import document as stress
from qa.bench import benchmark_document as bench
from qa.bench.figure import Figure
from qa.entry import Entry

app = typer.Typer(add_completion=False)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "qa" / "results"

_HEAD = "| claim | figure | target | limit | command |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Claim:
    """A sentence about the package, and the figures that support it: their groups and names.

    ``group`` is a regular expression for the whole name of a group, and ``name`` one for a part of
    a figure's name. At least one figure with a target must match. With several figures, the row
    shows the range of their first numbers, and the target is met if all meet it.
    """

    text: str
    group: str
    name: str


CLAIMS = (
    Claim(
        "Importing the package is fast compared to importing its dependencies",
        "What Python costs",
        "`import pyllamakv`",
    ),
    Claim(
        "A Python decode call with its logits takes microseconds more than the C call",
        "What Python costs",
        "one decode call",
    ),
    Claim(
        "A snapshot of 4,096 cells with statistics takes under 200 µs",
        "What Python costs",
        "a snapshot",
    ),
    Claim(
        "The default number of threads takes at most twice as long as the best, also on busy CPUs",
        "Threads on a busy machine",
        "the default over the best",
    ),
    Claim(
        "Decoding from Python is as fast as plain C",
        "The decode loop",
        r"(greedy|logits only), 8 sequences(, 16 steps a call)?$",
    ),
    Claim(
        "Defragmentation with flash attention is as fast as copying the rows",
        "A complete defragmentation",
        "with flash attention, .* over a strided copy",
    ),
    Claim(
        "Without flash attention, moving alternating cells takes at most 3 times a memcpy",
        "A complete defragmentation",
        "no flash attention, alternate cells, over memcpy",
    ),
    Claim(
        "Defragmentation is never slower than the published algorithm",
        "A complete defragmentation",
        "every workload: the published algorithm over the patch",
    ),
    Claim(
        "Planning takes at most 2 % of a defragmentation",
        "A complete defragmentation",
        "the plan, as a fraction",
    ),
    Claim(
        "A patched library decodes as fast as stock if nothing is defragmented",
        "A complete defragmentation",
        "decode without defragmentation, patched over stock",
    ),
    Claim(
        "Compaction restores the decode speed of a fresh cache",
        "A sparse cache",
        "32768 cells, 200 live at the end, no flash",
    ),
    Claim(
        "Compaction restores the decode speed of a fresh cache on a GPU",
        "On a device: cuda, .*",
        "live at the end",
    ),
    Claim(
        "On a GPU, patched passes the scenarios of the newest verified release that stock fails",
        "On a device: cuda, b.*",
        "^scenarios on",
    ),
    Claim(
        "The cache managers add at most 5 % to the time of the same decodes by hand",
        "Cache managers",
        "",
    ),
    Claim(
        "`Batcher` generates as many tokens per CPU second as llama-cpp-python, or more",
        "Generation",
        "client",
    ),
    Claim(
        "A prefix cache with enough room reuses all that earlier prompts of real traffic had",
        "Eviction",
        "unlimited",
    ),
    Claim(
        "A known prefix of 1,000 tokens takes at most 5 % of the time of evaluating it",
        "Peers",
        "over evaluating them",
    ),
    Claim(
        "A known prefix of 1,000 tokens is continued as soon as by llama-server of the same build",
        "Peers",
        "over llama-server",
    ),
    Claim(
        "A memory-mapped cache decodes as fast as one on the heap",
        "Mapped memory",
        "decoding after",
    ),
    Claim(
        "A kept cache replaces the evaluation of a prompt after a restart",
        "Mapped memory",
        "the next token after a prompt",
    ),
    Claim(
        "A patched llama-server loses no request of a load that aborts stock",
        "llama-server 0.3.9, shift",
        "^patched",
    ),
    Claim(
        "A patched llama-server loses no request of this load on later releases",
        r"llama-server (?!0\.3\.9,).*, shift",
        "^patched",
    ),
    Claim(
        "A patched llama-server loses no request of recorded traffic, scaled down",
        "llama-server .*, trace",
        "^patched",
    ),
    Claim(
        "A patched llama-server loses no request whose answer fits into its slot",
        "llama-server .*, fits(, .*)?",
        "^patched",
    ),
    Claim(
        "A patched llama-server needs no more CPU time per token than stock",
        "llama-server .*, (fits|shift|trace)(, .*)?",
        "^CPU per token, patched",
    ),
    Claim(
        "A patched llama-server has the latency of stock, by 95th percentiles",
        "llama-server .*, (fits|shift|trace)(, .*)?",
        "^p95",
    ),
    Claim(
        "`Batcher` needs no more CPU time per token than llama-server of the same build",
        "llama-server .*, fits(, .*)?",
        "^CPU per token, batcher",
    ),
    Claim(
        "`Batcher` generates as many tokens per second as llama-server of the same build",
        "llama-server .*, fits(, .*)?",
        "^tokens per second, batcher",
    ),
    Claim(
        "The digest that identifies a model adds nothing to saves and restores in one process",
        "The identity of a model",
        "^save and restore",
    ),
    Claim(
        "A patched llama-server with a threshold halves the CPU time per token of a sparse cache",
        "llama-server, a sparse cache",
        "",
    ),
)

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
        "Quick scenarios and header tests detect the slips of a maintainer",
        "tried",
        "slips",
        "the slips that qa/slips/slips.toml lists",
    ),
    "fuzzing": (
        "No input of a parser or C entry point ends or hangs the process",
        "inputs",
        "inputs",
        "random inputs; guided by coverage if the build measures it",
    ),
    "faults": (
        "Kills, full disks and I/O errors leave a state that the next run repairs",
        "faults",
        "faults",
        "Linux only; faults in file system calls of one process tree",
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
    "defects": (
        "Defects that were found stay fixed",
        "defects fixed",
        "defects with regression tests",
        "tests of releases that are not built are skipped",
    ),
}


@app.command()
def summary(
    check: bool = typer.Option(False, "--check", help="Compare only; exits 1 if a page is stale."),
) -> None:
    """Write BENCHMARKS.md and RELIABILITY.md from qa/results."""
    stale = [
        name
        for name, text in pages().items()
        if (ROOT / name).read_text(encoding="utf-8") != text
    ]  # fmt: skip
    if check:
        sys.stdout.write("".join(f"stale: {name}\n" for name in stale))
        raise typer.Exit(1 if stale else 0)
    for name in write():
        sys.stdout.write(f"{name}\n")


def write() -> list[str]:
    """Write the pages, and return their names."""
    made = pages()
    for name, text in made.items():
        write_text_atomic(ROOT / name, text)
    return [*made]


def written(path: Path) -> None:
    """Write the pages if ``path``, a document that was just written, is one of the results."""
    if path.resolve().parent == RESULTS:
        write()


def report(figures: list[Figure], path: Path | None, *, as_json: bool) -> None:
    """Write figures to a document, if ``path`` names one, and print them."""
    if path is not None:
        bench.write(path, figures)
        written(path)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in figures], indent=1) + "\n")
    else:
        sys.stdout.write(bench.render(figures))


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "BENCHMARKS.md": benchmarks(bench.read(RESULTS / "benchmarks.md")),
        "RELIABILITY.md": reliability(stress.read(RESULTS / "reliability.md")),
    }


def benchmarks(figures: Iterable[Figure], claims: Iterable[Claim] = CLAIMS) -> str:
    """Return the page of performance claims; raises UsageError for a claim without a figure."""
    known = list(figures)
    rows = [_row(claim.text, _figures(claim, known)) for claim in claims]
    missed = [each for each in known if each.met is False]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `python -m qa summary` from [all figures](qa/results/benchmarks.md).",
            "Ratios are measured side by side in one run; brackets are 95 % confidence intervals.",
            "A range covers several settings. `A over B` is the time of A divided by that of B.",
            "The published algorithm copies runs of cells in compute graphs (the mover `graph`).",
            "The limit is a physical limit, a reference, or a condition of the measurement.",
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
        ]
    )


def _figures(claim: Claim, figures: list[Figure]) -> list[Figure]:
    found = [
        each
        for each in figures
        if each.target
        and re.fullmatch(claim.group, each.group)
        and re.search(claim.name, each.name)
    ]
    if not found:
        msg = f"no figure with a target supports {claim.text!r} ({claim.group}: {claim.name!r})"
        raise UsageError(msg)
    return found


def _row(text: str, figures: list[Figure]) -> str:
    first = figures[0]
    value, limit = first.value, first.limit
    if len(figures) > 1:
        values = sorted((_number(each.value), each.value) for each in figures)
        value = f"{_short(values[0][1])} to {_short(values[-1][1])}"
        if len({_short(each) for _, each in values}) == 1:
            value = "; ".join(dict.fromkeys(each for _, each in values))
        limit = limit if {each.limit for each in figures} == {limit} else ""  # of one setting alone
    met = all(each.met for each in figures)
    missed = sum(not each.met for each in figures)
    target = f"{first.target} ({'met' if met else f'**{missed} of {len(figures)} missed**'})"
    commands = dict.fromkeys(
        _command(measured) for measured in sorted({e.measured for e in figures})
    )
    return _line(text, value, target, limit, "; ".join(commands))


def _number(text: str) -> float:
    found = re.search(r"\d+(?:\.\d+)?", text)
    return float(found.group()) if found else 0.0


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
            "Written by `python -m qa summary` from [all results](qa/results/reliability.md),",
            "which list each defect that was found and fixed. `make qa` runs a short version.",
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
    newest: Callable[[Entry], str] = lambda each: each.measured[:10]  # noqa: E731
    return _command(max(members, key=newest).measured)


def _command(measured: str) -> str:
    found = re.search(r"`[^`]+`.*$", measured)
    return f"{measured[:10]}: {found.group()}" if found else measured


def _line(*cells: str) -> str:
    return "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in cells) + " |"
