"""Build a release: `pyllamakv build`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import (
    Backend,
    BuildServer,
    Json,
    Patches,
    Portable,
    ReleaseOrVariant,
    Series,
)
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import UsageError

if TYPE_CHECKING:
    from pyllamakv.building.variant import Spec, Variant
    from pyllamakv.server.server_artifact import BuiltServer

app = typer.Typer(add_completion=False)


@app.command()
def command(
    release: ReleaseOrVariant = "",
    *,
    patches: Patches = "",
    series: Series = "",
    stock: Annotated[bool, typer.Option("--stock", help="Build stock only.")] = False,
    backend: Backend = "cpu",
    portable: Portable = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Parallel compilers; default: by CPUs and memory."
        ),
    ] = None,
    server: BuildServer = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List built and prebuilt variants; build nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build a release, stock and patched; finished builds are reused."""
    if listed:
        if release or patches or series or stock or portable or jobs or server or backend != "cpu":
            raise UsageError("--list has no other option than --json")
        _list(as_json=as_json)
        return
    from pyllamakv.building.build import build_series, check_series
    from pyllamakv.building.variant import find
    from pyllamakv.cli import progress_bar
    from pyllamakv.server.server_build import build_server
    from pyllamakv.source import verified

    if stock and (series or patches):
        raise UsageError("choose one of --series, --patches and --stock")
    built: list[tuple[Spec, Variant, BuiltServer | None]] = []
    options: Any = {"backend": backend, "native": not portable, "jobs": jobs}
    specs = _specs(release or verified.newest().name, series, stock=stock)
    for spec in specs:
        there = not patches and find(spec, backend=backend, native=not portable)
        if spec.series != () and not there:
            check_series(spec.release, spec.series, patches)
    with progress_bar.progress() as progress:
        for spec in specs:
            words: Any = {**options, "patches": patches, "progress": progress}
            made = build_server(spec, **words) if server else None
            variant = made.variant if made else build_series(spec.release, spec.series, **words)
            built.append((spec, variant, made))
            if not as_json:
                write_lines(_text(spec, variant, made))
    if as_json:
        write_json([_facts(*each) for each in built])


def _specs(release: str, series: str, *, stock: bool) -> list[Spec]:
    from pyllamakv.building.variant import Spec, parse

    spec = parse(release)
    named = spec.release != release.strip()
    if named and (stock or series):
        raise UsageError(f"{release!r} already names a series: omit --series and --stock")
    if named:
        return [spec]
    if stock:
        return [Spec(release, ())]
    if series:
        return [parse(f"{release}+{series}")]
    return [Spec(release, ()), Spec(release, None)]


def _list(*, as_json: bool) -> None:
    from pyllamakv.open_variant import variants

    known = variants()
    if as_json:
        write_json([{"id": each.id, "origin": each.origin, **_files(each)} for each in known])
        return
    width = max((len(each.id) for each in known), default=0)
    for each in known:
        tuned = each.manifest.options.get("GGML_NATIVE") == "ON"
        kind = "tuned" if tuned else "portable"
        write_lines([f"{each.id:<{width}}  {kind:<8}  {each.origin}"])
    if not known:
        note("nothing is built: `pyllamakv build` builds the newest verified release")


def _text(spec: Spec, variant: Variant, server: BuiltServer | None = None) -> list[str]:
    manifest = variant.manifest
    lines = [
        f"{spec}",
        f"  id            {variant.id}",
        f"  folder        {variant.folder}",
        f"  patches       {', '.join(manifest.patches) or 'none (stock)'}",
        *_carried(manifest.carried),
        f"  devices       {', '.join(manifest.devices) or 'unknown'}",
        f"  capabilities  {', '.join(manifest.capabilities) or 'none'}",
    ]
    absent = sorted(key for key, value in manifest.probes.items() if value is None)
    if absent:
        lines.append(f"  absent        {', '.join(absent)}")
    if server:
        page = "" if server.manifest.page else " (without web page)"
        lines.append(f"  server        {server.program}{page}")
        if server.manifest.server_patches:
            lines.append(f"  its patches   {', '.join(server.manifest.server_patches)}")
            lines += _carried(server.manifest.carried)
        lines += [f"  left out      {id_}: {why}" for id_, why in server.manifest.left_out.items()]
    return lines


def _carried(bases: dict[str, str]) -> list[str]:
    return [f"  carried       {id_} from port {base}" for id_, base in sorted(bases.items())]


def _facts(spec: Spec, variant: Variant, server: BuiltServer | None = None) -> dict[str, Any]:
    facts = {} if server is None else {"server": dataclasses.asdict(server.manifest)}
    return facts | {"spec": str(spec), "id": variant.id, **_files(variant)}


def _files(variant: Variant) -> dict[str, Any]:
    return {
        "folder": str(variant.folder),
        "library": str(variant.library),
        "manifest": variant.manifest.to_json(),
    }
