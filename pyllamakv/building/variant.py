"""Name a variant by its content, and find one that is built without running anything.

A *request* (release, series, backend, options, compiler) is cheap to compute; the id needs the
patched tree. An index from requests to ids makes a repeated build instant; it is a cache, and
removing it costs one strict apply.
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
from pyllamakv.errors import ManifestError, ToolMissing, UsageError
from pyllamakv.home import data, home, shim
from pyllamakv.source.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.building.backend import Backend
    from pyllamakv.building.compiler import Compiler
    from pyllamakv.building.manifest import Manifest
    from pyllamakv.source.releases import Release

#: Changes when this package builds differently from the same inputs.
RECIPE = 1

#: What lies beside the patches and their code, and decides no build and no result.
NO_INPUT = (".pyc", "expected.toml")

_PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True)
class Spec:
    """Hold a parsed spec: the release's name, and patches (None: all that apply; empty: stock)."""

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
class Request:
    """Hold everything that decides a build, before the patches are applied."""

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
        texts = () if self.spec.series == () else (data("patches"), _PACKAGE / "patching")
        digest = files_digest(texts, without=NO_INPUT)
        return _digest([self._base(), self.release.commit, self.spec.series, digest])

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
        """Return the folder of the sources that are compiled, stock or patched in turn."""
        return home() / "objects" / f"{self.release.key}-tree"

    def _options(self) -> list[object]:
        return [self.backend.name, self.backend.options, self.compiler.identity, self.cpu_flags]

    def _base(self) -> list[object]:
        return [RECIPE, self.shim, *self._options()]


@dataclass(frozen=True)
class Variant:
    """Stand for a built variant: the folder that holds its library and its manifest."""

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


def request(spec: str | Spec, *, backend: str = "cpu", native: bool = True) -> Request:
    """Resolve a spec against this machine's tools, without fetching, applying or compiling."""
    from pyllamakv.source import releases

    parsed = parse(spec) if isinstance(spec, str) else spec
    release = releases.resolve(parsed.release)
    return request_of(release, parsed, backend=backend, native=native)


def request_of(release: Release, spec: Spec, *, backend: str, native: bool) -> Request:
    """Return the request for a release that is resolved already."""
    chosen = backends.choose(backend, native=native)
    found = compilers.find(home() / "objects" / "compilers.json")
    return Request(spec, release, chosen, found, native)


def find(spec: str | Spec, *, backend: str = "cpu", native: bool | None = None) -> Variant | None:
    """Return the built variant that a spec names on this machine, or None.

    ``native`` None prefers the tuned build and takes a portable one instead. Where there is no
    compiler, as in an image that only runs what was built elsewhere, or no GPU whose architecture
    decides, the newest variant that fits by its manifest is taken. Raises UnknownPatch for one that
    is not built and names a patch that there is not.
    """
    parsed = parse(spec) if isinstance(spec, str) else spec
    known = backends.canonical(backend)
    try:
        for tuned in (True, False) if native is None else (native,):
            found = lookup(request(parsed, backend=backend, native=tuned))
            if found:
                return found
    except (ToolMissing, UsageError):
        if found := _newest(parsed, known, native):
            return found
    if parsed.series:
        _known(parsed.series)
    return None


def _known(names: Iterable[str]) -> None:
    """Raise UnknownPatch for a name that the series does not have."""
    from pyllamakv.patching import series

    there = series.load()
    for name in names:
        there.definition(name)


def _newest(spec: Spec, backend: str, native: bool | None) -> Variant | None:
    from pyllamakv.source import releases

    commit = releases.resolve(spec.release).commit

    def fits(manifest: Manifest) -> bool:
        if spec.series is None:
            same = not manifest.stock
        else:
            same = set(manifest.patches) == set(spec.series)
        wanted = {None: ("ON", "OFF"), True: ("ON",), False: ("OFF",)}[native]
        tuned = manifest.options.get("GGML_NATIVE") in wanted
        runs = not manifest.missing_flags()
        return same and tuned and runs and (manifest.commit, manifest.backend) == (commit, backend)

    found = [variant for folder in built().glob("[!.]*") if (variant := at(folder.name))]
    return max(
        (variant for variant in found if fits(variant.manifest)),
        key=lambda variant: variant.manifest.created,
        default=None,
    )


def lookup(wanted: Request) -> Variant | None:
    """Return the variant that the index holds for a request, if it is still whole."""
    try:
        name = _index(wanted).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return at(name) if name else None


def remember(wanted: Request, variant: Variant) -> None:
    """Note in the index which variant answers a request."""
    write_atomic(_index(wanted), variant.id + "\n")


def at(name: str) -> Variant | None:
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


def _index(wanted: Request) -> Path:
    return built() / ".index" / wanted.key


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
