"""Test how CMake detects known defects of a source tree from the text of its files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pyllamakv.building import cmake

PROBES = Path(__file__).resolve().parents[2] / "pyllamakv" / "native" / "cmake" / "probes.cmake"

#: The end of the loop that splits a batch, in 0.3.12 and in later releases.
ENDLESS = "    if (balloc.get_n_used() < balloc.get_n_tokens()) {\n        break;\n    }\n"
ENDING = "    if (ubatch.n_tokens == 0) {\n        break;\n    }\n"
COUNTER = "static std::atomic<int64_t> current_chunk;\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ""),
        ({"src/llama-memory-recurrent.cpp": ENDLESS}, "PLK_ENDLESS_SPLIT"),
        # A fork of 0.3.12 with the fix, and later releases, have both.
        ({"src/llama-memory-recurrent.cpp": ENDING + ENDLESS}, ""),
        ({"src/llama-memory-recurrent.cpp": "int main() {}\n"}, ""),
        ({"ggml/src/ggml-cpu/llamafile/sgemm.cpp": COUNTER}, "PLK_SHARED_COUNTER"),
        ({"ggml/src/ggml-cpu/llamafile/sgemm.cpp": "int chunk;\n"}, ""),
    ],
)
def test_known_defects_are_detected_from_the_sources(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    """The detection uses neither the number of architectures nor the name of the release."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    script = tmp_path / "print.cmake"
    script.write_text(
        f'include("{PROBES}")\nplk_markers("{tmp_path}" found)\nmessage(STATUS "<${{found}}>")\n'
    )
    ran = subprocess.run(
        [cmake.binary("cmake"), "-P", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"<{expected}>" in ran.stdout
