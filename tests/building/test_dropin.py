"""Test the variable that llama-cpp-python reads, which contains the path of the libraries."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from building_kit import manifest

from pyllamakv.building import dropin
from pyllamakv.building.variant import Variant
from pyllamakv.cli import dropin as dropin_cli
from pyllamakv.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path


def variant(folder: Path, release: str, *libraries: str) -> Variant:
    """Return a variant of a release with these ordinary libraries."""
    (folder / "lib").mkdir(parents=True)
    for name in libraries:
        (folder / "lib" / name).touch()
    manifest(release=release).save(folder)
    return Variant(folder)


@pytest.mark.parametrize("release", ["0.3.1", "0.3.9", "0.3.16", "0.3.36"])
def test_recent_releases_read_the_library_directory_variable(tmp_path: Path, release: str) -> None:
    """Most versions read the directory of the libraries."""
    described = dropin.describe(variant(tmp_path, release, "libllama.so"))
    assert described.variable == "LLAMA_CPP_LIB_PATH"
    assert described.value == str(tmp_path / "lib")
    assert described.package == f"llama-cpp-python=={release}"


@pytest.mark.parametrize("release", ["0.2.90", "0.3.0"])
def test_oldest_releases_read_the_library_path_variable(tmp_path: Path, release: str) -> None:
    """The oldest versions read the path of the library."""
    described = dropin.describe(variant(tmp_path, release, "libllama.so"))
    assert described.variable == "LLAMA_CPP_LIB"
    assert described.value == str(tmp_path / "lib" / "libllama.so")


@pytest.mark.parametrize("release", ["b4980", "v0.5.0"])
def test_release_without_llama_cpp_python_has_no_dropin(tmp_path: Path, release: str) -> None:
    """A release that is in no version of llama-cpp-python has no drop-in."""
    with pytest.raises(Unsupported, match=release):
        dropin.describe(variant(tmp_path, release, "libllama.so"))


def test_variant_without_libllama_has_no_dropin(tmp_path: Path) -> None:
    """A variant without libllama is refused with the reason."""
    with pytest.raises(Unsupported, match=r"no libllama in .*; build it: pyllamakv build"):
        dropin.describe(variant(tmp_path, "0.3.9"))


def test_export_line_quotes_the_path_for_the_shell(tmp_path: Path) -> None:
    """Any path is quoted correctly."""
    folder = tmp_path / "it's a $HOME"
    line = dropin.describe(variant(folder, "0.3.9", "libllama.so")).export()
    name, _, value = shlex.split(line)[1].partition("=")
    assert (name, value) == ("LLAMA_CPP_LIB_PATH", str(folder / "lib"))


def test_env_prints_the_installation_command_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command does not compile llama.cpp, and is not on stdout."""
    found = variant(tmp_path, "0.3.9", "libllama.so")
    monkeypatch.setattr("pyllamakv.building.variant.find", lambda spec, backend: found)
    dropin_cli.env("0.3.9+patched", backend="cpu")
    output = capsys.readouterr()
    assert "CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.9" in output.err
    assert output.out.startswith("export LLAMA_CPP_LIB_PATH=")


PROGRAM = """
import ctypes, sys
import llama_cpp
path = llama_cpp.llama_cpp._lib._name
assert path.startswith(sys.argv[1]), path
llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_default_params()
params.vocab_only = True
model = llama_cpp.llama_load_model_from_file(sys.argv[2].encode(), params)
assert model
print(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
"""


@pytest.mark.native
@pytest.mark.peer
def test_llama_cpp_python_loads_the_variant(patched: Variant, tiny_model: Path) -> None:
    """The published package runs with the patched libraries."""
    version = pytest.importorskip("importlib.metadata").version
    try:
        installed = version("llama-cpp-python")
    except Exception:
        pytest.skip("llama-cpp-python is not installed")
    described = dropin.describe(patched)
    if described.package != f"llama-cpp-python=={installed}":
        pytest.skip(f"llama-cpp-python {installed} is not the release of the variant")
    env = {**os.environ, described.variable: described.value}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(patched.dropin), str(tiny_model)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
