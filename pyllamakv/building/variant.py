"""Name a variant by its content, and find a built one without running a program.

A *request* (release, series, backend, options, compiler) is cheap to compute; the id needs the
patched tree. An index from requests to ids makes a repeated build instant. It is a cache, and
removing it costs one strict apply. A built variant is found without its compiler as well: the
manifest has the compiler's part of the request, and the index confirms the request. The data
directory is searched before the distribution pyllamakv-prebuilt, which has such an index as well.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pyllamakv.building import backend as backends
from pyllamakv.building import compiler as compilers
from pyllamakv.building import manifest as manifests
from pyllamakv.errors import (
    LoadError,
    ManifestError,
    NotBuilt,
    ToolMissing,
    UnknownPatch,
    Unsupported,
    UsageError,
)
from pyllamakv.home import PREBUILT, data, home, prebuilt, shim, variant_roots
from pyllamakv.source import spec_resolver, verified
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyllamakv.building.backend import Backend
    from pyllamakv.building.compiler import Compiler
    from pyllamakv.building.manifest import Manifest
    from pyllamakv.patching.definition import Definition
    from pyllamakv.source.releases import Kind, Release

#: Increased when this package builds the same inputs differently.
RECIPE = 1

#: Files in the digested directories that affect neither builds nor results.
DIGEST_EXCLUDES = (".pyc", "expected.toml")

_PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")

#: Names of a series, in the place of patches.
_WORDS = ("stock", "patched")


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
    if len(set(series)) != len(series) or set(_WORDS) & set(series):
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
    """A built variant: the directory with its library and manifest.

    A prebuilt one has no ordinary libraries.
    """

    folder: Path

    @property
    def id(self) -> str:
        """Return the content-addressed id, which is the folder's name."""
        return self.folder.name

    @property
    def origin(self) -> str:
        """Return "data directory", or the name of the distribution that contains the variant."""
        return PREBUILT if self.folder.parent == prebuilt() else "data directory"

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


def request(
    spec: str | Spec,
    *,
    backend: str = "cpu",
    native: bool = True,
    options: Mapping[str, str] = MappingProxyType({}),
    paths: Mapping[str, str] = MappingProxyType({}),
    lock: Path | None = None,
) -> BuildRequest:
    """Resolve a spec against this machine's tools, without fetching, applying or compiling.

    ``options`` and ``paths`` are CMake variables besides those of the backend; only the options are
    part of the id. ``lock`` is the lock file of a series. Raises UnknownPatch for a patch that the
    series does not have.
    """
    parsed = parse(spec) if isinstance(spec, str) else spec
    if parsed.series:
        check_patches(parsed.series)
    release = spec_resolver.resolve(parsed.release, lock)
    wanted = request_of(release, parsed, backend=backend, native=native)
    return replace(wanted, backend=wanted.backend.extended(options, paths))


def request_of(release: Release, spec: Spec, *, backend: str, native: bool) -> BuildRequest:
    """Return the request for a release that is resolved already."""
    chosen = backends.choose(backend, native=native)
    found = compilers.find(_answers())
    return BuildRequest(spec, release, chosen, found, native)


def find(spec: str | Spec, *, backend: str = "cpu", native: bool | None = None) -> Variant | None:
    """Return the built variant of a spec, or None: of the data directory, else a prebuilt one.

    Release, patches, the code that applies them, shim and options must equal those of the build. No
    compiler is needed. ``native`` None prefers a tuned build to a portable one. Among builds by
    several compilers, that of the installed compiler is preferred if its version is cached, then
    the newest one that runs on this processor. A prebuilt variant is returned even if it cannot run
    here, because opening it names the missing CPU features. The options of a backend are not
    compared if its tools, or the GPU that determines them, are missing. Raises UnknownPatch if
    nothing is built and the spec has an unknown patch.
    """
    parsed = parse(spec) if isinstance(spec, str) else spec
    release = spec_resolver.resolve(parsed.release)
    ways = (True, False) if native is None else (native,)
    if found := _find(variant_roots(), parsed, release, backend, ways):
        return found
    if parsed.series:
        check_patches(parsed.series)
    return None


def _find(
    places: tuple[Path, ...], spec: Spec, release: Release, backend: str, ways: tuple[bool, ...]
) -> Variant | None:
    """Return the variant in the first of several roots that has it.

    ``ways`` are values of ``native``, the preferred one first.
    """
    known = backends.canonical(backend)
    chosen = {tuned: _chosen(known, tuned) for tuned in ways}
    compiler = compilers.find_cached(_answers()) if built() in places else None
    for tuned, options in chosen.items():
        if compiler and options:
            found = lookup(BuildRequest(spec, release, options, compiler, tuned))
            if found:
                return found
    each = (_newest(root, spec, release, known, chosen) for root in places)
    return next(filter(None, each), None)


