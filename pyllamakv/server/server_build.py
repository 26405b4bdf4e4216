"""Build llama-server for a variant: upstream's server code, linked with the variant's libraries.

The libraries are not compiled again. The build uses no network: downloads of models, HTTPS and web
pages that are not in the release are left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pyllamakv.building import build, cmake, variant
from pyllamakv.errors import BuildError, Unsupported
from pyllamakv.patching import port_choice, trees
from pyllamakv.server import server_artifact, server_patches
from pyllamakv.server.server_artifact import PROGRAM, BuiltServer, ServerManifest
from pyllamakv.source import spec_resolver
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import BuildRequest, Spec, Variant
    from pyllamakv.server.server_patches import ServerSources
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

log = logging.getLogger(__name__)

#: Where releases keep the server; the second one through 0.3.8.
_PLACES = ("tools/server", "examples/server")


def build_server(
    spec: str | Spec,
    *,
    patches: str = "",
    backend: str = "cpu",
    native: bool = True,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> BuiltServer:
    """Return the server of the variant that ``spec`` names, building what is missing.

    ``patches`` is the series (default: the shipped one). Raises the errors of
    `building.build.build`. Raises Unsupported for a release without a server, before its libraries
    are compiled.
    """
    parsed = variant.parse(spec) if isinstance(spec, str) else spec
    if patches and parsed.series != ():
        return _build_foreign(
            parsed, patches, backend=backend, native=native, jobs=jobs, progress=progress
        )
    lock = port_choice.lock_of(patches)
    wanted = variant.request(spec, backend=backend, native=native, lock=lock)
    library = variant.lookup(wanted)
    found = library and server_artifact.lookup(library)
    if found:
        return found
    _check_sources(wanted.release, progress)
    library = build.build(
        spec, backend=backend, native=native, jobs=jobs, lock=lock, progress=progress
    )
    sources = server_patches.choose(wanted.release, wanted.spec.series, progress=progress)
    return build_sources(wanted, library, sources, jobs=jobs, progress=progress)


def _build_foreign(
    spec: Spec,
    patches: str,
    *,
    backend: str,
    native: bool,
    jobs: int | None,
    progress: Progress | None,
) -> BuiltServer:
    """Return the server of a release with patches of another series."""
    series = port_choice.load_series(patches)
    release = spec_resolver.resolve(spec.release, series.lock)
    _check_sources(release, progress)
    # A series that changes only the server is linked with the libraries of stock.
    names = spec.series if len(series) else ()
    library = build.build_series(
        spec.release, names, patches, backend=backend, native=native, jobs=jobs, progress=progress
    )
    sources = server_patches.choose(release, spec.series, series=series, progress=progress)
    # The sources replace those of the request, which no spec can name.
    plain = variant.Spec(release.name, ())
    wanted = variant.request_of(release, plain, backend=backend, native=native)
    name = server_artifact.server_id(library, sources.tree)
    return build_sources(wanted, library, sources, name=name, jobs=jobs, progress=progress)


def build_sources(
    wanted: BuildRequest,
    library: Variant,
    sources: ServerSources,
    *,
    name: str = "",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> BuiltServer:
    """Return the server that is built from ``sources`` for the libraries of a variant.

    It is the server of the variant, or the one with the directory ``name`` in ``servers/``. An
    existing one is not built again. Raises the errors of `building.build.build`.
    """
    folder = wanted.objects.with_name(f"{wanted.objects.name}-server")
    target = server_artifact.servers() / (name or server_artifact.server_id(library))
    before = _cpu_seconds()
    with build.locked_sources(wanted, folder, progress, tree=sources.tree) as (_, job):
        found = BuiltServer(target, library)
        if found.program.is_file():
            return found
        job = _with_ceiling(job, wanted)
        cmake.configure(job, server_artifact.project(), _definitions(wanted, library))
        cmake.compile_targets(job, (PROGRAM,), jobs or build.default_jobs())
        made = _publish(folder, target, library, sources, _cpu_seconds() - before)
    log.info("built %s in %.1f CPU seconds", made.id, made.manifest.cpu_seconds)
    return made


def _check_sources(release: Release, progress: Progress | None) -> None:
    """Raise Unsupported for a release without a server; it is fetched if it is absent."""
    with build.writable():
        store = open_store()
        release = trees.ensure_fetched(store, release, progress)
    if not any(store.ls(release, f"{place}/CMakeLists.txt") for place in _PLACES):
        raise Unsupported(
            f"release {release.name} contains no llama-server: expected {' or '.join(_PLACES)} in "
            "its sources; choose another release, or leave out --server",
            "server",
        )


def _with_ceiling(job: cmake.BuildSession, wanted: BuildRequest) -> cmake.BuildSession:
    """Return the session with a limit for git, which old releases run while they compile."""
    env = {**job.env, "GIT_CEILING_DIRECTORIES": str(wanted.tree.parent)}
    return cmake.BuildSession(job.folder, job.log, env, job.report, job.held)


def _definitions(wanted: BuildRequest, library: Variant) -> dict[str, str]:
    """Return the CMake variables: those of the variant without the options of ggml."""
    usual = build.definitions(wanted, library.id)
    kept = {name: value for name, value in usual.items() if name.startswith("CMAKE_")}
    return kept | {
        "PLK_LLAMA_SRC": str(wanted.tree),
        "PLK_LIBRARIES": str(library.dropin),
        "PLK_RPATH": f"../../{variant.built().name}/{library.id}/{library.dropin.name}",
    }


def _publish(
    folder: Path, target: Path, library: Variant, sources: ServerSources, spent: float
) -> BuiltServer:
    """Copy the program into ``servers/`` under a temporary name, and rename it to ``target``."""
    program = folder / PROGRAM
    if not program.is_file():
        raise BuildError(f"expected {PROGRAM} in {folder}, found none; see {folder / 'build.log'}")
    name = target.name
    stage = target.with_name(f".{name}.{os.getpid()}.part")
    for old in (*target.parent.glob(f".{name}.*.part"), target):
        shutil.rmtree(old, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        shutil.copy2(program, stage / PROGRAM)
        probed = json.loads((folder / "server.json").read_text(encoding="utf-8"))
        ServerManifest(
            server=name,
            variant=library.id,
            release=library.manifest.release,
            patches=library.manifest.patches,
            backend=library.manifest.backend,
            page=bool(probed["page"]),
            sha256=hashlib.sha256(program.read_bytes()).hexdigest(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            cpu_seconds=round(spent, 1),
            server_patches=sources.patches,
            left_out=sources.left_out,
            carried=sources.carried,
        ).save(stage)
        stage.rename(target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return BuiltServer(target, library)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
