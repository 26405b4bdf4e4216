"""The documents stay true: their commands run, and print what the documents show."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import readme

from pyllamakv.harness import expected
from pyllamakv.source import lock

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

EXAMPLES = [example for document in readme.DOCUMENTS for example in readme.examples(document)]


@pytest.mark.native
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.document}:{e.line}")
def test_examples_print_what_the_document_shows(
    example: readme.Example, stock: Variant, patched: Variant
) -> None:
    """Each block runs, and its output has the shape of the printed one."""
    said = readme.run(example)
    if example.output is not None:
        assert readme.shape(said) == readme.shape(example.output)


def test_readme_names_the_commands_that_set_themselves_up() -> None:
    """The README's make targets exist."""
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE))
    assert {"check", "test"} <= targets
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=readme.ROOT, check=True, capture_output=True)


def test_links_of_the_documents_lead_somewhere() -> None:
    """Relative links name files that exist."""
    for document in ("README.md", *(f"docs/{p.name}" for p in (readme.ROOT / "docs").glob("*.md"))):
        path = readme.ROOT / document
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{document}: {target}"


def test_the_table_shows_what_is_accepted() -> None:
    """Every pinned release has a row, with the verdict that later runs are compared with."""
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| (\S+) \| \w+ \| cpu \| ([a-z-]+) \|", text, re.MULTILINE))
    table = expected.load(expected.shipped())
    accepted = {name.split("+")[0]: one.verdict for name, one in table.items()}
    pinned = [release.name for release in lock.load(lock.shipped())]
    assert shown == {name: accepted[name] for name in pinned}
