"""Generate tiny GGUF models, so that verification needs no download.

A model is a function of its `Shape` alone, with a fixed seed. Files are stored in
``home()/models``, with a digest of the shape in their names: a changed shape is a new file, and
concurrent processes write the same content.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf

from pyllamakv.errors import Untestable, UsageError
from pyllamakv.home import home
from pyllamakv.models import catalog
from pyllamakv.scenarios import architectures
from pyllamakv.scenarios.architectures import Shape
from pyllamakv.source.files import translate_permission_errors

#: Name of the user's own model, and the environment variable with its path.
TEST = "test"
VARIABLE = "PYLLAMAKV_TEST_MODEL"

#: Token id of byte 0 in the vocabulary of `Shape.vocab` "bytes", after unknown, start and end.
BYTE_OFFSET = 3


#: The models that scenarios name.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny"),
        Shape("deep", n_layer=64),
        Shape("grouped", n_layer=2, n_embd=128, n_head=4, n_head_kv=2),
        Shape("bytes", n_vocab=320, vocab="bytes"),
        # Through b5415, a gemma2 model with another number of layers than the published ones
        # aborts.
        Shape("sliding", n_layer=26, architecture="gemma2", window=32),
        Shape("recurrent", n_layer=2, architecture="mamba"),
        Shape("hybrid", n_layer=4, architecture="jamba"),
        Shape("latent", n_layer=2, n_embd=64, n_head=2, n_head_kv=1, architecture="deepseek2"),
        Shape("indexed", n_layer=2, n_embd=64, n_head=2, n_head_kv=1, architecture="deepseek32"),
        Shape(
            "indexed-sliding",
            n_layer=2,
            n_embd=64,
            n_head=2,
            n_head_kv=1,
            architecture="dots3note",
            window=32,
        ),
        Shape("places", n_layer=2, n_embd=64, n_head=2, n_head_kv=2, architecture="qwen2vl"),
        Shape("blocks", n_layer=2, n_embd=128, n_head=4, n_head_kv=2, architecture="minimax-m3"),
        Shape(
            "compressed",
            n_layer=3,
            n_embd=64,
            n_head=2,
            n_head_kv=1,
            architecture="deepseek4",
            window=32,
            head=64,
        ),
        Shape("pooled", n_layer=2, n_embd=128, n_head=2, n_head_kv=1, architecture="qwen4exp"),
        Shape(
            "pooled-latent",
            n_layer=2,
            n_embd=64,
            n_head=2,
            n_head_kv=1,
            architecture="glm5-next",
        ),
        Shape("hybrid-sliding", n_layer=4, architecture="lfm2", window=32),
    )
}

#: Suffix of a model's name for its variant with wide rows.
WIDE = "-wide"

#: Values in a row of K or V of such a variant.
WIDE_ROW = 256

#: The architectures that have such variants.
WIDENED = ("llama", "gemma2")


def with_wide_rows(shape: Shape) -> Shape:
    """Return the variant of a shape with rows of 256 values, which devices compute correctly.

    Kernels for flash attention support heads of 64 values. Where scores are capped, as in gemma2,
    those of CUDA support only heads of 128 and 256 (ggml-cuda/fattn-mma-f16.cuh). Vulkan writes a
    row of quantized blocks to a wrong address unless its offset is a multiple of the device's
    buffer alignment, usually 4 to 16 bytes: 256 values are 272 bytes in q8_0, 144 in q4_0.
    """
    head = 128 if shape.architecture == "gemma2" else 64
    n_kv = WIDE_ROW // head
    heads = n_kv * (shape.n_head // shape.n_head_kv)
    return replace(shape, name=shape.name + WIDE, head=head, n_head=heads, n_head_kv=n_kv)


SHAPES |= {
    wide.name: wide
    for wide in (with_wide_rows(each) for each in SHAPES.values() if each.architecture in WIDENED)
}


def tiny() -> Path:
    """Return the model of one layer, 32 wide, without a vocabulary."""
    return model("tiny")


def model(name: str) -> Path:
    """Return the path of a named model; it is generated if it does not exist.

    ``test`` is the model that PYLLAMAKV_TEST_MODEL names. The path of a GGUF file is returned
    unchanged. Raises NotFetched for a model of the package index that was not fetched.
    """
    if name in SHAPES:
        return generate(SHAPES[name], home() / "models")
    pinned = catalog.known()
    if name in pinned:
        return catalog.find(name)
    if name == TEST:
        named = os.environ.get(VARIABLE, "")
        if not named:
            msg = f"{VARIABLE} is not set to the path of a model"
            raise Untestable(msg)
        name = named
    # An invalid path (too long, or with a zero byte) is not a model either.
    with suppress(OSError, ValueError):
        path = Path(name)
        if path.is_file():
            return path
    names = ", ".join((*SHAPES, *pinned))
    msg = f"there is no model {name!r}: expected a GGUF file or one of {names}"
    raise UsageError(msg)


def identity(name: str) -> str:
    """Return an identification of a named model's content, without generating it."""
    if name in SHAPES:
        return SHAPES[name].digest
    if name in (pinned := catalog.known()):
        return pinned[name].sha256
    try:
        with model(name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except Untestable:
        return ""


def cost(name: str) -> int:
    """Return the approximate cost of a run on a named model, for the order of work."""
    return SHAPES[name].n_layer if name in SHAPES else 8


def generate(shape: Shape, folder: Path) -> Path:
    """Return ``folder/NAME-DIGEST.gguf``, written atomically if it does not exist."""
    path = folder / f"{shape.name}-{shape.digest}.gguf"
    if path.is_file():
        return path
    with translate_permission_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{shape.name}-", suffix=".gguf", dir=folder)
    os.close(handle)
    try:
        write(shape, Path(name))
        # mkstemp creates private files; the data directory may be shared between users.
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def write(shape: Shape, path: Path) -> None:
    """Write the model of a shape to ``path``: f32 weights."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"pyllamakv {shape.name}")
    for key, value in architectures.keys(shape).items():
        add_value(writer, f"{shape.architecture}.{key}", value)
    _add_vocab(writer, shape)
    for name, tensor in architectures.tensors(shape).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: float | bool | list[int]) -> None:
    """Add a metadata value with the type that llama.cpp reads."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _add_vocab(writer: gguf.GGUFWriter, shape: Shape) -> None:
    if shape.vocab == "none":
        writer.add_tokenizer_model("no_vocab")
        return
    words = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    extra = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "\u2581the", "th", "he", "an"]
    words += [word.encode() for word in extra]
    words += [f"<spare{number}>".encode() for number in range(shape.n_vocab - len(words))]
    kinds += [gguf.TokenType.NORMAL] * (shape.n_vocab - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(number) for number in range(len(words))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
