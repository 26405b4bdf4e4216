"""Build a variant: one lock per release, one build folder per set of options, results in one step.

A killed build leaves its build directory, which the next build continues, and nothing in
``built/``: the directory of a variant is renamed into it when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from pyllamakv.building import artifacts, backend, cmake, compiler, cuda, nvidia, variant
from pyllamakv.building.artifacts import Source
from pyllamakv.cpus import usable_cpus
from pyllamakv.errors import BuildError
from pyllamakv.home import home, shim
from pyllamakv.source.files import inheritable_lock, translate_disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyllamakv.building.variant import BuildRequest, Spec, Variant
    from pyllamakv.patching.apply import PatchedRelease
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release

log = logging.getLogger(__name__)

_TARGETS = ("plk", "plk_dropin")

#: Memory per compiler; one file of an old release takes two thirds of it.
_BYTES_PER_JOB = 1 << 30


def build(
    spec: str | Spec,
    *,
    backend: str = "cpu",
    native: bool = True,
    jobs: int | None = None,
    options: Mapping[str, str] | None = None,
    paths: Mapping[str, str] | None = None,
    lock: Path | None = None,
    progress: Progress | None = None,
) -> Variant:
    """Return the variant that ``spec`` names, building what is missing.

    ``options`` are CMake variables besides those of the backend, which the variant's id contains;
    ``paths`` are CMake variables that it does not contain, such as paths of this machine. ``lock``
    is the lock file of a series with more releases. A second build of the same release waits for
    the first. Raises the errors of fetching and
    applying, ToolMissing, CommandFailed with the first error, DiskFull, or BuildError when the
    data directory cannot be written.
    """
    wanted = variant.request(
        spec, backend=backend, native=native, options=options or {}, paths=paths or {}, lock=lock
    )
    found = variant.lookup(wanted)
    if found:
        return found
    with writable(), _locked(wanted, progress):
        found = variant.lookup(wanted)
        if found is None:
            found = _obtain(wanted, _source(wanted, progress), jobs, progress)
            variant.add_to_index(wanted, found)
    return found


@contextlib.contextmanager
def locked_sources(
    wanted: BuildRequest, folder: Path, progress: Progress | None = None, *, tree: str = ""
) -> Iterator[tuple[Source, cmake.BuildSession]]:
    """Yield the sources of a request, written to its tree, and a build session in ``folder``.

    ``tree`` is written instead of the tree of the sources if it is given. Nobody else changes the
    files or builds the release meanwhile. Raises the errors of fetching and applying, DiskFull, or
    BuildError when the data directory cannot be written.
    """
    with writable(), _locked(wanted, progress):
        source = _source(wanted, progress)
        with _session(wanted, tree or source.tree, folder, progress) as job:
            yield source, job


def build_patched(
    release: Release,
    patched: PatchedRelease,
    *,
    backend: str = "cpu",
    native: bool = True,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Variant:
    """Return the variant of a release with patches that no spec can name, building it if needed.

    Raises the exceptions of `build`, except those of fetching and applying.
    """
    spec = variant.Spec(release.name, patched.patches)
    wanted = variant.request_of(release, spec, backend=backend, native=native)
    source = Source(patched.commit, patched.tree, patched.patches, patched.digest, patched.carried)
    with writable(), _locked(wanted, progress):
        return _obtain(wanted, source, jobs, progress)


def build_series(
    release: str,
    names: Sequence[str] | None = None,
    patches: str = "",
    *,
    backend: str = "cpu",
    native: bool = True,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Variant:
    """Return the variant of a release with patches of a series, building it if needed.

    ``patches`` is the series (default: the shipped one), and ``names`` are ids of its patches
    (default: all that apply; none: stock). Raises the exceptions of `build`.
    """
    options: Any = {"backend": backend, "native": native, "jobs": jobs, "progress": progress}
    if not patches:
        return build(variant.Spec(release, None if names is None else tuple(names)), **options)
    from pyllamakv.patching import apply, port_choice
    from pyllamakv.source import fetch, spec_resolver

    series = port_choice.load_series(patches)
    if names is not None and not names:
        return build(variant.Spec(release, ()), **options, lock=series.lock)
    found = fetch.fetch(spec_resolver.resolve(release, series.lock), progress=progress)
    return build_patched(found, apply.apply(found, names, series=series), **options)


def check_series(release: str, names: Sequence[str] | None = None, patches: str = "") -> None:
    """Raise NoPortApplies if a patch that is meant for a release does not apply to it.

    A build has the patches that apply. The arguments are those of `build_series`.
    """
    from pyllamakv.patching import apply, port_choice
    from pyllamakv.source import fetch, spec_resolver

    series = port_choice.load_series(patches)
    # A series may change only the server.
    if len(series):
        found = fetch.fetch(spec_resolver.resolve(release, series.lock))
        apply.apply(found, names, series=series).check_complete()


def default_jobs() -> int:
    """Return the number of parallel compilers, from the processors and the available memory."""
    return max(1, min(usable_cpus(), available_memory() // _BYTES_PER_JOB))


def available_memory() -> int:
    """Return the bytes of memory that can be had without swapping (a lot where unknown)."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 40


def _obtain(
    wanted: BuildRequest, source: Source, jobs: int | None, progress: Progress | None
) -> Variant:
    name = wanted.variant_id(source.tree)
    found = variant.by_id(name)
    if found:
        return found
    before = _cpu_seconds()
    with _compiled(wanted, source.tree, jobs, progress):
        spent = _cpu_seconds() - before
    log.info("built %s in %.1f CPU seconds", name, spent)
    return artifacts.publish(wanted, source, name, spent)


