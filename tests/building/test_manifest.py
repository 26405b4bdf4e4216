"""Test that manifests are saved and loaded, and mismatches are refused."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import pytest
from building_kit import manifest

from pyllamakv.building import manifest as manifests
from pyllamakv.errors import LoadError, ManifestError


def test_saved_manifest_equals_the_loaded_one(tmp_path: Path) -> None:
    """A saved manifest is loaded from the directory and from the file."""
    saved = manifest(patches=("full-defrag",), patched_tree="b" * 40)
    path = saved.save(tmp_path)
    assert manifests.load(tmp_path) == saved == manifests.load(path)
    assert not saved.stock
    assert manifest().stock
    assert [p.name for p in tmp_path.iterdir()] == [manifests.NAME]


def test_saved_manifest_can_be_read_by_all(tmp_path: Path) -> None:
    """A variant may be shared between users."""
    assert manifest().save(tmp_path).stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("tree"), "tree is missing"),
        (lambda raw: raw.update(schema=99), "expected schema"),
        (lambda raw: raw.update(abi="1"), "abi: expected int"),
        (lambda raw: raw.update(abi=True), "abi: expected int"),
        (lambda raw: raw.update(patches="full-defrag"), "patches: expected tuple"),
        (lambda raw: raw.update(cpu_flags=[1]), "cpu_flags: expected tuple"),
        (lambda raw: raw.update(options=[]), "options: expected dict"),
        (lambda raw: raw.update(library="../libplk.so"), "must be a file name"),
        (lambda raw: raw.update(library=""), "must be a file name"),
    ],
)
def test_damaged_fields_are_named(tmp_path: Path, change: object, words: str) -> None:
    """A missing field, or one of the wrong type, is named in the error."""
    path = manifest().save(tmp_path)
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)  # type: ignore[operator]
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ManifestError, match=words):
        manifests.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\0", "null"])
def test_malformed_manifest_raises_manifest_error(tmp_path: Path, text: str) -> None:
    """A truncated file or other JSON is a ManifestError."""
    (tmp_path / manifests.NAME).write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError):
        manifests.load(tmp_path)


def test_missing_manifest_error_names_the_build_command(tmp_path: Path) -> None:
    """A directory without a manifest is not a variant, and the error has a remedy."""
    with pytest.raises(ManifestError, match="pyllamakv build"):
        manifests.load(tmp_path)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    """An unknown field of a later version is ignored."""
    path = manifest().save(tmp_path)
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**raw, "novelty": 1}), encoding="utf-8")
    assert manifests.load(tmp_path) == manifest()


def test_library_with_another_hash_is_refused(tmp_path: Path) -> None:
    """The library is accepted with its hash, and refused if it changed or is missing."""
    library = tmp_path / "libplk.so"
    library.write_bytes(b"code")
    described = manifest(library_sha256=hashlib.sha256(b"code").hexdigest())
    assert described.check_library(tmp_path) == library
    library.write_bytes(b"other code")
    with pytest.raises(ManifestError, match="not the library"):
        described.check_library(tmp_path)
    library.unlink()
    with pytest.raises(ManifestError, match="cannot be read"):
        described.check_library(tmp_path)


@pytest.mark.parametrize("name", ["flags", "Features"])
def test_missing_cpu_flags_are_named(tmp_path: Path, name: str) -> None:
    """CPU flags that the machine lacks are named; if it reports none, no library is refused."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{name}\t\t: fpu avx2 fma\n", encoding="utf-8")
    manifest().check_machine("", cpuinfo)
    wanting = manifest(cpu_flags=("avx2", "avx512_vnni"))
    assert wanting.missing_flags(cpuinfo) == ("avx512_vnni",)
    with pytest.raises(LoadError, match="avx512_vnni"):
        wanting.check_machine("", cpuinfo)
    wanting.check_machine("", tmp_path / "absent")


def test_library_for_another_architecture_is_refused(tmp_path: Path) -> None:
    """A library for another architecture is refused; the error names it."""
    with pytest.raises(LoadError, match="aarch64"):
        manifest(machine="aarch64").check_machine("x86_64", tmp_path / "absent")


def test_manifest_module_imports_nothing_of_building() -> None:
    """The binding and the build layer read this module, so it must not import the build layer."""
    tree = ast.parse(Path(manifests.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in modules if name and name.startswith("pyllamakv.building")}
