"""Name a variant by its content, and find a built one without running a program.

A *request* (release, series, backend, options, compiler) is cheap to compute; the id needs the
patched tree. An index from requests to ids makes a repeated build instant. It is a cache, and
removing it costs one strict apply. A built variant is found without its compiler as well: the
manifest has the compiler's part of the request, and the index confirms the request.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.building import backend as backends
from pyllamakv.building import compiler as compilers
from pyllamakv.building import manifest as manifests
from pyllamakv.errors import (
    LoadError,
    ManifestError,
    NotBuilt,
    ToolMissing,
    Unsupported,
    UsageError,
)
from pyllamakv.home import data, home, shim
from pyllamakv.source import spec_resolver, verified
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyllamakv.building.backend import Backend
    from pyllamakv.building.compiler import Compiler
    from pyllamakv.building.manifest import Manifest
    from pyllamakv.source.releases import Kind, Release

#: Increased when this package builds the same inputs differently.
RECIPE = 1

#: Files in the digested directories that affect neither builds nor results.
DIGEST_EXCLUDES = (".pyc", "expected.toml")

_PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True)
class Spec:
    """A parsed spec: the release's name, and patches (None: all that apply; empty: stock)."""

    release: str
    series: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.series is None:
            return f"{self.release}+patched"
        return f"{self.release}+{','.join(self.series) or 'stock'}"


def parse(text: str) -> Spec:
    """Parse ``0.3.9``, ``0.3.9+stock``, ``0.3.9+patched`` or ``0.3.9+full-defrag,kv-counters``.

    Raises UsageError when it names no release or a patch twice.
    """
    release, plus, names = text.strip().rpartition("+")
    if not plus or not all(_NAME.fullmatch(name) for name in names.split(",")):
        if plus and not release.startswith(("git:", "path:")):
            raise UsageError(
                f"{text!r} is not a variant: expected RELEASE, RELEASE+stock, RELEASE+patched or "
                "RELEASE+PATCH,PATCH, for example 0.3.9+full-defrag"
            )
        release, names = text.strip(), "stock"
    if not release:
        raise UsageError(f"{text!r} names no release: expected for example 0.3.9+full-defrag")
    if names == "stock":
        return Spec(release, ())
    if names == "patched":
        return Spec(release, None)
    series = tuple(names.split(","))
    if len(set(series)) != len(series) or {"stock", "patched"} & set(series):
        raise UsageError(f"{text!r}: name each patch once, and stock or patched alone")
    return Spec(release, series)


@dataclass(frozen=True)
class BuildRequest:
    """The inputs of a build, before the patches are applied."""

    spec: Spec
    release: Release
    backend: Backend
    compiler: Compiler
    native: bool

    @property
    def cpu_flags(self) -> tuple[str, ...]:
        """Return the CPU flags that the code may use."""
        if self.native:
            return self.compiler.native_flags
        x86 = self.compiler.target.startswith(("x86_64", "amd64"))
        return backends.PORTABLE_FLAGS_X86 if x86 else ()

    @cached_property
    def shim(self) -> str:
        """Return the digest of the shim's sources and of plk.h."""
        return shim_digest()

    @cached_property
    def key(self) -> str:
        """Return the digest that the index is kept under."""
        return _key(self._base(), self.release.commit, self.spec.series, _texts(self.spec))

    def variant_id(self, patched_tree: str) -> str:
        """Return the content-addressed id of the variant with this patched tree."""
        facts = [self._base(), self.release.commit, self.release.tree, patched_tree]
        kind = "stock" if patched_tree == self.release.tree else "patched"
        return f"{self.release.key}-{kind}-{self.backend.name}-{_digest(facts)[:16]}"

    @property
    def objects(self) -> Path:
        """Return the build folder that every series of this release shares."""
        facts = [self.release.commit, self._options(), self.compiler.c, self.compiler.cxx]
        return home() / "objects" / f"{self.release.key}-{self.backend.name}-{_digest(facts)[:12]}"

    @property
    def tree(self) -> Path:
        """Return the directory of the sources that are compiled, for stock and patched builds."""
        return home() / "objects" / f"{self.release.key}-tree"

    def _options(self) -> list[object]:
        return [self.backend.name, self.backend.options, self.compiler.identity, self.cpu_flags]

    def _base(self) -> list[object]:
        return _inputs(self.shim, self._options())


