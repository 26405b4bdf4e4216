"""Load LoRA adapters, and identify those that a context uses.

llama.cpp asserts on metadata of a wrong type and on some shapes. The file is therefore checked here
first, against the tensors of the model.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pyllamakv import content_digest
from pyllamakv.binding import arguments
from pyllamakv.binding.owner import Owner, free_quietly
from pyllamakv.binding.protocol import Capability
from pyllamakv.closing import ClosedOnExit
from pyllamakv.errors import AdapterError, ModelError, UsageError
from pyllamakv.runtime.ggml_types import CACHE_TYPES, number_type
from pyllamakv.runtime.gguf_file import check_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from pyllamakv.binding.protocol import AdapterHandle
    from pyllamakv.runtime.gguf_file import ModelFile, TensorHeader
    from pyllamakv.runtime.parts import ModelParts

#: Adapters with their scales.
AdapterScales = tuple[tuple["Adapter", float], ...]

_A: Final = ".lora_a"
_B: Final = ".lora_b"
#: GGUF type of a 32-bit float.
_F32: Final = 6
#: Maximum length of a tensor's name in ggml (GGML_MAX_NAME without the final zero).
_LONGEST: Final = 63
#: Maximum of a scale's absolute value.
_LARGEST_SCALE: Final = 1e6


class Adapter(ClosedOnExit):
    """A loaded LoRA adapter. `Model.load_adapter` creates it, and `Context.set_adapters` uses it.

    Contexts that use it keep it after `close`.
    """

    _internal = frozenset(("file", "owner"))

    def __init__(self, model: ModelParts, handle: AdapterHandle, file: ModelFile) -> None:
        self.model = model
        self.file = file
        facts = file.records[0].facts
        #: Identifies the content within the model object: the same file has the same name.
        self.name = secrets.token_hex(8) if facts is None else ":".join(map(str, facts))
        self._digest: str | None = None
        self.owner: Owner[Any] = Owner(
            handle, partial(free_quietly, model.native.adapter_free), "adapter", model.owner
        )

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self.file.path

    def digest(self) -> str:
        """Return the digest of all bytes of the file, as `Model.digest` does.

        Raises ModelUnverified if the file is gone, or changed after the load.
        """
        if self._digest is None:
            self._digest = content_digest.compute(self.file.records)
        return self._digest

    @property
    def closed(self) -> bool:
        """Whether this adapter, its model or its library was closed."""
        return self.owner.closed

    def close(self) -> None:
        """Free the adapter, once no context uses it. A second call does nothing."""
        self.owner.close()

    def __repr__(self) -> str:
        return f"<Adapter {self.path.name}{', closed' if self.closed else ''}>"


def load(model: ModelParts, path: str | os.PathLike[str]) -> Adapter:
    """Load an adapter for a model; `Model.load_adapter` describes it."""
    place = arguments.path("path", path)
    model.native.about.require(Capability.ADAPTERS, "load LoRA adapters")
    try:
        file = check_file(place, "adapter")
    except ModelError as error:
        raise AdapterError(str(error)) from error
    n_pairs = _check(file, model)
    with model.owner as raw:
        handle = model.native.adapter_load(raw, str(place.resolve()), n_pairs)
    try:
        return Adapter(model, handle, file)
    except BaseException:
        free_quietly(model.native.adapter_free, handle)
        raise


def checked_adapters(model: ModelParts, adapters: Any) -> AdapterScales:
    """Return the adapters of a mapping with their scales as float32, without scales of 0.

    Raises UsageError for an adapter of another model, and Closed for a closed one.
    """
    if not isinstance(adapters, Mapping):
        raise arguments.wrong_type("adapters", adapters, "a mapping of adapters to scales")
    found = []
    for adapter, scale in adapters.items():
        arguments.instance("a key of adapters", adapter, Adapter, "an Adapter")
        if adapter.model is not model:
            msg = f"{adapter} was loaded for another model: load it with model.load_adapter"
            raise UsageError(msg)
        _ = adapter.owner.raw
        factor = arguments.number("a scale", scale, -_LARGEST_SCALE, _LARGEST_SCALE)
        factor = float(np.float32(factor))
        if factor:
            found.append((adapter, factor))
    return tuple(found)


def identify(adapters: AdapterScales) -> str:
    """Return a text that is equal for the same adapter files and scales; empty for none.

    It identifies them within one `Model`, without reading the files. The order does not matter. Two
    adapters of equal files are one with the sum of their scales only in exact arithmetic, so they
    stay two.
    """
    return ", ".join(sorted(f"{adapter.name} x {scale!r}" for adapter, scale in adapters))


def digest(adapters: AdapterScales) -> str:
    """Return a digest of the content of adapters and of their scales; empty for none.

    Raises ModelUnverified.
    """
    found = ", ".join(sorted(f"{adapter.digest()} x {scale!r}" for adapter, scale in adapters))
    return hashlib.sha256(found.encode()).hexdigest()[:32] if found else ""


def _check(file: ModelFile, model: ModelParts) -> int:
    """Check the header of an adapter; return its number of pairs. Raises AdapterError."""
    meta = file.meta
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if meta.get(key) != expected:
            msg = (
                f"{file.path} is not a LoRA adapter: {key} is {meta.get(key)!r}, not {expected!r}; "
                "convert it with llama.cpp's convert_lora_to_gguf.py"
            )
            raise AdapterError(msg)
    if file.architecture != model.file.architecture:
        raise _foreign(file, model, f"it adapts the architecture {file.architecture!r}")
    alpha = meta.get("adapter.lora.alpha", 0.0)
    if file.kinds.get("adapter.lora.alpha", _F32) != _F32 or not math.isfinite(alpha):
        raise AdapterError(f"{file.path}: adapter.lora.alpha must be a finite 32-bit float")
    if len(meta) != file.n_meta or len(file.tensors) != file.n_tensors:
        raise AdapterError(f"{file.path} is damaged: it has two values or tensors of one name")
    names = {_target(file, name) for name in file.tensors} - {""}
    if not names:
        raise AdapterError(f"{file.path} has no tensors NAME{_A} and NAME{_B}")
    for name in names:
        _check_pair(file, model, name)
    return len(names)


def _target(file: ModelFile, name: str) -> str:
    """Return the name of the tensor that a tensor adapts; empty if llama.cpp ignores it."""
    for suffix in (_A, _B):
        if name.endswith(suffix) and len(name.encode()) <= _LONGEST:
            return name.removesuffix(suffix)
    if name.endswith("_norm.weight"):
        return ""
    raise AdapterError(f"{file.path} has an unexpected tensor {arguments.shown(name)}")


def _check_pair(file: ModelFile, model: ModelParts, name: str) -> None:
    """Check that two tensors can be multiplied, and that the product has the model's shape."""
    a, b = file.tensors.get(name + _A), file.tensors.get(name + _B)
    of = model.file.tensors.get(name)
    if a is None or b is None:
        raise AdapterError(f"{file.path}: {name} has only one of {_A[1:]} and {_B[1:]}")
    if of is None:
        raise _foreign(file, model, f"it adapts {name}, which the model does not have")
    shape_a, shape_b, shape = (_four(each.shape) for each in (a, b, of))
    if name.endswith("token_embd.weight"):
        # Rows of A are looked up by token, so A and B have other roles.
        fits = (shape_a[1], shape_b[1]) == (shape[1], shape[0]) and shape_a[0] == shape_b[0]
    else:
        fits = (shape_a[0], shape_b[1]) == shape[:2] and shape_a[1] == shape_b[0]
    if not fits or not shape_a[2:] == shape_b[2:] == shape[2:] or 0 in (*shape_a, *shape_b):
        shown = f"{list(a.shape)} and {list(b.shape)} for {list(of.shape)}"
        raise _foreign(file, model, f"{name} has the shapes {shown}")
    for each in (a, b):
        _check_type(file, name, each)


def _check_type(file: ModelFile, name: str, tensor: TensorHeader) -> None:
    try:
        found = number_type(tensor.kind)
        found.row_bytes(tensor.shape[0])
    except UsageError as error:
        raise AdapterError(f"{file.path}: {name}: {error}") from error
    if found.name not in CACHE_TYPES:
        msg = f"{file.path}: {name} has the type {found.name}; use one of {', '.join(CACHE_TYPES)}"
        raise AdapterError(msg)


def _four(shape: Iterable[int]) -> tuple[int, ...]:
    found = tuple(shape)
    return found + (1,) * (4 - len(found))


def _foreign(file: ModelFile, model: ModelParts, why: str) -> AdapterError:
    return AdapterError(f"{file.path} is not an adapter of {model.path.name}: {why}")