def newest_verified(*, backend: str = "cpu", kind: Kind | None = None) -> Variant:
    """Return the patched build of the newest verified release that is built.

    ``kind`` selects the releases of one source. Any build in the data directory precedes a prebuilt
    one, so that installing pyllamakv-prebuilt changes nothing where builds exist. Raises NotBuilt
    with the command that builds the newest one.
    """
    releases = verified.releases(kind)
    for root in variant_roots():
        names = {found.manifest.release for found in complete(root)}
        for release in releases:
            if release.name not in names:
                continue
            spec = Spec(release.name, None)
            if found := _find((root,), spec, release, backend, (True, False)):
                return found
    option = "" if backend == "cpu" else f" --backend {backend}"
    raise NotBuilt(
        f"no verified release is built here{_no_prebuilt(backend, kind)}; build the newest: "
        f"pyllamakv build {verified.newest(kind).name}{option}"
    )


def _no_prebuilt(backend: str, kind: Kind | None) -> str:
    """Return why no prebuilt variant is used, as a clause; empty where none can exist."""
    if backends.canonical(backend) != "cpu" or kind is not None:
        return ""
    if prebuilt() is None:
        return f", and {PREBUILT}, which needs no compiler, is not installed"
    return f", and those of {PREBUILT} have other patches, shim or settings"


def release_name(text: str) -> str:
    """Return a release's name as the lock and manifests spell it: ``0.3.9`` for ``v0.3.9``."""
    from pyllamakv.source import lockfile, releases

    return releases.canonical_name(text, lockfile.known())


def definitions(names: Iterable[str]) -> list[Definition]:
    """Return the shipped patches that a spec names.

    Raises UnknownPatch with the closest names, also of `_WORDS`.
    """
    from pyllamakv.patching import series

    there = series.load()
    found = []
    for name in names:
        try:
            found.append(there.definition(name))
        except UnknownPatch as error:
            close = difflib.get_close_matches(name, _WORDS, n=1)
            if not close:
                raise
            msg = f"There is no patch {name!r}; did you mean {close[0]}?"
            raise UnknownPatch(msg, name, close) from error
    return found


def check_patches(names: Iterable[str]) -> None:
    """Raise UnknownPatch for a name that the series lacks, UsageError for a patch of llama-server.

    Neither can be in a variant.
    """
    for patch in definitions(names):
        if patch.target == "server":
            raise UsageError(
                f"{patch.id} changes llama-server and not the libraries: leave it out; "
                "pyllamakv build RELEASE --server applies it"
            )


def _chosen(backend: str, native: bool) -> Backend | None:
    """Return the backend with its options, or None if this machine cannot determine them."""
    try:
        return backends.choose(backend, native=native)
    except (ToolMissing, Unsupported, UsageError):
        return None


def _newest(
    root: Path, spec: Spec, release: Release, backend: str, chosen: Mapping[bool, Backend | None]
) -> Variant | None:
    """Return the newest variant by any compiler that the index confirms, tuned ones first.

    The manifest records the request of the build, with its patches and shim. The index has the
    variant under the digest of that request, which changes with each of these.
    """
    shim, texts = shim_digest(), _texts(spec)

    def fits(found: Variant) -> bool:
        made = found.manifest
        if (made.commit, made.backend) != (release.commit, backend):
            return False
        if root == built() and not _runs(made):
            return False
        tuned = made.options.get("GGML_NATIVE") == "ON"
        if tuned not in chosen:
            return False
        wanted = chosen[tuned]
        if wanted and wanted.options != made.options:
            return False
        base = _inputs(shim, [made.backend, made.options, made.compiler, made.cpu_flags])
        return _named(_key(base, release.commit, spec.series, texts), root) == found.id

    def rank(found: Variant) -> tuple[bool, str]:
        return found.manifest.options["GGML_NATIVE"] == "ON", found.manifest.created

    return max(filter(fits, complete(root)), key=rank, default=None)


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
    """Add the variant for a request to the index beside it."""
    write_text_atomic(_index(wanted.key, variant.folder.parent), variant.id + "\n")


def by_id(name: str) -> Variant | None:
    """Return the variant that was built here with this id; None if it is absent or damaged."""
    return _whole(built() / name)


def all_built() -> list[Variant]:
    """Return the complete variants, those of the data directory first, each id once."""
    found: dict[str, Variant] = {}
    for root in variant_roots():
        for each in sorted(complete(root), key=lambda each: each.id):
            found.setdefault(each.id, each)
    return list(found.values())


def complete(root: Path) -> Iterator[Variant]:
    """Yield the complete variants in a root."""
    # A folder with a dot in front is still being written.
    return filter(None, map(_whole, root.glob("[!.]*")))


def _whole(folder: Path) -> Variant | None:
    found = Variant(folder)
    try:
        return found if found.library.is_file() else None
    except ManifestError:
        return None


def built() -> Path:
    """Return the folder of the variants that were built here."""
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


def _named(key: str, root: Path | None = None) -> str:
    """Return the id under a key of the index, or an empty text."""
    try:
        return _index(key, root).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _index(key: str, root: Path | None = None) -> Path:
    return (root or built()) / ".index" / key


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
