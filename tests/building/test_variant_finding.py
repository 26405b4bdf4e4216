"""Test that a build is found without its compiler, and only if all its inputs are unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from building_kit import BuildSandbox, script

from pyllamakv import open_variant
from pyllamakv.building import backend, build, compiler, variant
from pyllamakv.building import manifest as manifests
from pyllamakv.errors import NotBuilt, ToolMissing
from pyllamakv.home import home
from pyllamakv.source import lockfile, releases, spec_resolver, verified

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSandbox:
    """Return a build environment whose patches and patching code are two files."""
    for name in ("patches", "package/patching"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a-file").write_text("1", encoding="utf-8")
    monkeypatch.setattr(variant, "data", lambda name: tmp_path / name)
    monkeypatch.setattr(variant, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: frozenset())
    return BuildSandbox(tmp_path, monkeypatch)


def no_compiler(shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the compiler and its cached results; git stays, which reads directories as sources."""
    git = shutil.which("git")
    assert git
    (shop.folder / "path").mkdir()
    (shop.folder / "path" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(shop.folder / "path"))
    monkeypatch.setenv("CC", "gone")
    monkeypatch.delenv("CXX")
    (home() / "objects" / "compilers.json").unlink()
    with pytest.raises(ToolMissing):
        variant.request(shop.spec)


def another_compiler(shop: BuildSandbox) -> None:
    """Install a later version instead."""
    path = shop.programs / "c++"
    script(path, path.read_text("utf-8").replace("1.2.3", "1.2.34").removeprefix("#!/bin/sh\n"))


def both(shop: BuildSandbox) -> tuple[variant.Spec, variant.Spec, variant.Variant]:
    """Return the specs of stock and patched, and the build of both."""
    made = build.build(shop.spec)
    stock = variant.parse(shop.spec)
    patched = variant.Spec(stock.release, None)
    variant.add_to_index(variant.request(patched), made)
    return stock, patched, made


@pytest.mark.slow
@pytest.mark.parametrize("compiler_here", [True, False])
@pytest.mark.parametrize("place", ["patches", "package/patching"])
def test_changed_patches_hide_the_patched_build_only(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch, place: str, *, compiler_here: bool
) -> None:
    """Changed patches, or changed code that applies them, hide only the patched build."""
    stock, patched, made = both(shop)
    if not compiler_here:
        no_compiler(shop, monkeypatch)
    assert variant.find(stock) == variant.find(patched) == made
    file = shop.folder / place / "a-file"
    file.write_text("2", encoding="utf-8")
    assert (variant.find(stock), variant.find(patched)) == (made, None)
    (file.parent / "expected.toml").write_text("no input", encoding="utf-8")
    file.write_text("1", encoding="utf-8")
    assert variant.find(patched) == made


@pytest.mark.slow
@pytest.mark.parametrize("compiler_here", [True, False])
def test_changed_shim_recipe_or_options_hide_a_build(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch, *, compiler_here: bool
) -> None:
    """Another release of the same name, other options and another recipe do as well."""
    stock, patched, made = both(shop)
    if not compiler_here:
        no_compiler(shop, monkeypatch)
    common = {**backend._COMMON, "GGML_RPC": "OFF"}
    for where, name, value in (
        (variant, "shim_digest", lambda: "changed"),
        (variant, "RECIPE", variant.RECIPE + 1),
        (backend, "_COMMON", common),
    ):
        with monkeypatch.context() as change:
            change.setattr(where, name, value)
            assert variant.find(stock) is None, name
            assert variant.find(patched) is None, name
        assert variant.find(stock) == variant.find(patched) == made
    (shop.tree / "src" / "llama.cpp").write_text("// other\n", encoding="utf-8")
    assert variant.find(stock) is None


