"""Test the native library from C, without Python: behaviour and exported symbols."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import cpp_kit
import pytest

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

NATIVE = Path(__file__).resolve().parents[2] / "pyllamakv" / "native"
SHIM = NATIVE / "shim"
SMOKE = Path(__file__).resolve().parents[1] / "native" / "smoke.c"

#: Flash attention, type of K, type of V.
SETTINGS = (("0", "1", "1"), ("1", "1", "1"), ("1", "8", "8"), ("1", "2", "8"))


def _tool(name: str, variable: str = "") -> str:
    found = shutil.which(os.environ.get(variable, name) if variable else name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _functions() -> set[str]:
    """Return the names of all functions that plk.h declares."""
    text = (NATIVE / "plk.h").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text[text.index("cdef begin") :], flags=re.S)
    return set(re.findall(r"\b(plk_\w+)\(", text))


@pytest.fixture(scope="module")
def smoke(variant: Variant, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the C program against a variant."""
    program = tmp_path_factory.mktemp("smoke") / "smoke"
    library = Path(variant.library)
    command = [_tool("cc", "CC"), "-std=c11", f"-I{NATIVE}", str(SMOKE), str(library)]
    command += ["-lm", f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=300)
    return program


@pytest.mark.native
@pytest.mark.parametrize("settings", SETTINGS, ids=":".join)
@pytest.mark.regression(
    "`plk_run` did not report the number of decoded steps when its arguments were invalid",
    by="fuzzing",
    of="shim",
)
def test_c_program_uses_every_kind_of_operation(
    smoke: Path, tiny_model: Path, settings: tuple[str, ...]
) -> None:
    """A C program loads, decodes, defragments and restores; calls that would abort are refused."""
    command = [str(smoke), str(tiny_model), *settings]
    result = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ok\n"


@pytest.mark.slow
def test_release_of_a_kept_cache_may_contain_hyphens(tmp_path: Path) -> None:
    """Releases of other packages have hyphens in their names; sources without one have their id."""
    names = ("0.3.9", "b11549", "v0.5.0", "xllamacpp-2026.7.10068", "x-stock-cpu")
    releases = {f"{name}-{kind}-0123": name for name in names for kind in ("stock-cpu", "b-cuda")}
    whole = ("git-012345678901-stock-cpu-0123", "path-012345678901-patched-cpu-0123")
    releases |= {id_: id_ for id_ in whole}
    source = tmp_path / "names.cpp"
    text = '#include "built_from.h"\n#include <cstdio>\n'
    text += "int main(int n, char **id) { for (int i = 1; i < n; ++i) "
    source.write_text(text + "std::puts(plk::mapping::built_from(id[i]).c_str()); }\n")
    built = cpp_kit.compiled(source, tmp_path, "-std=c++17", f"-I{SHIM}")
    assert built.returncode == 0, built.stderr
    found = cpp_kit.run(tmp_path / "names", *releases, "", "a", "-", "--")
    assert found.stdout.splitlines()[: len(releases)] == [*releases.values()]


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="nm -D requires ELF")
def test_library_exports_only_functions_of_the_header(variant: Variant) -> None:
    """The library exports the functions of plk.h and nothing else."""
    command = [_tool("nm"), "-D", "--defined-only", "--format=posix", str(variant.library)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    exported = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    assert exported == _functions()


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="nm -D requires ELF")
def test_no_symbol_is_shared_between_libraries(variant: Variant) -> None:
    """No symbol is unique per process, because two variants would share it."""
    listed = subprocess.run(
        [_tool("nm"), str(variant.library)], check=True, capture_output=True, text=True, timeout=120
    )
    assert not re.search(r"^\S+ u ", listed.stdout, re.M)


def test_every_section_of_the_alternatives_is_listed() -> None:
    """probes.cmake lists each file of alternatives, and the sections that each one has."""
    text = (NATIVE / "cmake" / "probes.cmake").read_text(encoding="utf-8")
    groups = re.search(r"set\(PLK_GROUPS\s+([\w\s]+)\)", text)
    assert groups is not None
    files = {path.stem: path for path in (SHIM / "alternatives").iterdir()}
    assert set(files) == set(groups[1].split())
    for group, file in files.items():
        listed = re.search(rf"set\(PLK_{group} ([\w\s]+)\)", text)
        assert listed is not None, group
        used = set(re.findall(r"\bPLK_USE_(?!NAME)(\w+)", file.read_text(encoding="utf-8")))
        # The last section of a chain may need no name.
        assert used <= set(listed[1].split()), group
        assert len(set(listed[1].split()) - used) <= 1, group


@pytest.mark.slow
def test_options_for_moves_require_readable_cells(tmp_path: Path) -> None:
    """A tree with the patches whose cells cannot be read does not get the options."""
    (tmp_path / "ggml.h").touch()
    types = "#include <cstdint>\nstruct llama_model; struct llama_context; struct llama_batch;\n"
    types += "struct llama_context_params; struct llama_token_data {};\n"
    types += "typedef int32_t llama_token, llama_seq_id;\n"
    (tmp_path / "llama.h").write_text(types, encoding="utf-8")
    source = SMOKE.with_name("capabilities.cpp")
    done = cpp_kit.compiled(source, tmp_path, "-std=c++17", f"-I{NATIVE}", f"-I{SHIM}")
    assert not done.returncode, done.stderr
    for readable in ({}, {"READABLE": "1"}):
        command = [str(tmp_path / "capabilities")]
        text = subprocess.check_output(command, env=readable, text=True, timeout=60)
        assert text == f"{len(readable)}\n", readable


@pytest.mark.native
def test_probes_agree_with_the_manifest(variant: Variant) -> None:
    """The library reports the alternatives that CMake chose; 0.3.9 has every required group."""
    import pyllamakv

    with pyllamakv.open(variant.folder) as library:
        probes = library.native.about.probes
    optional = {"counters", "mapping", "moving"}  # only patches bring them
    assert {group for group, choice in probes.items() if choice is None} <= optional
    assert probes["cells"] == "unified", json.dumps(probes)
