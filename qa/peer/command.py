"""`python -m qa peer`: run llama-cpp-python's tests on stock and patched libraries."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.errors import UsageError
from pyllamakv.source import spec_resolver
from pyllamakv.source.releases import TEST_RELEASE

if TYPE_CHECKING:
    from qa.peer.peer_comparison import PeerComparison

app = typer.Typer(add_completion=False)


@app.command()
def peer(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]…")] = None,
    *,
    sample: Annotated[
        bool, typer.Option("--sample", help="Test one release per era as well.")
    ] = False,
    backend: Annotated[str, typer.Option("--backend", help="cpu (default), cuda, ….")] = "cpu",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of docs/drop-in.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run llama-cpp-python's own tests on stock and patched, and a decode into scattered cells.

    Exits with 1 if a test passes on stock only, or patched finds no slot.
    """
    from pyllamakv.cli import progress_bar
    from qa.peer import peer_comparison

    if as_json and markdown:
        raise UsageError("choose one of --json and --markdown")
    wanted = [
        *(names or ([] if sample else [TEST_RELEASE])),
        *(_one_per_era() if sample else ()),
    ]
    chosen = {release.name: release for release in map(spec_resolver.resolve, wanted)}
    found: list[PeerComparison] = []
    with progress_bar.progress() as progress:
        for release in sorted(chosen.values(), key=lambda release: release.order):
            one = peer_comparison.run(release, backend=backend, progress=progress)
            found.append(one)
            if not (as_json or markdown):
                sys.stdout.write(_text(one))
    if as_json:
        json.dump([one.to_json() for one in found], sys.stdout, indent=2)
        sys.stdout.write("\n")
    if markdown:
        sys.stdout.write(peer_comparison.markdown(found))
    if any(one.faults for one in found):
        raise typer.Exit(1)


def _one_per_era() -> list[str]:
    """Return the sampled releases that are versions of llama-cpp-python, oldest first."""
    from pyllamakv.source import lockfile

    chosen: dict[str, str] = {}
    for release in lockfile.load(lockfile.shipped()):
        if release.kind == "sdist" and chosen.get(release.era) != TEST_RELEASE:
            chosen[release.era] = release.name
    return list(chosen.values())


def _text(one: PeerComparison) -> str:
    lines = [f"llama-cpp-python {one.release}"]
    for name, side in (("stock", one.stock), ("patched", one.patched)):
        lines.append(f"  {name:<8} its own tests: {side.suite}")
        lines.append(f"  {'':<8} scattered cells: {side.slots}")
    lines += [f"  FAULT    {fault}" for fault in one.faults]
    return "\n".join(lines) + "\n"
