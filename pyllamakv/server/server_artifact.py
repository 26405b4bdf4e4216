"""Find the built llama-server of a variant.

A server is a directory with the program and its manifest in ``servers/`` of the data directory. Its
id is the id of the variant and a digest of what the server is built with. It loads the ordinary
libraries of that variant, so it does not run without the variant.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pyllamakv.building import variant
from pyllamakv.building.variant import Spec, Variant
from pyllamakv.errors import ManifestError, NotBuilt
from pyllamakv.home import home
from pyllamakv.server import server_patches
from pyllamakv.source.files import write_text_atomic

#: The name of the program, in the directory of a server and upstream.
PROGRAM = "llama-server"

#: Changes when this package builds servers differently from the same inputs.
RECIPE = 1

_MANIFEST = "server.json"


@dataclass(frozen=True)
class ServerManifest:
    """The inputs of a built server.

    ``page``: it contains the web page of the release. ``server_patches`` are the patches of the
    server in it, ``left_out`` has the reason for each other one, and ``carried`` the base of the
    port from which one of them was carried.
    """

    server: str
    variant: str
    release: str
    patches: tuple[str, ...]
    backend: str
    page: bool
    sha256: str
    created: str
    cpu_seconds: float
    server_patches: tuple[str, ...] = ()
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    carried: dict[str, str] = dataclasses.field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the manifest into ``folder``."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
        write_text_atomic(folder / _MANIFEST, text + "\n")


@dataclass(frozen=True)
class BuiltServer:
    """A built server: its directory, and the variant whose libraries it loads."""

    folder: Path
    variant: Variant

    @property
    def id(self) -> str:
        """Return the id, which is the name of the directory."""
        return self.folder.name

    @property
    def program(self) -> Path:
        """Return the path of the program."""
        return self.folder / PROGRAM

    @cached_property
    def manifest(self) -> ServerManifest:
        """Return the manifest. Raises ManifestError if it is missing or damaged."""
        file = self.folder / _MANIFEST
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            lists = {name: tuple(raw[name]) for name in ("patches", "server_patches")}
            return ServerManifest(**{**raw, **lists})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ManifestError(
                f"{file} is not a readable manifest ({error}); remove {self.folder} and build "
                "the server again"
            ) from error

    def check_program(self) -> Path:
        """Return the path of the program after comparing its sha256 with the manifest's.

        Raises ManifestError if the program was changed, and LoadError if this machine's CPU cannot
        run the variant.
        """
        with self.program.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.manifest.sha256:
            raise ManifestError(
                f"{self.program} is not the program that its manifest describes: expected sha256 "
                f"{self.manifest.sha256}, found {found}; remove {self.folder} and build again"
            )
        self.variant.manifest.check_machine()
        return self.program


def project() -> Path:
    """Return the directory of the CMake project that builds servers."""
    return Path(__file__).resolve().parent / "project"


def servers() -> Path:
    """Return the directory of all built servers."""
    return home() / "servers"


def server_id(library: Variant, tree: str = "") -> str:
    """Return the id of the server of a variant, or of one that is built from a tree."""
    facts = [RECIPE, library.id, variant.files_digest([project()])]
    if tree or not library.manifest.stock:
        facts.append(tree or server_patches.digest())
    return f"{library.id}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"


def lookup(library: Variant) -> BuiltServer | None:
    """Return the built server of a variant, or None."""
    found = BuiltServer(servers() / server_id(library), library)
    return found if found.program.is_file() else None


def patched_spec(text: str) -> Spec:
    """Parse a spec like `variant.parse`, but a release without a series is the patched one."""
    spec = variant.parse(text)
    return Spec(spec.release, None) if spec.release == text.strip() else spec


def find_server(
    spec: str | Spec, *, backend: str = "cpu", native: bool | None = None
) -> BuiltServer:
    """Return the built server of a spec. Raises NotBuilt with the command that builds it.

    ``native`` None prefers a tuned server to a portable one.
    """
    wanted = patched_spec(spec) if isinstance(spec, str) else spec
    for tuned in (True, False) if native is None else (native,):
        library = variant.find(wanted, backend=backend, native=tuned)
        if library and (found := lookup(library)):
            return found
    option = "" if backend == "cpu" else f" --backend {backend}"
    option += " --portable" if native is False else ""
    raise NotBuilt(
        f"the server of {wanted} is not built; build it: pyllamakv build {wanted} --server{option}"
    )
