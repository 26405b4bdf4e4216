"""Find missing tools on this machine: `pyllamakv doctor`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from pyllamakv.cli.options import Json
from pyllamakv.cli.stdout import write_json, write_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.doctor import ProbeResult

app = typer.Typer(add_completion=False)

_SIGNS = {"ok": "ok", "missing": "MISSING", "optional": "-"}


@app.command()
def command(
    as_json: Json = False,
) -> None:
    """List required tools and how to install missing ones; exits 1 if one is missing."""
    from pyllamakv.building import doctor

    findings = doctor.examine()
    if as_json:
        write_json([dataclasses.asdict(finding) for finding in findings])
    else:
        write_lines(line for finding in findings for line in _lines(finding))
    if not doctor.healthy(findings):
        raise typer.Exit(1)


def _lines(finding: ProbeResult) -> Iterator[str]:
    yield f"{_SIGNS[finding.state]:<8}{finding.name:<10}{finding.found}"
    if finding.hint:
        yield f"{'':<18}fix: {finding.hint}"