@dataclass(frozen=True)
class Variant:
    """A built variant: the directory with its library and manifest."""

    folder: Path

    @property
    def id(self) -> str:
        """Return the content-addressed id, which is the folder's name."""
        return self.folder.name

    @cached_property
    def manifest(self) -> Manifest:
        """Return the manifest, read once."""
        return manifests.load(self.folder)

    @property
    def library(self) -> Path:
        """Return the path of the self-contained library."""
        return self.folder / self.manifest.library

    @property
    def dropin(self) -> Path:
        """Return the folder of the ordinary libllama and libggml libraries."""
        return self.folder / "lib"


def request(spec: str | Spec, *, backend: str = "cpu", native: bool = True) -> BuildRequest:
    """Resolve a spec against this machine's tools, without fetching, applying or compiling.

    Raises UnknownPatch for a patch that the series does not have.
    """
    parsed = parse(spec) if isinstance(spec, str) else spec
    if parsed.series:
        check_patches(parsed.series)
    release = spec_resolver.resolve(parsed.release)
    return request_of(release, parsed, backend=backend, native=native)


def request_of(release: Release, spec: Spec, *, backend: str, native: bool) -> BuildRequest:
    """Return the request for a release that is resolved already."""
    chosen = backends.choose(backend, native=native)
    found = compilers.find(_answers())
    return BuildRequest(spec, release, chosen, found, native)


def find(spec: str | Spec, *, backend: str = "cpu", native: bool | None = None) -> Variant | None:
    """Return the built variant of a spec on this machine, or None.

    Release, patches, the code that applies them, shim and options must equal those of the build. No
    compiler is needed. ``native`` None prefers a tuned build to a portable one. Among builds by
    several compilers, that of the installed compiler is preferred if its version is cached, then
    the newest one that runs on this processor. The options of a backend are not compared if its
    tools, or the GPU that determines them, are missing. Raises UnknownPatch if nothing is built and
    the spec has an unknown patch.
    """
    parsed = parse(spec) if isinstance(spec, str) else spec
    known = backends.canonical(backend)
    release = spec_resolver.resolve(parsed.release)
    ways = (True, False) if native is None else (native,)
    chosen = {tuned: _chosen(known, tuned) for tuned in ways}
    compiler = compilers.find_cached(_answers())
    for tuned, options in chosen.items():
        if compiler and options:
            found = lookup(BuildRequest(parsed, release, options, compiler, tuned))
            if found:
                return found
    if found := _newest(parsed, release, known, chosen):
        return found
    if parsed.series:
        check_patches(parsed.series)
    return None


def newest_verified(*, backend: str = "cpu", kind: Kind | None = None) -> Variant:
    """Return the patched build of the newest verified release that is built.

    ``kind`` selects the releases of one source. Raises NotBuilt with the command that builds the
    newest one.
    """
    there = (by_id(folder.name) for folder in built().glob("[!.]*"))
    names = {found.manifest.release for found in there if found}
    for release in verified.releases(kind):
        if release.name in names and (found := find(Spec(release.name, None), backend=backend)):
            return found
    option = "" if backend == "cpu" else f" --backend {backend}"
    raise NotBuilt(
        "no verified release is built here; build the newest: pyllamakv build "
        f"{verified.newest(kind).name}{option}"
    )


def release_name(text: str) -> str:
    """Return a release's name as the lock and manifests spell it: ``0.3.9`` for ``v0.3.9``."""
    from pyllamakv.source import lockfile, releases

    return releases.canonical_name(text, lockfile.known())


