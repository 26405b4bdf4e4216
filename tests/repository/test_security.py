"""SECURITY.md: every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    """A claim without its test would be a wish."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_every_section_of_what_is_not_trusted_names_a_test() -> None:
    """Each paragraph that promises something says what holds it."""
    part = TEXT.split("## Not trusted\n")[1].split("## The worker")[0]
    for paragraph in part.strip().split("\n\n"):
        assert "`tests/" in paragraph, paragraph[:40]
