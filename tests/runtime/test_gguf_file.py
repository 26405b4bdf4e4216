"""Test that an invalid model file has a specific error, before C reads it."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import TYPE_CHECKING

import hypothesis_profile  # noqa: F401
import pytest
from fakes.tiny_gguf import gguf_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllamakv.errors import ModelError
from pyllamakv.runtime.gguf_file import check_file

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, data: bytes) -> Path:
    """Write a file."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_valid_file_has_architecture_and_counts(tmp_path: Path) -> None:
    """Check architecture, counts and values."""
    found = check_file(write(tmp_path, gguf_bytes()))
    assert (found.architecture, found.version, found.n_tensors) == ("llama", 3, 1)
    assert found.meta["general.name"] == "tiny"
    assert "some.list" in found.meta
    assert not found.has_partial_layers


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (b"GG", "truncated"),
        (b"GGUF\3\0", "truncated"),
        (b"not a model at all", "begins with b'not '"),
        (b"ggml" + bytes(100), "begins with b'ggml'"),
        (b"GGUF\0\0\0\3" + bytes(100), "big-endian"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(architecture=None), "no general.architecture"),
        (gguf_bytes(architecture=""), "no general.architecture"),
        (gguf_bytes()[:-1], "tensors need"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "damaged"),
    ],
)
def test_damaged_gguf_file_has_a_specific_message(
    tmp_path: Path, data: bytes, message: str
) -> None:
    """Check the message for each kind of damage."""
    with pytest.raises(ModelError, match=message):
        check_file(write(tmp_path, data))


NESTED = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(8, struct.pack("<Q", 1) + b"x"), (9, struct.pack("<IQ", 4, 0)), (7, b"\1"), (4, bytes(4)),
     (4, struct.pack("<I", 48)), (5, struct.pack("<i", -4096)), (6, struct.pack("<f", math.nan)),
     (12, struct.pack("<d", math.inf)), (10, struct.pack("<Q", 64))],
)  # fmt: skip
@pytest.mark.regression(
    "a GGUF with an invalid alignment was accepted, or raised an untyped error",
    by="hostile input",
    of="Python",
)
def test_invalid_alignment_is_refused(tmp_path: Path, kind: int, value: bytes) -> None:
    """If the start of the tensors is unknown, a truncated file cannot be detected."""
    data = gguf_bytes(more=("general.alignment", kind, value))
    for length in (len(data), len(data) - 512):
        with pytest.raises(ModelError, match="power of two"):
            check_file(write(tmp_path, data[:length]))


@pytest.mark.regression(
    "nested arrays in a GGUF raised RecursionError",
    by="hostile input",
    of="Python",
)
def test_arrays_in_arrays_are_refused(tmp_path: Path) -> None:
    """They could be nested without a limit, and ggml refuses them as well."""
    with pytest.raises(ModelError, match="type 9"):
        check_file(write(tmp_path, gguf_bytes(more=("x", 9, NESTED))))


@pytest.mark.regression(
    "names of sources that are invalid as paths raised untyped errors",
    by="hostile input",
    of="Python",
)
def test_missing_gguf_file_is_named(tmp_path: Path) -> None:
    """Check paths without a file."""
    with pytest.raises(ModelError, match="no model file"):
        check_file(tmp_path / "absent.gguf")
    for name in ("x\0", "x" * 300):
        with pytest.raises(ModelError, match="cannot be read"):
            check_file(name)
    with pytest.raises(ModelError, match="is a directory"):
        check_file(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_truncated_file_is_refused_at_every_length(tmp_path: Path, data: st.DataObject) -> None:
    """Check every shorter length."""
    whole = gguf_bytes()
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ModelError):
        check_file(write(tmp_path, whole[:length]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damaged_file_raises_only_model_error(tmp_path: Path, data: st.DataObject) -> None:
    """Check single overwritten bytes."""
    damaged = bytearray(gguf_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ModelError):
        check_file(write(tmp_path, bytes(damaged)))
