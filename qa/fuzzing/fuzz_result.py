"""The result of a target, and its files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyllamakv.home import home
from qa.entry import Entry, strip_directories
from qa.fuzzing.fuzz_loop import FuzzFinding

#: Numbers that are summed over processes and runs of a target.
SUMS = ("inputs", "accepted", "refused", "seconds", "cpu")


@dataclass
class FuzzResult:
    """The numbers of a target, and each finding once. Seconds are wall and CPU time.

    ``accepted`` and ``refused`` are both 0 if they are not counted.
    """

    inputs: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    coverage: int = 0
    total: int = 0
    corpus: int = 0
    corpus_bytes: int = 0
    accepted: int = 0
    refused: int = 0
    findings: dict[str, FuzzFinding] = field(default_factory=dict)

    def add(self, finding: FuzzFinding) -> None:
        """Add a finding, unless it is known."""
        self.findings.setdefault(f"{finding.what} {finding.where}", finding)


def known(name: str) -> list[Path]:
    """Return the inputs in the data directory that ended with a finding: each run repeats them."""
    folder = home() / "fuzzing" / name
    return sorted(folder.iterdir()) if folder.is_dir() else []


def entry(name: str, outcome: FuzzResult, seed: int, unit: str = "lines") -> Entry:
    """Return the row of a target, and save its findings in the data directory."""
    again, defects = [_place(name, path.name) for path in known(name)], []
    for finding in outcome.findings.values():
        path = home() / "fuzzing" / name / hashlib.sha256(finding.data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(finding.data)
        said = f"{strip_directories(finding.what)} {finding.where}".strip()
        defects.append(f"{said} ({_place(name, path.name)})")
    data = {key: value for key, value in vars(outcome).items() if key != "findings"}
    data |= {"unit": unit, "seeds": [seed], "again": again}
    return Entry("fuzzing", name, _row(data), tuple(defects), seed, data)


def _place(name: str, file: str) -> str:
    return f"the input is fuzzing/{name}/{file} in the data directory"


def seeds(entry: Entry) -> list[int | None]:
    """Return the seeds that an entry sums up."""
    found: list[int | None] = entry.data.get("seeds", [entry.seed])
    return found


def added(before: Entry, now: Entry) -> Entry:
    """Return the sum of two entries of a target with different seeds.

    Findings of the earlier one stay, unless the later one ran that input again: existing defects
    are found again. An entry that could not run adds nothing.
    """
    if not (before.data and now.data):
        return now if now.data else before
    data = dict(now.data)
    for name in SUMS:
        data[name] += before.data.get(name, 0)
    if before.data["total"] == data["total"] and before.data["coverage"] > data["coverage"]:
        # Only lines of the same code are comparable.
        data |= {name: before.data[name] for name in ("coverage", "corpus", "corpus_bytes")}
    data["seeds"] = [*seeds(before), *seeds(now)]
    again = data.pop("again", [])
    data["since"] = before.data.get("since", before.measured[: len("2026-11-22")])
    stay = [said for said in before.defects if not any(place in said for place in again)]
    defects = tuple(dict.fromkeys((*stay, *now.defects)))
    earlier = len(data["seeds"]) - 1
    measured = f"{now.measured} and {earlier} earlier runs since {data['since']}"
    return replace(now, row=_row(data), defects=defects, data=data, measured=measured)


def _row(data: dict[str, Any]) -> dict[str, str]:
    """Return the columns.

    The total number of lines is omitted: modules have functions that the target never calls.
    """
    rate = data["inputs"] / data["cpu"] if data["cpu"] else 0.0
    judged = data["accepted"] + data["refused"]
    return {
        "inputs": f"{data['inputs']:,}",
        "accepted": f"{100 * data['accepted'] / judged:.3g} %" if judged else "",
        "CPU seconds": f"{data['cpu']:,.0f}",
        "per CPU second": f"{rate:,.0f}",
        "reached": f"{data['coverage']:,} {data['unit'] if data['total'] else 'answers'}",
        "corpus": f"{data['corpus']} inputs, {-(-data['corpus_bytes'] // 1024)} KB",
        "seed": ", ".join(map(str, data["seeds"])),
    }
