"""Hold what came of a target, and write it down."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from pyllamakv.home import home
from pyllamakv.trust.entry import Entry
from pyllamakv.trust.fuzzing.loop import Finding


@dataclass
class Outcome:
    """Hold the numbers of a target, and each finding once. Seconds are of the wall and the CPU."""

    inputs: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    coverage: int = 0
    total: int = 0
    corpus: int = 0
    corpus_bytes: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Keep a finding, unless the same was found before."""
        self.findings.setdefault(f"{finding.what} {finding.where}", finding)


def entry(name: str, outcome: Outcome, seed: int, unit: str = "lines") -> Entry:
    """Return the line of a target, and save what it found below the home."""
    defects = []
    for finding in outcome.findings.values():
        path = home() / "fuzzing" / name / hashlib.sha256(finding.data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(finding.data)
        said = f"{finding.what} {finding.where}".strip()
        defects.append(f"{said} (the input is fuzzing/{name}/{path.name} in the home)")
    rate = outcome.inputs / outcome.seconds if outcome.seconds else 0.0
    of = f" of {outcome.total} {unit}" if outcome.total else " answers"
    row = {
        "inputs": f"{outcome.inputs:,}",
        "CPU seconds": f"{outcome.cpu:,.0f}",
        "per second": f"{rate:,.0f}",
        "reached": f"{outcome.coverage}{of}",
        "corpus": f"{outcome.corpus} inputs, {-(-outcome.corpus_bytes // 1024)} KB",
        "seed": str(seed),
    }
    data = {key: value for key, value in vars(outcome).items() if key != "findings"}
    return Entry("fuzzing", name, row, tuple(defects), seed, data)
