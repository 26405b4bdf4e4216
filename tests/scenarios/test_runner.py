"""Test that scenarios run in workers with the variables of the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllamakv.scenarios import runner


def test_variables_of_the_user_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the patches are empty unless the setting has a value."""
    given: list[dict[str, str]] = []

    def opened(_path: Path, *, env: dict[str, str], **_options: Any) -> None:
        given.append(env)

    monkeypatch.setattr(runner, "open_library", opened)
    monkeypatch.setenv("LLAMA_KV_DEFRAG_THOLD", "0.1")
    monkeypatch.setenv("LLAMA_KV_BACKING", "mmap")
    runner.open_worker(Path("x"), {"LLAMA_KV_BACKING": "heap", "LLAMA_SET_ROWS": "0"})
    assert given == [
        {"LLAMA_KV_DEFRAG_THOLD": "", "LLAMA_KV_BACKING": "heap", "LLAMA_SET_ROWS": "0"}
    ]
