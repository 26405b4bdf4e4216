"""Check a model or adapter file before C reads it: a complete GGUF of a named architecture."""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.content_digest import FileRecord, record
from pyllamakv.errors import ModelError, UsageError
from pyllamakv.runtime.ggml_types import number_type

if TYPE_CHECKING:
    import os

_MAGIC = b"GGUF"
_U32, _STRING, _ARRAY = 4, 8, 9
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST = 1 << 32
#: Alignment of tensors and its default. ggml aborts unless it is a power of two.
_ALIGNMENT, _USUAL = "general.alignment", 32
#: The number of files of a model, and the end of a first file's name.
_SPLITS, _FIRST = "split.count", re.compile(r"-00001-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The number of a ggml type, and the shape, whose first dimension is contiguous."""

    kind: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The header of a GGUF file.

    ``meta`` has its values, None for an array, and ``kinds`` the GGUF type of each. ``n_meta`` and
    ``n_tensors`` count repeated names as well. ``records`` has the file, and the other files of a
    split model, as they were when the header was read.
    """

    path: Path
    architecture: str
    version: int
    n_meta: int
    n_tensors: int
    meta: dict[str, Any]
    kinds: dict[str, int]
    tensors: dict[str, TensorHeader]
    records: tuple[FileRecord, ...]

    @property
    def has_partial_layers(self) -> bool:
        """Return whether some layers may keep less than every token."""
        return any(key.endswith(".attention.sliding_window") or ".ssm." in key for key in self.meta)


class _Short(Exception):
    pass


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def read(self, form: str) -> Any:
        size = struct.calcsize("<" + form)
        self.skip(size)
        return struct.unpack_from("<" + form, self.data, self.at - size)[0]

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise _Short
        self.at += size

    def text(self) -> str:
        size = self.read("Q")
        self.skip(size)
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            self.array()
            return None
        if kind not in _FORMS:
            msg = f"a value has the unknown type {kind}"
            raise ModelError(msg)
        return self.read(_FORMS[kind])

    def array(self) -> None:
        kind, n = self.read("I"), self.read("Q")
        if kind in _FORMS:
            self.skip(struct.calcsize("<" + _FORMS[kind]) * n)
            return
        if kind != _STRING:
            msg = f"an array has values of type {kind}; expected numbers or texts"
            raise ModelError(msg)
        if n > len(self.data):
            raise _Short
        for _ in range(n):
            self.text()


def check_file(path: str | os.PathLike[str], noun: str = "model") -> ModelFile:
    """Read the header of a file. Raises ModelError with the reason; ``noun`` names the content."""
    file = Path(path)
    try:
        if file.is_dir():
            msg = f"{file} is a directory; expected a GGUF file"
            raise ModelError(msg)
        with file.open("rb") as opened:
            start = opened.read(8)
            _check_magic(file, start)
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(file, _Header(data), noun, record(file.absolute(), opened.fileno()))
    except FileNotFoundError:
        msg = f"there is no {noun} file {file}"
        raise ModelError(msg) from None
    except (OSError, ValueError) as error:  # or no path of this system
        msg = f"the {noun} file {file} cannot be read: {getattr(error, 'strerror', '') or error}"
        raise ModelError(msg) from error
    except _Short:
        size = file.stat().st_size
        msg = f"{file} ends after {size} bytes, within its header: truncated; download it again"
        raise ModelError(msg) from None


def _check_magic(file: Path, start: bytes) -> None:
    if len(start) < 8 and start[:4] != _MAGIC[: len(start[:4])]:
        msg = f"{file} is not a GGUF file: it has {len(start)} bytes"
        raise ModelError(msg)
    if len(start) < 8:
        raise _Short
    if start[:4] != _MAGIC:
        msg = f"{file} is not a GGUF file: it begins with {start[:4]!r} and not with {_MAGIC!r}"
        raise ModelError(msg)
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0:
        msg = f"{file} is a big-endian GGUF file; expected a little-endian one"
        raise ModelError(msg)
    if version < 2:
        msg = f"{file} is a GGUF of version {version}; expected 2 or later: convert it again"
        raise ModelError(msg)


def _read(file: Path, header: _Header, noun: str, first: FileRecord) -> ModelFile:
    header.skip(4)
    version, n_tensors, n_meta = header.read("I"), header.read("Q"), header.read("Q")
    if n_tensors > _MOST or n_meta > _MOST:
        msg = f"{file} claims {n_tensors} tensors and {n_meta} values: damaged; download it again"
        raise ModelError(msg)
    meta: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    for _ in range(n_meta):
        key, kind = header.text(), header.read("I")
        meta[key], kinds[key] = header.value(kind), kind
        if key == _ALIGNMENT and (kind != _U32 or meta[key].bit_count() != 1):
            msg = f"{file} has {_ALIGNMENT} {meta[key]!r}; expected a power of two in 32 bits"
            raise ModelError(msg)
    architecture = meta.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        what = "a language model" if noun == "model" else f"an {noun}"
        msg = f"{file} has no general.architecture: it is not {what}"
        raise ModelError(msg)
    tensors: dict[str, TensorHeader] = {}
    end = _end_of_tensors(header, n_tensors, meta.get(_ALIGNMENT, _USUAL), tensors)
    if end > len(header.data):
        msg = (
            f"{file} has {len(header.data)} bytes and its tensors need {end}: truncated; download "
            "it again"
        )
        raise ModelError(msg)
    records = (first, *map(record, _other_files(first.path, meta.get(_SPLITS))))
    return ModelFile(file, architecture, version, n_meta, n_tensors, meta, kinds, tensors, records)


def _other_files(first: Path, n_files: Any) -> list[Path]:
    """Return the other files of a split model, named as llama.cpp names them."""
    found = _FIRST.search(first.name)
    if not isinstance(n_files, int) or n_files < 2 or found is None:
        return []
    if int(found[1]) != n_files or found.end() != len(first.name):
        return []
    begin = first.name[: found.start()]
    return [
        first.with_name(f"{begin}-{n:05d}-of-{n_files:05d}.gguf") for n in range(2, n_files + 1)
    ]


def _end_of_tensors(
    header: _Header, n_tensors: int, alignment: int, tensors: dict[str, TensorHeader]
) -> int:
    """Read the headers of all tensors into ``tensors``; return the end of their data."""
    last = 0
    for _ in range(n_tensors):
        name = header.text()
        n_dims = header.read("I")
        if n_dims > 4:
            msg = f"a tensor has {n_dims} dimensions; expected at most 4: the file is damaged"
            raise ModelError(msg)
        shape = [header.read("Q") for _ in range(n_dims)]
        kind, offset = header.read("I"), header.read("Q")
        tensors[name] = TensorHeader(kind, tuple(shape))
        last = max(last, offset + _tensor_bytes(kind, shape))
    data = -(-header.at // alignment) * alignment
    return data + last if n_tensors else header.at


def _tensor_bytes(kind: int, shape: list[int]) -> int:
    try:
        size = number_type(kind).row_bytes(shape[0]) if shape else 0
    except UsageError:
        # A type of a later llama.cpp, which checks the size itself.
        return 0
    for n in shape[1:]:
        size *= n
    return size
