"""Test that types of numbers are found by name and number, with the sizes of their rows."""

from __future__ import annotations

import gguf
import pytest

from pyllamakv.errors import UsageError
from pyllamakv.runtime.ggml_types import CACHE_TYPES, TYPES, cache_type, number_type


def test_sizes_are_those_of_the_gguf_package() -> None:
    """Check every type that gguf has against its table."""
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    # gguf still has the q8_1 of 2023, whose two factors had 4 bytes each; no file or cache uses it.
    compared = [kind for kind in TYPES if kind.number in theirs and kind.name != "q8_1"]
    assert len(compared) > 20
    for kind in compared:
        assert (kind.block, kind.bytes) == theirs[kind.number], kind.name
        assert gguf.GGMLQuantizationType(kind.number).name.lower() == kind.name


def test_type_is_found_by_name_and_number() -> None:
    """Check both directions, and that case does not matter."""
    for name in CACHE_TYPES:
        kind = number_type(name)
        assert number_type(kind.number) is kind
        assert number_type(name.upper()) is kind


def test_rows_of_quantized_types_need_whole_blocks() -> None:
    """Check that a row of 48 values has no q8_0 form, and one of 64 has."""
    assert number_type("q8_0").row_bytes(64) == 68
    assert number_type("f16").row_bytes(48) == 96
    with pytest.raises(UsageError, match="blocks of 32"):
        number_type("q8_0").row_bytes(48)


@pytest.mark.parametrize("wrong", ["f17", 9999, -1, ""])
def test_unknown_types_are_refused_with_the_known_ones(wrong: str | int) -> None:
    """Check that the message lists the known types."""
    with pytest.raises(UsageError, match="q8_0"):
        number_type(wrong)


def test_a_cache_cannot_be_of_every_type() -> None:
    """Check that types without a copy operation are refused for K and V."""
    with pytest.raises(UsageError, match="K cache cannot be q6_k"):
        cache_type("q6_k", "K")
