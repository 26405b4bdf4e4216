"""Look for what is missing on this machine: `pyllamakv doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import typer

from pyllamakv.cli.options import Json

if TYPE_CHECKING:
    from pyllamakv.building.doctor import ProbeResult

app = typer.Typer(add_completion=False)

_SIGNS = {"ok": "ok", "missing": "MISSING", "optional": "-"}


@app.command()
def command(
    as_json: Json = False,
) -> None:
    """Name what is there, what is missing, and the cure; exit 1 if something needed is missing."""
    from pyllamakv.building import doctor

    findings = doctor.examine()
    if as_json:
        json.dump([dataclasses.asdict(finding) for finding in findings], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("".join(_line(finding) for finding in findings))
    if not doctor.healthy(findings):
        raise typer.Exit(1)


def _line(finding: ProbeResult) -> str:
    line = f"{_SIGNS[finding.state]:<8}{finding.name:<10}{finding.found}\n"
    return line + (f"{'':<18}cure: {finding.cure}\n" if finding.cure else "")
