"""Test that files of earlier versions are still read, including their content.

They have no digest of the model, so the caller must accept them by name. A kept cache is the
exception: its former format is refused.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import formats
import numpy as np
import pytest

import pyllamakv as kv
from pyllamakv.building.variant import Variant
from pyllamakv.errors import (
    KVFileError,
    KVFileForeign,
    PrefixStoreForeign,
    StateError,
    StateForeign,
)
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source import lockfile

#: Flash attention is off: the same tokens in the same cells give the same bits.
TOLERANCE = 1e-5


def expected(model, number: int) -> np.ndarray:
    """Return the logits after the same tokens in a fresh context."""
    with model.context(**formats.SHAPE) as context:
        return formats.logits_after(context, formats.fill(context)[number])


def test_every_kind_of_file_is_kept() -> None:
    """A new kind must be added here."""
    names = {path.name for path in formats.FOLDER.iterdir()}
    assert names == {"lock.toml", "trace.jsonl", "sequence.save", "cache.kv", "prefix-store"}


def test_the_lock_is_read() -> None:
    """It has all twenty releases with their pins."""
    releases = lockfile.load(formats.FOLDER / "lock.toml")
    assert len(releases) == 20
    assert all(len(one.commit) == len(one.tree) == 40 for one in releases)
    assert {one.kind for one in releases} == {"sdist", "npm"}


@pytest.mark.native
def test_a_saved_sequence_is_restored(patched: Variant) -> None:
    """Its tokens are restored, and its state up to the logits of the next token."""
    saved = (formats.FOLDER / "sequence.save").read_bytes()
    with kv.open(patched.folder) as lib, lib.load_model(synthetic_models.tiny()) as model:
        with model.context(**formats.SHAPE) as context:
            sequence = context.sequence(1)
            with pytest.raises(StateForeign, match=r"earlier version.*accept_unverified_model"):
                sequence.restore(saved)
            sequence.restore(saved, accept_unverified_model=True)
            assert list(sequence.tokens) == formats.TOKENS[0]
            found = formats.logits_after(context, sequence)
        assert np.abs(found - expected(model, 0)).max() < TOLERANCE


@pytest.mark.native
def test_a_saved_sequence_of_another_shape_is_refused(patched: Variant) -> None:
    """The error names the difference, and the sequence is unchanged."""
    saved = (formats.FOLDER / "sequence.save").read_bytes()
    with kv.open(patched.folder) as lib, lib.load_model(synthetic_models.tiny()) as model:  # noqa: SIM117
        with model.context(**formats.SHAPE, type_k="q8_0") as context:
            sequence = context.sequence(0)
            with pytest.raises(StateError, match="type_k"):
                sequence.restore(saved)
            assert len(sequence) == 0


@pytest.mark.native
@pytest.mark.parametrize("accepted", [False, True])
def test_a_kept_cache_of_a_former_format_is_refused(
    patched: Variant, tmp_path: Path, accepted: bool
) -> None:
    """Format 2 has gaps between tensors; the error names both formats, the file is unchanged."""
    kept = tmp_path / "cache.kv"
    shutil.copyfile(formats.FOLDER / "cache.kv", kept)
    with kv.open(patched.folder) as lib, lib.load_model(synthetic_models.tiny()) as model:
        options = {**formats.SHAPE, "kv_backing": kept, "kv_keep": True}
        with pytest.raises(KVFileForeign, match="has format 2, expected 3"):
            model.context(**options, accept_unverified_model=accepted)
    assert kept.read_bytes() == (formats.FOLDER / "cache.kv").read_bytes()


@pytest.mark.native
def test_a_kept_cache_of_another_format_is_refused(patched: Variant, tmp_path: Path) -> None:
    """A changed version in its header is a typed error, and no tokens are loaded."""
    kept = tmp_path / "cache.kv"
    data = bytearray((formats.FOLDER / "cache.kv").read_bytes())
    data[8] ^= 0x7F
    kept.write_bytes(data)
    with kv.open(patched.folder) as lib, lib.load_model(synthetic_models.tiny()) as model:  # noqa: SIM117
        with pytest.raises(KVFileError):
            model.context(**formats.SHAPE, kv_backing=kept, kv_keep=True)


@pytest.mark.native
def test_stored_prefixes_are_loaded(patched: Variant, tmp_path: Path) -> None:
    """All tokens of both prompts, and logits of the next token of each, are loaded."""
    store = tmp_path / "store"
    shutil.copytree(formats.FOLDER / "prefix-store", store)
    with (
        kv.open(patched.folder) as lib,
        lib.load_model(synthetic_models.tiny()) as model,
        model.context(**formats.SHAPE) as context,
    ):
        with pytest.raises(PrefixStoreForeign, match="accept_unverified_model=True"):
            kv.PrefixCache(context, store=store)
        cache = kv.PrefixCache(context, store=store, accept_unverified_model=True)
        for number, tokens in formats.TOKENS.items():
            with cache.acquire([*tokens, 11]) as lease:
                assert lease.cached == len(tokens)
                lease.prefill()
                found = context.logits().copy()
            assert np.abs(found - expected(model, number)).max() < TOLERANCE
        cache.close()


@pytest.mark.slow
@pytest.mark.native
def test_a_trace_is_replayed(patched: Variant) -> None:
    """On the present build, each row has the recorded result."""
    trace = formats.FOLDER / "trace.jsonl"
    command = [sys.executable, "-m", "pyllamakv.cli.main", "trace", "replay", str(trace)]
    done = subprocess.run(
        [*command, "--variant", f"{patched.manifest.release}+patched"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
