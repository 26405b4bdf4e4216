"""The API reference builds without a warning, and contains every public name."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyllamakv

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.rst"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the reference as `make docs` does, and return its directory."""
    pytest.importorskip("sphinx")
    target = tmp_path_factory.mktemp("reference")
    options = ("-q", "-W", "--keep-going", "-d", str(target / "doctrees"))
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs" / "reference", target / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target / "html"


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(reference: Path) -> None:
    """Errors have the name of their module, and the submodules their own section."""
    from sphinx.util.inventory import InventoryFile

    found = InventoryFile.loads((reference / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, entries in found.items() if kind.startswith("py:") for name in entries}
    public = {f"pyllamakv.{name}" for name in pyllamakv.__all__}
    missing = {
        name
        for name in public - names - {"pyllamakv.__version__", "pyllamakv.metrics"}
        if name.replace("pyllamakv.", "pyllamakv.errors.") not in names
    }
    assert not missing
    assert {"pyllamakv.runtime.metrics", "pyllamakv.Context.info"} <= names


@pytest.mark.slow
def test_error_names_in_the_reference_are_links(reference: Path) -> None:
    """The name of an error in a docstring is a link to its description."""
    page = (reference / "contexts.html").read_text("utf-8")
    text = page.partition('id="pyllamakv.Context.decode"')[2].partition("<dt")[0]
    assert 'href="errors.html#pyllamakv.errors.NoKVSlot"' in text


def test_excluded_members_exist() -> None:
    """Each name in ``:exclude-members:`` is one of its class or of the code that creates it."""
    # Sphinx continues a list of names on indented lines.
    text = "".join(page.read_text("utf-8") for page in PAGES).replace("\n      ", " ")
    text = text.replace("   :inherited-members:\n", "")
    entries = re.findall(r"autoclass:: (\S+)\n   :exclude-members:(.*)", text)
    assert len(entries) > 10
    for path, members in entries:
        value = pyllamakv
        for part in path.removeprefix("pyllamakv.").split("."):
            value = getattr(value, part)
        ours = [base for base in value.__mro__ if base.__module__.startswith("pyllamakv.")]
        source = "".join(map(inspect.getsource, ours))
        for member in members.replace(",", " ").split():
            assert re.search(rf"\b(def |self\.){member}\b", source), f"{path}.{member}"
