"""Write a small model whose text is divided before the merges by a regular expression."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf

from pyllamakv.scenarios import architectures, synthetic_models

if TYPE_CHECKING:
    from pathlib import Path

#: The printable bytes, which gpt2's alphabet maps to themselves; the others follow from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def write_bpe(path: Path, pre: str) -> Path:
    """Write a model with a token per byte, two merges and the pre-tokenizer ``pre``."""
    shape = synthetic_models.SHAPES["bytes"]
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in architectures.keys(shape).items():
        synthetic_models.add_value(writer, f"{shape.architecture}.{key}", value)
    others = (chr(0x100 + n) for n in range(256 - len(_PRINTABLE)))
    words = [chr(byte) if byte in _PRINTABLE else next(others) for byte in range(256)]
    words += ["aa", "aaaa", "<end>"]
    words += [f"<spare{n}>" for n in range(shape.n_vocab - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    kinds = [gguf.TokenType.NORMAL] * len(words)
    kinds[258] = gguf.TokenType.CONTROL
    writer.add_token_types(kinds)
    writer.add_token_merges(["a a", "aa aa"])
    writer.add_eos_token_id(258)
    for name, tensor in architectures.tensors(shape).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
