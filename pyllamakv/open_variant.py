"""Open a built variant by name, id or path, and serve one of its devices over RPC."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.binding import arguments
from pyllamakv.binding.library import Library
from pyllamakv.binding.protocol import ModelParams
from pyllamakv.building import manifest as manifests
from pyllamakv.errors import ManifestError, ModelError, NotBuilt, UnknownRelease, UsageError
from pyllamakv.home import variant_roots
from pyllamakv.runtime import model as models
from pyllamakv.runtime.model import Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyllamakv.binding.protocol import Device
    from pyllamakv.binding.rpc_server import RpcServer
    from pyllamakv.building.manifest import Manifest
    from pyllamakv.building.variant import Variant

#: A release that is looked up in the lock by its name, with patches or without.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\+[a-z0-9,-]+)?")

#: No file system takes a longer name.
_LONGEST = 255


class OpenLibrary(Library):
    """An opened library. Closing it closes its contexts and models first."""

    #: What `load_model` makes.
    model_type: type[Model] = Model

    def load_model(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        use_mlock: bool = False,
        check_tensors: bool = True,
        vocab_only: bool = False,
        rpc_servers: str | None = None,
        devices: str | None = None,
    ) -> Model:
        """Load a GGUF file.

        Raises ModelError with the reason; for an architecture that the library does not know, with
        a verified release that knows it.

        ``rpc_servers`` is ``host:port,host:port``; layers are distributed over their devices, with
        their K and V. ``devices`` are names from `devices`, separated by commas. ``n_gpu_layers``
        is the number of layers on devices, at least 0 (larger than the model: all). -1 differs
        between releases and raises UsageError. ``check_tensors`` detects invalid numbers in
        tensors. A lost RPC server ends the process that uses it, so ``rpc_servers`` needs
        ``isolated=True`` or ``backend="rpc"``, where it raises DeviceLost.
        """
        arguments.path("path", path)
        params = ModelParams(
            n_gpu_layers=n_gpu_layers,
            use_mmap=use_mmap,
            use_mlock=use_mlock,
            check_tensors=check_tensors,
            vocab_only=vocab_only,
            rpc_servers=rpc_servers,
            devices=devices,
        )
        if rpc_servers and not self.isolated:
            msg = (
                "a lost RPC server ends the process: open the library with "
                "isolated=True, or backend='rpc'"
            )
            raise UsageError(msg)
        try:
            return models.load(
                self.native, path, self.owner, params, isolated=self.isolated, kind=self.model_type
            )
        except ModelError as error:
            if "unknown model architecture" not in str(error):
                raise
            from pyllamakv.source import architectures

            msg = f"{error}; {architectures.remedy(error.architecture)}"
            raise ModelError(
                msg, code=error.code, log=error.log, architecture=error.architecture
            ) from error

    def devices(self) -> list[Device]:
        """List the devices that the library can compute on."""
        with self.owner:
            return self.native.devices()

    def __repr__(self) -> str:
        return f"<OpenLibrary {self.about.variant}{', closed' if self.closed else ''}>"


def open(
    spec: str | os.PathLike[str] | None = None,
    *,
    isolated: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    backend: str = "cpu",
) -> OpenLibrary:
    """Open a built variant; by default that of the newest verified release that is built, patched.

    Builds in the data directory precede those of the distribution pyllamakv-prebuilt.
    ``spec`` is ``0.3.9`` or ``0.3.9+stock``, ``0.3.9+patched``, ``0.3.9+PATCH,PATCH``, the id of a
    variant, or a path to its directory or to a library. A text without ``/`` is never a path, so
    that nothing is loaded from the current directory by accident. ``isolated`` loads the library in
    a worker process; ``env`` sets variables there, and ``timeout`` limits each call in seconds.
    Backends other than ``cpu`` always use a worker; ``rpc`` is the CPU variant in a worker. Raises
    NotBuilt with the command that builds it, UnknownPatch, CpuFeaturesMissing, or LoadError.
    """
    isolated = arguments.flag("isolated", isolated) or backend == "rpc"
    where = variant_path(spec, backend=backend)
    return OpenLibrary.open(where, isolated=isolated, env=env, timeout=timeout)


def variants() -> list[Variant]:
    """List the built variants: those of the data directory, then those of pyllamakv-prebuilt.

    Each has ``id``, which `open` accepts, ``folder``, ``origin`` and ``manifest``.
    """
    from pyllamakv.building import variant

    return variant.all_built()


def variant_path(spec: str | os.PathLike[str] | None, *, backend: str = "cpu") -> Path:
    """Return ``spec`` if it is a path, otherwise the directory of the variant that it names.

    None names the newest verified release that is built.
    """
    arguments.text("backend", backend)
    if spec is None:
        from pyllamakv.building import variant

        return variant.newest_verified(backend=backend).folder
    found = arguments.path("spec", spec)
    if not isinstance(spec, str) or os.sep in spec:
        return found
    try:
        return find_built(spec, backend=backend)
    except (NotBuilt, UnknownRelease) as error:
        if not os.path.exists(spec):  # noqa: PTH110 - pathlib raises where a text is no path
            raise
        msg = f"{error}; for a path in this directory, write .{os.sep}{spec}"
        raise NotBuilt(msg) from error


def find_recorded(variant: str, spec: str) -> Path:
    """Return the directory of a built variant that a foreign file such as a trace names.

    ``variant`` is an id; ``spec`` is used if that variant is not built. Neither is a path, and no
    source is read or fetched. Raises NotBuilt.
    """
    known = _all_built()
    if variant in known:
        return known[variant].folder
    if _PLAIN.fullmatch(spec):
        return find_built(spec)
    if spec:
        return _among(known, spec)
    raise _not_built(known, variant, "cpu")


def find_built(spec: str, *, backend: str = "cpu") -> Path:
    """Return the directory of the built variant of a spec or an id.

    Needs no compiler: see `building.variant.find`, which also chooses among several builds. Raises
    NotBuilt, or UnknownPatch if nothing is found and the spec names an unknown patch.
    """
    if _is_id(spec):
        for root in variant_roots():
            if _read(root / spec / manifests.NAME):
                return root / spec
    from pyllamakv.building import variant

    found = variant.find(spec, backend=backend)
    if found is None:
        raise _not_built(_all_built(), spec, backend)
    return found.folder


def _is_id(spec: str) -> bool:
    """Return whether a text can be an id: a plain file name, and no folder still being written."""
    return bool(_PLAIN.fullmatch(spec)) and len(spec) <= _LONGEST


def _among(known: dict[str, Variant], spec: str) -> Path:
    """Return the folder of the CPU variant that a spec names, by the manifests alone.

    ``patched`` selects the newest with the most patches, and a list of patches the one with the
    fewest other patches.
    """
    release, names = _parse(spec)
    fitting = {
        key: each.manifest
        for key, each in known.items()
        if each.manifest.release == release
        and each.manifest.backend == "cpu"
        and _has(each.manifest, names)
    }
    if not fitting:
        raise _not_built(known, spec, "cpu")
    most = names == ("patched",)

    def rank(key: str) -> tuple[int, str]:
        found = fitting[key]
        return (len(found.patches) if most else -len(found.patches), found.created)

    return known[max(fitting, key=rank)].folder


def _not_built(known: dict[str, Variant], spec: str, backend: str) -> NotBuilt:
    from pyllamakv.building import variant

    made = {key: each.manifest for key, each in known.items()}
    there = {key: each.release for key, each in made.items() if each.backend == backend}
    wanted = variant.release_name(spec.rpartition("+")[0] or spec)
    same = sorted(key for key, release in there.items() if release == wanted)
    built = ""
    if same:
        built = f"; these builds have other patches, shim or settings: {', '.join(same)}"
    elif there:
        built = f"; built releases: {', '.join(sorted(set(there.values())))}"
    option = "" if backend == "cpu" else f" --backend {backend}"
    return NotBuilt(f"{spec} is not built; build it: pyllamakv build {spec}{option}{built}")


def _parse(spec: str) -> tuple[str, tuple[str, ...]]:
    release, plus, names = spec.strip().rpartition("+")
    if not plus:
        release, names = spec.strip(), "stock"
    if not release or not names:
        msg = f"{spec!r} is not a variant; expected for example 0.3.9, 0.3.9+patched"
        raise UsageError(msg)
    return release, tuple(names.split(","))


def _has(manifest: Manifest, names: tuple[str, ...]) -> bool:
    if names == ("stock",):
        return manifest.stock
    if names == ("patched",):
        return not manifest.stock
    return set(names) <= set(manifest.patches)


def _all_built() -> dict[str, Variant]:
    return {each.id: each for each in variants()}


def _read(file: Path) -> Manifest | None:
    try:
        return manifests.load(file)
    except ManifestError:
        return None


def serve_rpc(
    spec: str | os.PathLike[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    device: str | None = None,
    memory: int = 0,
    threads: int | None = None,
    backend: str = "cpu",
) -> RpcServer:
    """Serve a device of a built variant over RPC. Pass ``.endpoint`` to ``rpc_servers``.

    Without ``spec`` it is the variant that `open` opens by default.
    The server runs until it is closed or this process ends. Clients must have the same release. The
    protocol has no authentication: a ``host`` other than loopback is open to every machine that can
    reach it. ``backend`` selects the variant; for ``cuda``, the first GPU is served unless
    ``device`` names another. Raises NotBuilt, LoadError (also if no GPU is found), UsageError, or
    DeviceLost if the server ends at once.
    """
    from pyllamakv.binding.rpc_server import RpcServer

    where = variant_path(spec, backend=backend)
    return RpcServer(where, host=host, port=port, device=device, memory=memory, threads=threads)
