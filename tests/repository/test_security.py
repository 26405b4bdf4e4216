"""Test that SECURITY.md names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    """Every test that the page names exists."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_every_paragraph_on_untrusted_input_names_a_test() -> None:
    """Each paragraph with a claim names its test."""
    part = TEXT.split("## Not trusted\n")[1].split("## The worker")[0]
    for paragraph in part.strip().split("\n\n"):
        assert "`tests/" in paragraph, paragraph[:40]