def check_patches(names: Iterable[str]) -> None:
    """Raise UnknownPatch for a name that the series lacks, UsageError for a patch of llama-server.

    Neither can be in a variant.
    """
    from pyllamakv.patching import series

    there = series.load()
    for name in names:
        if there.definition(name).target == "server":
            raise UsageError(
                f"{name} changes llama-server and not the libraries: leave it out; "
                "pyllamakv build RELEASE --server applies it"
            )


def _chosen(backend: str, native: bool) -> Backend | None:
    """Return the backend with its options, or None if this machine cannot determine them."""
    try:
        return backends.choose(backend, native=native)
    except (ToolMissing, Unsupported, UsageError):
        return None


def _newest(
    spec: Spec, release: Release, backend: str, chosen: Mapping[bool, Backend | None]
) -> Variant | None:
    """Return the newest variant by any compiler that the index confirms, tuned ones first.

    The manifest records the request of the build, with its patches and shim. The index has the
    variant under the digest of that request, which changes with each of these.
    """
    shim, texts = shim_digest(), _texts(spec)

    def fits(found: Variant) -> bool:
        made = found.manifest
        if (made.commit, made.backend) != (release.commit, backend) or not _runs(made):
            return False
        tuned = made.options.get("GGML_NATIVE") == "ON"
        if tuned not in chosen:
            return False
        wanted = chosen[tuned]
        if wanted and wanted.options != made.options:
            return False
        base = _inputs(shim, [made.backend, made.options, made.compiler, made.cpu_flags])
        return _named(_key(base, release.commit, spec.series, texts)) == found.id

    def rank(found: Variant) -> tuple[bool, str]:
        return found.manifest.options["GGML_NATIVE"] == "ON", found.manifest.created

    there = (by_id(folder.name) for folder in built().glob("[!.]*"))
    return max((found for found in there if found and fits(found)), key=rank, default=None)


def _runs(manifest: Manifest) -> bool:
    try:
        manifest.check_machine()
    except LoadError:
        return False
    return True


def lookup(wanted: BuildRequest) -> Variant | None:
    """Return the variant in the index for a request, if it is complete."""
    name = _named(wanted.key)
    return by_id(name) if name else None


def add_to_index(wanted: BuildRequest, variant: Variant) -> None:
    """Add the variant for a request to the index."""
    write_text_atomic(_index(wanted.key), variant.id + "\n")


def by_id(name: str) -> Variant | None:
    """Return the built variant with this id, or None when it is absent or damaged."""
    found = Variant(built() / name)
    try:
        return found if found.library.is_file() else None
    except ManifestError:
        return None


def built() -> Path:
    """Return the folder of all built variants."""
    return home() / "built"


def shim_digest() -> str:
    """Return the digest of the native sources that every variant contains."""
    return files_digest([shim()], without=(".py", ".pyc", ".pyi"))


def files_digest(roots: Iterable[Path], without: tuple[str, ...] = (".pyc",)) -> str:
    """Return a digest over the names and contents of all files below ``roots``.

    ``without`` has suffixes and whole names that are left out.
    """
    whole = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*")):
            if not {path.suffix, path.name} & set(without) and path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                whole.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return whole.hexdigest()


def _answers() -> Path:
    """Return the file with cached results about compilers."""
    return home() / "objects" / "compilers.json"


def _named(key: str) -> str:
    """Return the id under a key of the index, or an empty text."""
    try:
        return _index(key).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _index(key: str) -> Path:
    return built() / ".index" / key


def _inputs(shim: str, options: list[object]) -> list[object]:
    return [RECIPE, shim, *options]


def _key(base: list[object], commit: str, series: tuple[str, ...] | None, texts: str) -> str:
    return _digest([base, commit, series, texts])


def _texts(spec: Spec) -> str:
    """Return the digest of the patches and the patching code of a spec."""
    roots = () if spec.series == () else (data("patches"), _PACKAGE / "patching")
    return files_digest(roots, without=DIGEST_EXCLUDES)


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