@contextlib.contextmanager
def _compiled(
    wanted: BuildRequest, tree: str, jobs: int | None, progress: Progress | None
) -> Iterator[cmake.BuildSession]:
    """Update the build directory to a tree, and yield it with its sources locked."""
    with _session(wanted, tree, wanted.objects, progress) as job:
        check_toolchain(wanted)
        cmake.configure(job, shim(), definitions(wanted, wanted.variant_id(tree)))
        cmake.compile_targets(job, _TARGETS, jobs or default_jobs())
        yield job


@contextlib.contextmanager
def _session(
    wanted: BuildRequest, tree: str, folder: Path, progress: Progress | None
) -> Iterator[cmake.BuildSession]:
    """Write a tree to the sources of a request, lock them, and yield a session in ``folder``."""
    from pyllamakv.source.store import open_store

    folder.mkdir(parents=True, exist_ok=True)
    with _held(wanted.tree) as held:
        open_store().export(tree, wanted.tree)
        report = _naming(wanted.spec, progress)
        job = cmake.BuildSession(folder, folder / "build.log", environment(), report, (held,))
        job.log.write_text(f"variant {wanted.variant_id(tree)}\n", encoding="utf-8")
        yield job


def _naming(spec: Spec, progress: Progress | None) -> Progress | None:
    """Return a progress function that adds the name of the variant."""
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{spec}: {what}", done, total)


def _source(wanted: BuildRequest, progress: Progress | None) -> Source:
    from pyllamakv.patching import apply
    from pyllamakv.source import fetch

    release = fetch.fetch(wanted.release, progress=progress)
    patched = apply.apply(release, wanted.spec.series)
    return Source(patched.commit, patched.tree, patched.patches, patched.digest, patched.carried)


def check_toolchain(wanted: BuildRequest) -> None:
    """Check the tools that CMake needs. Raises ToolMissing with the remedy."""
    if wanted.backend.name == "cuda":
        toolkit = cuda.find()
        nvidia.need_driver(toolkit)
        nvidia.prove(toolkit, wanted.compiler.cxx)
    elif wanted.backend.name == "vulkan":
        backend.need_spirv(wanted.tree)


def definitions(wanted: BuildRequest, name: str) -> dict[str, str]:
    """Return the CMake variables of a build: options, tools, and settings for reproducibility."""
    names = {wanted.tree: "llama.cpp", shim(): "plk", wanted.objects: "build"}
    words = [f"-ffile-prefix-map={path}={short}" for path, short in names.items()]
    if wanted.native:
        # A compiler cache compares the text `-march=native`, not its meaning on this machine.
        meaning = hashlib.sha256(" ".join(wanted.cpu_flags).encode()).hexdigest()[:12]
        words += [f"-DPLK_NATIVE_{meaning}", *wanted.compiler.native_options]
    flags = shlex.join(words)
    chosen = {
        **wanted.backend.options,
        **wanted.backend.tool_paths,
        "PLK_LLAMA_SRC": str(wanted.tree),
        "PLK_VARIANT": name,
        "PLK_BACKEND": wanted.backend.name,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_POSITION_INDEPENDENT_CODE": "ON",
        "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
        "CMAKE_C_COMPILER": wanted.compiler.c,
        "CMAKE_CXX_COMPILER": wanted.compiler.cxx,
        "CMAKE_C_FLAGS": flags,
        "CMAKE_CXX_FLAGS": flags,
    }
    if wanted.backend.name == "cuda":
        # Otherwise nvcc would take whatever compiler is called g++.
        chosen["CMAKE_CUDA_HOST_COMPILER"] = wanted.compiler.cxx
    launcher = compiler.launcher()
    for language in ("C", "CXX", "CUDA"):
        chosen[f"CMAKE_{language}_COMPILER_LAUNCHER"] = launcher or ""
    return chosen


def environment() -> dict[str, str]:
    """Return the environment of a build, with settings for a compiler cache."""
    extra = {"CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": "time_macros"}
    # Trees of two releases share objects only if their paths are hashed relative to one parent.
    extra["CCACHE_BASEDIR"] = os.environ.get("CCACHE_BASEDIR") or str(home())
    if "CCACHE_DIR" not in os.environ and not _can_write(_cache_folder()):
        extra["CCACHE_DIR"] = str(home() / "objects" / "ccache")
    return cmake.environment(extra)


def _cache_folder() -> Path:
    """Return where ccache would keep its files; without a place it fails, and the build too."""
    user = Path(os.environ.get("HOME") or "/nonexistent")
    if (user / ".ccache").is_dir():
        return user / ".ccache"
    return Path(os.environ.get("XDG_CACHE_HOME") or user / ".cache") / "ccache"


def _can_write(folder: Path) -> bool:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return existing != Path(existing.anchor) and os.access(existing, os.W_OK | os.X_OK)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _locked(wanted: BuildRequest, progress: Progress | None) -> Iterator[None]:
    """Hold the lock of a release; report another build that holds it."""
    folder = home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"build-{wanted.release.commit}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("another build of %s is running; waiting for it", wanted.release.name)
        if progress:
            progress(f"waiting for another build of {wanted.release.name}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _held(tree: Path) -> AbstractContextManager[int]:
    """Lock a tree. A release's lock ends with this process, but its compilers may still run."""
    return inheritable_lock(tree.with_name(f"{tree.name}.busy"))


@contextlib.contextmanager
def writable() -> Iterator[None]:
    """Raise DiskFull for a full disk, and BuildError for a directory that cannot be written."""
    try:
        with translate_disk_errors(home()):
            yield
    except PermissionError as error:
        raise BuildError(
            f"{error.filename or home()} cannot be written; set PYLLAMAKV_HOME to a writable "
            f"directory"
        ) from error
