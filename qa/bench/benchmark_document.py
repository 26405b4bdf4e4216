"""Write figures into a document and its JSON, keeping those that were not measured again.

Samples are summarized: the repository has no raw measurements.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qa.bench.figure import Figure

HEAD = """# Benchmarks

Written by `python -m qa bench --write qa/results/benchmarks.md`. Every ratio was measured side by
side in one run; brackets are the 95 % confidence interval of a median over interleaved pairs.
Absolute times depend on the load of the machine; compare the ratios.
"""

#: Columns of a table of figures without columns of their own.
HEADINGS = ("what", "measured", "target", "", "limit", "how")


def read(path: Path) -> list[Figure]:
    """Return the figures stored with a document; empty if there are none."""
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
    for group in dict.fromkeys(figure.group for figure in figures):
        members = [figure for figure in figures if figure.group == group]
        parts.append(f"\n## {group}\n\nMeasured {members[0].measured}.")
        plain = [figure for figure in members if not figure.row]
        if plain:
            lines = [_line(figure, members[0].measured) for figure in plain]
            parts.append(_table(list(HEADINGS), lines))
        tables: dict[tuple[str, str], list[dict[str, str]]] = {}
        for each in members:
            if each.row:
                tables.setdefault((each.table, each.measured), []).append(each.row)
        for (caption, measured), rows in tables.items():
            columns = list(dict.fromkeys(name for row in rows for name in row))
            if measured != members[0].measured:
                caption = f"{caption.rstrip('.')}. Measured {measured}."
            parts.append(f"\n{caption}" if caption else "")
            parts.append(_table(columns, [[row.get(name, "") for name in columns] for row in rows]))
    return "\n".join(parts) + "\n"


def _line(figure: Figure, measured: str) -> list[str]:
    met = {None: "", True: "met", False: "**missed**"}[figure.met]
    how = figure.how
    if figure.measured != measured:
        how += f" (measured {figure.measured})"
    return [figure.name, figure.value, figure.target, met, figure.limit, how]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["", _row(columns), "|" + "---|" * len(columns), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def summarized(value: Any) -> Any:
    """Replace each list of more than three samples by their number, quartiles and extremes."""
    if isinstance(value, dict):
        return {name: summarized(part) for name, part in value.items()}
    numbers = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    if not numbers or len(value) <= 3:
        return value
    low, median, high = statistics.quantiles(value, n=4)
    return {
        "n": len(value),
        "quartiles": [low, median, high],
        "min": min(value),
        "max": max(value),
    }


def write(path: Path, figures: list[Figure]) -> None:
    """Write the document and its JSON file."""
    merged = merge(read(path), figures)
    # One line per figure, because some have hundreds of numbers.
    lines = ",\n".join(
        json.dumps(asdict(figure) | {"data": summarized(figure.data)}) for figure in merged
    )
    text = f'{{"figures": [\n{lines}\n]}}\n'
    path.with_suffix(".json").write_text(text, encoding="utf-8")
    path.write_text(render(merged), encoding="utf-8")
