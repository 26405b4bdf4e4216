"""Write figures into BENCHMARKS.md and its JSON, keeping those that were not measured again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pyllamakv.bench.figure import Figure

HEAD = """# Benchmarks

Written by `pyllamakv bench --write BENCHMARKS.md`. Every ratio was measured side by side in one
run; brackets are the 95 % confidence interval of a median over interleaved pairs. Absolute times
drift with the machine: read the ratios. A figure that missed its target says so.
"""


def read(path: Path) -> list[Figure]:
    """Return the figures kept beside a document, none when there are none yet."""
    kept = path.with_suffix(".json")
    if not kept.is_file():
        return []
    return [Figure(**item) for item in json.loads(kept.read_text(encoding="utf-8"))["figures"]]


def merge(old: list[Figure], new: list[Figure]) -> list[Figure]:
    """Replace groups that were measured again, and keep the order of their first appearance."""
    order = list(dict.fromkeys(figure.group for figure in (*old, *new)))
    fresh = {figure.group for figure in new}
    merged = [*(figure for figure in old if figure.group not in fresh), *new]
    return sorted(merged, key=lambda figure: order.index(figure.group))


def render(figures: list[Figure]) -> str:
    """Return the document's text."""
    parts = [HEAD]
    group = measured = ""
    for figure in figures:
        if figure.group != group:
            group = figure.group
            measured = figure.measured
            parts.append(f"\n## {group}\n\nMeasured {measured}.\n")
            parts.append("| what | measured | target | | limit | how |\n|---|---|---|---|---|---|")
        met = {None: "", True: "met", False: "**missed**"}[figure.met]
        how = figure.how
        if figure.measured != measured:
            how += f" (measured {figure.measured})"
        cells = (figure.name, figure.value, figure.target, met, figure.limit, how)
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def write(path: Path, figures: list[Figure]) -> None:
    """Write the document and the JSON beside it."""
    merged = merge(read(path), figures)
    kept = {"figures": [asdict(figure) for figure in merged]}
    path.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    path.write_text(render(merged), encoding="utf-8")
