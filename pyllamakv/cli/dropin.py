"""Run llama-cpp-python on stock and patched libraries: `pyllamakv dropin`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pyllamakv.errors import UsageError
from pyllamakv.source.releases import DEFAULT

if TYPE_CHECKING:
    from pyllamakv.peer.trial import Trial

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def setup(
    release: Annotated[str, typer.Argument(help="A release that is a llama-cpp-python.")] = DEFAULT,
    as_json: Json = False,
) -> None:
    """Install the matching llama-cpp-python, without a library, and print its Python."""
    from pyllamakv.cli import showing
    from pyllamakv.peer import install
    from pyllamakv.source import releases

    with showing.progress() as progress:
        found = install.install(releases.resolve(release), progress=progress)
    if as_json:
        facts = {"version": found.version, "python": str(found.python), "suite": str(found.suite)}
        json.dump(facts, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    sys.stdout.write(f"{found.python}\n")


@app.command()
def test(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]…")] = None,
    *,
    sample: Annotated[bool, typer.Option("--sample", help="One release per era as well.")] = False,
    backend: Annotated[str, typer.Option("--backend", help="cpu (default), cuda, ….")] = "cpu",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of docs/drop-in.md.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run its own tests on stock and on patched, and decode where free cells lie scattered.

    Exit status 1 when a test passes on stock and not on patched, or patched finds no slot.
    """
    from pyllamakv.cli import showing
    from pyllamakv.peer import trial
    from pyllamakv.source import releases

    if as_json and markdown:
        raise UsageError("choose one of --json and --markdown")
    wanted = [*(names or ([] if sample else [DEFAULT])), *(_one_per_era() if sample else ())]
    chosen = {release.name: release for release in map(releases.resolve, wanted)}
    found: list[Trial] = []
    with showing.progress() as progress:
        for release in sorted(chosen.values(), key=lambda release: release.order):
            one = trial.run(release, backend=backend, progress=progress)
            found.append(one)
            if not (as_json or markdown):
                sys.stdout.write(_text(one))
    if as_json:
        json.dump([one.to_json() for one in found], sys.stdout, indent=2)
        sys.stdout.write("\n")
    if markdown:
        sys.stdout.write(trial.markdown(found))
    if any(one.faults for one in found):
        raise typer.Exit(1)


def _one_per_era() -> list[str]:
    """Return the releases of `matrix --sample` that are a llama-cpp-python, oldest first."""
    from pyllamakv.source import lock

    chosen: dict[str, str] = {}
    for release in lock.load(lock.shipped()):
        if release.kind == "sdist" and chosen.get(release.era) != DEFAULT:
            chosen[release.era] = release.name
    return list(chosen.values())


def _text(one: Trial) -> str:
    lines = [f"llama-cpp-python {one.release}"]
    for name, side in (("stock", one.stock), ("patched", one.patched)):
        lines.append(f"  {name:<8} its own tests: {side.suite}")
        lines.append(f"  {'':<8} scattered cells: {side.slots}")
    lines += [f"  FAULT    {fault}" for fault in one.faults]
    return "\n".join(lines) + "\n"
