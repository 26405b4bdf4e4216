"""Open a library: find it, check it against its manifest and this machine, and own its objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pyllamakv.binding import arguments, loading
from pyllamakv.binding.local import Local
from pyllamakv.binding.owner import Owner
from pyllamakv.building import manifest as manifests
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import LoadError, ManifestError, UsageError

if TYPE_CHECKING:
    import os

    from pyllamakv.binding.protocol import LibraryInfo, Native
    from pyllamakv.building.manifest import Manifest

#: Backends that can end their process, and therefore always run in a worker.
_APART: Final = frozenset({"cuda", "metal", "vulkan"})

_HINTS: Final = {
    "cuda": "`nvidia-smi` must list a GPU, and CUDA_VISIBLE_DEVICES must not hide it",
    "metal": "Metal needs a Mac with a GPU",
    "vulkan": "`vulkaninfo --summary` must list a device; a processor only counts with "
    "GGML_VK_VISIBLE_DEVICES=0",
}

#: Messages of the CUDA runtime about a driver that is older than the runtime.
_TOO_OLD: Final = "driver version is insufficient"

#: The longest timeout of a call, in seconds: a year.
MAX_TIMEOUT: Final = 3.2e7

#: Library -> (modification time, size) when its sha256 was last found to be the manifest's.
_checked: dict[Path, tuple[int, int]] = {}


class Library(ClosedOnExit):
    """One opened library; models are made on ``owner`` and close before it does."""

    def __init__(
        self,
        native: Native,
        path: Path,
        manifest: Manifest | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self.native = native
        #: The library file.
        self.path = path
        self.manifest = manifest
        self.isolated = isolated
        #: The variant and its capabilities.
        self.about: LibraryInfo = native.about
        self.owner: Owner[int] = Owner(0, lambda _raw: native.close(), "library")

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str],
        *,
        isolated: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Open the directory of a variant, or a library file.

        ``isolated`` loads it in a worker process, where ``env`` adds environment variables and
        ``timeout`` limits each call in seconds. Backends other than the CPU always use a worker. A
        directory needs a matching manifest; a library file without one is loaded as it is. Raises
        LoadError with the remedy.
        """
        isolated = arguments.flag("isolated", isolated)
        env = variables(env)
        if timeout is not None:
            timeout = arguments.number("timeout", timeout, 0.0, MAX_TIMEOUT)
        path, manifest = find_library(arguments.path("where", where))
        if manifest is not None and manifest.backend in _APART:
            isolated = True
        if not isolated and (env or timeout is not None):
            raise UsageError("env and timeout need a worker: pass isolated=True")
        native: Native
        if isolated:
            from pyllamakv.binding.remote import Remote

            native = Remote(path, env=env, timeout=timeout)  # type: ignore[abstract]
        else:
            native = Local(path)
        try:
            if manifest is not None:
                _compare(native.about, manifest, path)
                first_gpu(native, manifest)
            return cls(native, path, manifest, isolated=isolated)
        except BaseException:
            native.close()
            raise

    @property
    def closed(self) -> bool:
        """Return whether it was closed."""
        return self.owner.closed

    def close(self) -> None:
        """Close contexts, models, then the library. Raises Busy if one is in use."""
        self.owner.close()


def variables(env: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return checked environment variables; None: none were given."""
    if env is None:
        return None
    expected = "a mapping of names of environment variables to text, or None"
    arguments.instance("env", env, Mapping, expected)  # type: ignore[type-abstract]
    found = {}
    for name, value in env.items():
        arguments.c_text("a name in env", name)
        if not name or "=" in name:
            raise arguments.wrong_value("a name in env", name, "text without '='")
        found[name] = arguments.c_text(f"env[{arguments.shown(name)}]", value)
    return found


def open_library(
    where: str | os.PathLike[str],
    *,
    isolated: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Library:
    """Open a variant's folder or the file of a library; see `Library.open`."""
    return Library.open(where, isolated=isolated, env=env, timeout=timeout)


def find_library(where: Path) -> tuple[Path, Manifest | None]:
    """Return the library of a folder or file, and its manifest after checking both and the machine.

    Raises LoadError.
    """
    where = where.absolute()
    try:
        where.stat()
    except FileNotFoundError:
        pass  # reported below
    except OSError as error:
        raise LoadError(
            f"{arguments.shown(str(where))} cannot be read: {error.strerror}"
        ) from error
    folder = where if where.is_dir() else where.parent
    if where.is_dir() or (folder / manifests.NAME).is_file():
        try:
            manifest = manifests.load(folder)
            if where.is_dir() or manifest.library == where.name:
                return _checked_library(manifest, folder), manifest
        except ManifestError as error:
            raise LoadError(str(error)) from error
    if not where.is_file():
        raise LoadError(
            f"expected a variant's folder or a library at {where}, found neither; `pyllamakv build "
            "RELEASE` builds one"
        )
    return where, None


def _checked_library(manifest: Manifest, folder: Path) -> Path:
    if manifest.abi != loading.ABI:
        raise LoadError(
            f"variant {manifest.variant} has interface version {manifest.abi}, "
            f"this package requires {loading.ABI}: build it again with pyllamakv build "
            f"{manifest.release}"
        )
    manifest.check_machine()
    path = folder / manifest.library
    try:
        found = path.stat()
    except OSError:
        manifest.check_library(folder)
        raise
    # Hashing hundreds of megabytes once is enough, as long as the file stays the same.
    stamp = (found.st_mtime_ns, found.st_size)
    if _checked.get(path) != stamp:
        manifest.check_library(folder)
        _checked[path] = stamp
    return path


def first_gpu(native: Native, manifest: Manifest) -> str | None:
    """Return the device that a variant is for; None: the processor.

    Raises LoadError when a variant for a device finds none: it would compute on the processor.
    """
    if manifest.backend not in _APART:
        return None
    found = next((each.name for each in native.devices() if each.kind == "gpu"), None)
    if found is not None:
        return found
    hint, log_lines = _HINTS[manifest.backend], [text for _, text in native.logs()]
    if any(_TOO_OLD in text for text in log_lines):
        toolkit = manifest.options.get("PLK_CUDA_VERSION", "that built it")
        hint = (
            f"the driver is too old for the toolkit {toolkit}: update it, or build with a toolkit "
            "of the CUDA version that `nvidia-smi` shows"
        )
    raise LoadError(
        f"variant {manifest.variant} is for {manifest.backend}, and no such device was found: "
        f"{hint}, or use a CPU variant",
        log=log_lines,
    )


def _compare(about: LibraryInfo, manifest: Manifest, path: Path) -> None:
    if about.variant != manifest.variant:
        raise LoadError(
            f"{path} reports variant {about.variant}, its manifest says "
            f"{manifest.variant}: remove its directory and build again"
        )
