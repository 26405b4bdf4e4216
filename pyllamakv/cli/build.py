"""Build a release: `pyllamakv build`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import Backend, Json
from pyllamakv.errors import UsageError
from pyllamakv.source.releases import DEFAULT_RELEASE

if TYPE_CHECKING:
    from pyllamakv.building.variant import Spec, Variant

app = typer.Typer(add_completion=False)


@app.command()
def command(
    release: Annotated[
        str, typer.Argument(help="0.3.9, b4980, git:URL@REF, path:DIR; or a variant, 0.3.9+stock.")
    ] = DEFAULT_RELEASE,
    *,
    series: Annotated[
        str | None, typer.Option("--series", help="Build with these patches only: a,b.")
    ] = None,
    stock: Annotated[bool, typer.Option("--stock", help="Build without any patch only.")] = False,
    both: Annotated[
        bool, typer.Option("--all", help="Build stock and patched (the default).")
    ] = False,
    backend: Backend = "cpu",
    portable: Annotated[
        bool, typer.Option("--portable", help="Do not tune for this machine's processor.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Compilers to run at once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build a release, stock and patched; what is built already costs nothing."""
    from pyllamakv.building.build import build
    from pyllamakv.cli import progress_bar

    if stock + both + (series is not None) > 1:
        raise UsageError("choose one of --series, --stock and --all")
    built: list[tuple[Spec, Variant]] = []
    with progress_bar.progress() as progress:
        for spec in _specs(release, series, stock=stock, both=both):
            variant = build(
                spec, backend=backend, native=not portable, jobs=jobs, progress=progress
            )
            built.append((spec, variant))
            if not as_json:
                sys.stdout.write(_text(spec, variant))
    if as_json:
        json.dump([_facts(spec, variant) for spec, variant in built], sys.stdout, indent=2)
        sys.stdout.write("\n")


def _specs(release: str, series: str | None, *, stock: bool, both: bool) -> list[Spec]:
    from pyllamakv.building.variant import Spec, parse

    spec = parse(release)
    named = spec.release != release.strip()
    if named and (stock or both or series is not None):
        raise UsageError(f"{release!r} names its series already; leave out the option")
    if named:
        return [spec]
    if stock:
        return [Spec(release, ())]
    if series is not None:
        return [parse(f"{release}+{series}")]
    return [Spec(release, ()), Spec(release, None)]


def _text(spec: Spec, variant: Variant) -> str:
    manifest = variant.manifest
    lines = [
        f"{spec}",
        f"  id            {variant.id}",
        f"  folder        {variant.folder}",
        f"  patches       {', '.join(manifest.patches) or 'none (stock)'}",
        f"  devices       {', '.join(manifest.devices) or 'not told'}",
        f"  capabilities  {', '.join(manifest.capabilities) or 'none'}",
    ]
    absent = sorted(key for key, value in manifest.probes.items() if value is None)
    if absent:
        lines.append(f"  absent        {', '.join(absent)}")
    return "\n".join(lines) + "\n"


def _facts(spec: Spec, variant: Variant) -> dict[str, Any]:
    return {
        "spec": str(spec),
        "id": variant.id,
        "folder": str(variant.folder),
        "library": str(variant.library),
        "manifest": variant.manifest.to_json(),
    }