@pytest.mark.slow
def test_missing_variant_names_the_build_command(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it without any build and with another one, with and without a compiler."""
    wanted = f"build {shop.spec}"
    with pytest.raises(NotBuilt, match=wanted.replace("+", r"\+")):
        open_variant.find_built(shop.spec)
    made = build.build(shop.spec)
    assert open_variant.find_built(shop.spec) == open_variant.find_built(made.id) == made.folder
    no_compiler(shop, monkeypatch)
    assert open_variant.find_built(shop.spec) == open_variant.find_built(made.id) == made.folder
    monkeypatch.setattr(variant, "shim_digest", lambda: "changed")
    with pytest.raises(NotBuilt, match=f"other patches, shim or settings: {made.id}"):
        open_variant.find_built(shop.spec)


@pytest.mark.slow
def test_newest_verified_release_is_found_first(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified releases are tried from the newest, patched; no others are."""
    _, _, made = both(shop)
    built = spec_resolver.resolve(f"path:{shop.tree}")
    newer = lockfile.known()["b11549"]
    asked = []

    def known(kind: str | None = None) -> list[releases.Release]:
        asked.append(kind)
        return there

    monkeypatch.setattr(verified, "releases", known)
    there = [newer, built]
    assert variant.newest_verified(kind="path") == made
    assert set(asked) == {"path"}
    index = variant.built() / ".index" / variant.request(variant.Spec(built.name, None)).key
    index.unlink()  # only stock is left
    with pytest.raises(NotBuilt, match=r"no verified release is .*pyllamakv build b11549$"):
        variant.newest_verified()
    there = [newer]
    with pytest.raises(NotBuilt, match=r"pyllamakv build b11549 --backend cuda$"):
        variant.newest_verified(backend="cuda")


@pytest.mark.slow
def test_a_build_by_another_compiler_is_found(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`build` builds its own; the one of the current compiler is used first, then the newest."""
    stamps = iter(("2026-01-02", "2026-01-01"))
    publish = manifests.Manifest.save

    def dated(self: manifests.Manifest, folder: Path) -> Path:
        object.__setattr__(self, "created", next(stamps))
        return publish(self, folder)

    monkeypatch.setattr(manifests.Manifest, "save", dated)
    first = build.build(shop.spec)
    another_compiler(shop)
    assert variant.find(shop.spec) == first
    second = build.build(shop.spec)
    assert second != first
    assert first.manifest.created > second.manifest.created
    assert variant.find(shop.spec) == second
    no_compiler(shop, monkeypatch)
    assert variant.find(shop.spec) == first


@pytest.mark.slow
def test_a_build_for_another_machine_is_not_found(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for another architecture, or with missing instructions, is not found."""
    made = build.build(shop.spec)
    no_compiler(shop, monkeypatch)
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: frozenset({"avx"}))
    assert variant.find(shop.spec) is None
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: frozenset({"pni"}))
    assert variant.find(shop.spec) == made
    object.__setattr__(made.manifest, "machine", "abacus")
    made.manifest.save(made.folder)
    assert variant.find(shop.spec) is None


@pytest.mark.slow
def test_build_outside_the_index_is_not_found(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that the index does not list for a spec is not found, whatever its manifest is."""
    stock, patched, made = both(shop)
    (variant.built() / ".index" / variant.request(patched).key).unlink()
    no_compiler(shop, monkeypatch)
    assert (variant.find(stock), variant.find(patched)) == (made, None)


def test_cached_compiler_is_found_without_running_it(shop: BuildSandbox, tmp_path: Path) -> None:
    """`recall` returns only what `find` stored."""
    cache = tmp_path / "answers.json"
    assert compiler.find_cached(cache) is None
    assert not shop.compiler_calls.exists()
    found = compiler.find(cache)
    asked = shop.compiler_calls.read_text("utf-8")
    assert compiler.find_cached(cache) == found
    assert compiler.find_cached(cache, {"PATH": "", "CC": "gone"}) is None
    another_compiler(shop)
    assert compiler.find_cached(cache) is None
    assert shop.compiler_calls.read_text("utf-8") == asked


@pytest.mark.slow
@pytest.mark.native
def test_variant_opens_without_a_compiler() -> None:
    """A real build opens in a process without PATH, with any spelling of the release."""
    found = variant.find(f"{releases.TEST_RELEASE}+patched")
    if found is None:
        if os.environ.get("PYLLAMAKV_REQUIRE_NATIVE"):
            pytest.fail("not built")
        pytest.skip("not built")
    code = (
        "import subprocess, sys, pyllamakv as kv\n"
        "def refuse(*args, **more): raise AssertionError(args)\n"
        "subprocess.Popen = refuse\n"
        "for spec in sys.argv[1:]:\n"
        "    with kv.open(spec) as library: print(library.about.variant)\n"
    )
    specs = [
        f"{prefix}{releases.TEST_RELEASE}+patched" for prefix in ("", "v", "llama-cpp-python==")
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *specs],
        env={**os.environ, "PATH": "", "CC": "gone", "CXX": "gone"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, [found.id] * 3), done.stderr
