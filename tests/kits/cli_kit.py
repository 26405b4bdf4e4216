"""Helpers for tests of verbs: an opened library, and the output of a verb."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.simulated import SimulatedNative

from pyllamakv.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fragmented.jsonl"


class Opened:
    """A fake opened library."""

    def __init__(self, native: SimulatedNative) -> None:
        self.native = native
        self.about = native.about

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.native.close()


def cli(capsys, *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(leaving.value.code or 0), out, err
