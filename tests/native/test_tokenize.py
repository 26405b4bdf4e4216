"""Test that no text ends the process that tokenizes it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from native_kit import built
from vocabulary_kit import write_bpe

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.native

#: Tokenizes runs of a character in a thread, whose stack has the default size. A long text has the
#: tokens of its parts.
PROGRAM = """
import sys
import threading

import pyllamakv as kv

def work():
    for character in ("a", "A", "9", " "):
        tokens = model.tokenize(character * 200_000, False)
        assert character != "a" or len(tokens) == 50_000
        assert model.detokenize(tokens) == character * 200_000
    assert model.tokenize("aaaa " * 400, False) == model.tokenize("aaaa " * 4, False) * 100
    done.append(True)

done = []
with kv.open(sys.argv[1]) as library, library.load_model(sys.argv[2]) as model:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
sys.exit(not done)
"""

#: Tokenizes a text that needs a larger stack than the process may map.
REFUSED = """
import resource
import sys

import pyllamakv as kv

with kv.open(sys.argv[1]) as library, library.load_model(sys.argv[2]) as model:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    try:
        model.tokenize("a" * 4_000_000)
    except kv.KvError as error:
        assert "needs a thread with a stack of" in str(error), error
    else:
        sys.exit("not refused")
    assert len(model.tokenize("a" * 40_000, False)) == 10_000
"""


def run(program: str, spec: str, pre: str, folder: Path) -> None:
    """Run a program with a library and a model in a child process."""
    model = write_bpe(folder / "model.gguf", pre)
    command = [sys.executable, "-c", program, str(built(spec).folder), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.parametrize(
    ("release", "pre"),
    [
        ("0.3.9", "qwen2"),
        ("0.3.9", "gpt-4o"),
        ("b11549", "deepseek-llm"),
        ("b11549", "gpt-4o"),
        ("b11549", "tekken"),
    ],
)
@pytest.mark.slow
def test_long_runs_of_a_character_are_tokenized(release: str, pre: str, tmp_path: Path) -> None:
    """The recursion of std::regex for each character does not exhaust the stack of a thread."""
    run(PROGRAM, f"{release}+patched", pre, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of address space is Linux's")
def test_text_whose_stack_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    """The error has the sizes, and the library is usable."""
    run(REFUSED, "0.3.9+patched", "qwen2", tmp_path)
