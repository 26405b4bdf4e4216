"""Load the file of a library and check that it speaks the interface of this package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pyllamakv.errors import LoadError
from pyllamakv.native._plk import ffi

ABI: Final[int] = ffi.integer_const("PLK_ABI")

#: Name of a library that the loader may not find -> remedy.
_HINTS: Final = {
    "libcuda.so": (
        "no NVIDIA driver on this machine (libcuda.so.1 is missing): install the driver, or use a "
        "CPU variant"
    ),
    "libcudart": "the CUDA runtime is not installed: install the CUDA toolkit that built this",
    "libcublas": "cuBLAS is not installed: install the CUDA toolkit that built this",
    "libvulkan": "no Vulkan loader on this machine: install libvulkan1",
    "libgomp": "the OpenMP runtime is not installed: install libgomp1",
    "GLIBC": "the library was built for a newer C library: build the variant on this machine",
}

#: Path -> the file (device, inode) that this process has mapped under it.
_mapped: dict[str, tuple[int, int]] = {}


def struct_names() -> list[str]:
    """Return the names of the structs with known fields; handles are opaque."""
    names = []
    for name in ffi.list_types()[0]:
        try:
            ffi.sizeof(name)
        except ffi.error:
            continue
        names.append(name)
    return names


def load(path: Path) -> Any:
    """Load a library into this process and return it.

    Its symbols are local (RTLD_LOCAL), and it stays loaded until the process ends, because its
    threads may outlive every Python object. Raises LoadError if it is missing, has another
    interface version, or needs something that this machine lacks.
    """
    path = Path(os.path.realpath(path))
    name = str(path)
    try:
        found = path.stat()
    except OSError as error:
        raise LoadError(
            f"cannot load {path}: {error.strerror}; build it with pyllamakv build"
        ) from error
    file = (found.st_dev, found.st_ino)
    if _mapped.get(name, file) != file:
        # The loader compares names, and would silently return the old library.
        raise LoadError(
            f"{path} was replaced after this process loaded it: start a new process, or open it "
            "with isolated=True"
        )
    flags = ffi.RTLD_NOW | ffi.RTLD_LOCAL | getattr(ffi, "RTLD_NODELETE", 0)
    try:
        lib = ffi.dlopen(name, flags)
    except OSError as error:
        raise LoadError(_explain(path, str(error))) from error
    _mapped[name] = file
    _check(lib, path)
    return lib


def _explain(path: Path, text: str) -> str:
    for mark, hint in _HINTS.items():
        if mark in text.replace(str(path), ""):
            return f"cannot load {path}: {hint} ({text})"
    return f"cannot load {path}: {text}; expected a libplk built by pyllamakv build"


def _check(lib: Any, path: Path) -> None:
    try:
        abi = lib.plk_abi()
        if abi != ABI:
            raise LoadError(
                f"{path} has interface version {abi}, this package requires {ABI}: build the "
                f"variant "
                "again with this version of pyllamakv"
            )
        for name in dir(lib):
            getattr(lib, name)  # found now, or missing in the middle of someone's work
    except (AttributeError, ffi.error) as error:
        raise LoadError(
            f"{path} is not a libplk of this package ({error}): build one with pyllamakv build"
        ) from error
    for name in struct_names():
        size = lib.plk_sizeof(name.encode())
        if size != ffi.sizeof(name):
            raise LoadError(
                f"{path} has a {name} of {size} bytes, this package one of {ffi.sizeof(name)}: "
                "build the variant again with this version of pyllamakv"
            )
