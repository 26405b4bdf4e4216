"""Test that variants of pyllamakv-prebuilt are found after those of the data directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from building_kit import BuildSandbox

import pyllamakv as kv
from pyllamakv import home, open_variant
from pyllamakv.binding import library, loading
from pyllamakv.building import backend, build, doctor, variant
from pyllamakv.building import manifest as manifests
from pyllamakv.errors import CpuFeaturesMissing, NotBuilt
from pyllamakv.source import spec_resolver, verified
from pyllamakv.traces import trace

if TYPE_CHECKING:
    from pathlib import Path

PORTABLE = frozenset(backend.PORTABLE_FLAGS_X86)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSandbox:
    """Return a build environment whose patches are one file, on a CPU for portable builds."""
    for name in ("patches", "package/patching"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "patches" / "a-file").write_text("1", encoding="utf-8")
    monkeypatch.setattr(variant, "data", lambda name: tmp_path / name)
    monkeypatch.setattr(variant, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: PORTABLE | {"fpu"})
    sandbox = BuildSandbox(tmp_path, monkeypatch)
    release = spec_resolver.resolve(f"path:{sandbox.tree}")
    monkeypatch.setattr(verified, "releases", lambda _kind=None: [release])
    return sandbox


@pytest.fixture
def distribution(shop: BuildSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a distribution with one portable build of stock and patched."""
    made = build.build(shop.spec, native=False)
    release = variant.parse(shop.spec).release
    variant.add_to_index(variant.request(variant.Spec(release, None), native=False), made)
    module = tmp_path / "site" / home.PREBUILT_MODULE
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise SystemExit('this is never imported')\n", "utf-8")
    shutil.move(variant.built(), module / "built")
    monkeypatch.syspath_prepend(str(module.parent))
    return module


def test_prebuilt_variant_is_found_without_local_builds(
    shop: BuildSandbox, distribution: Path
) -> None:
    """It is found by spec, by id, as the default and for a trace; its origin is named."""
    found = variant.find(shop.spec)
    assert found is not None
    assert found.folder.parent == home.prebuilt() == distribution / "built"
    assert found.origin == home.PREBUILT == "pyllamakv-prebuilt"
    assert variant.newest_verified() == variant.newest_verified(backend="rpc") == found
    assert open_variant.find_built(found.id) == found.folder
    assert open_variant.find_recorded(found.id, "") == found.folder
    assert trace.spec_of(found.id) == shop.spec
    assert kv.variants() == [found]
    assert variant.find(shop.spec, native=True) is None
    assert doctor.libraries().found == f"{found.id}; no compiler or git needed"


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [True, False])
def test_local_build_precedes_the_prebuilt_variant(
    shop: BuildSandbox, distribution: Path, *, tuned: bool
) -> None:
    """`build` builds even if a prebuilt variant exists, and then that build is used."""
    made = build.build(shop.spec, native=tuned)
    assert made.folder.parent == variant.built()
    assert made.origin == "data directory"
    assert variant.find(shop.spec) == made
    assert open_variant.find_built(made.id) == made.folder
    # Equal content has one id, and the variant in the data directory is listed.
    ids = [each.id for each in kv.variants()]
    assert len(ids) == len(set(ids)) == (2 if tuned else 1)
    assert kv.variants()[0] == made
    # Patched is not built here, but stock is, which is not the default.
    assert variant.newest_verified().folder.parent == distribution / "built"
    spec = variant.Spec(variant.parse(shop.spec).release, None)
    variant.add_to_index(variant.request(spec, native=tuned), made)
    assert variant.newest_verified() == made


@pytest.mark.slow
def test_any_verified_build_precedes_a_newer_prebuilt_release(
    shop: BuildSandbox, distribution: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation of the package does not change which local build is used."""
    newer = verified.releases()[0]
    assert variant.newest_verified().manifest.release == newer.name
    (shop.tree / "src" / "llama.cpp").write_text("// older\n", encoding="utf-8")
    older = spec_resolver.resolve(f"path:{shop.tree}")
    monkeypatch.setattr(verified, "releases", lambda _kind=None: [newer, older])
    known = {each.name: each for each in (newer, older)}
    monkeypatch.setattr(spec_resolver, "resolve", lambda name, *_: known[name])
    made = build.build(variant.Spec(older.name, ()))
    variant.add_to_index(variant.request(variant.Spec(older.name, None)), made)
    assert variant.newest_verified() == made


@pytest.mark.slow
def test_prebuilt_variant_with_other_patches_is_refused(
    shop: BuildSandbox, distribution: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution for other patches, or for another shim, is not used."""
    (shop.folder / "patches" / "a-file").write_text("2", encoding="utf-8")
    with pytest.raises(NotBuilt, match="those of pyllamakv-prebuilt have other patches, shim or"):
        variant.newest_verified()
    assert variant.find(shop.spec) is not None, "stock has no patches"
    monkeypatch.setattr(variant, "shim_digest", lambda: "changed")
    (known,) = kv.variants()
    with pytest.raises(NotBuilt, match=f"other patches, shim or settings: {known.id}"):
        open_variant.find_built(shop.spec)
    with pytest.raises(NotBuilt, match=r"no verified release is built here; build .* cuda$"):
        variant.newest_verified(backend="cuda")


@pytest.mark.slow
def test_missing_prebuilt_package_is_named(
    shop: BuildSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of its name without code, which Python could import, is not the package."""
    (tmp_path / home.PREBUILT_MODULE / "built").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert home.prebuilt() is None
    with pytest.raises(NotBuilt, match="pyllamakv-prebuilt, which needs no compiler, is not inst"):
        variant.newest_verified()
    with pytest.raises(NotBuilt, match=r"no verified release is built here; build"):
        variant.newest_verified(kind="sdist")
    found = doctor.libraries()
    assert found.state == "optional" and "pyllamakv[prebuilt]" in found.hint


@pytest.mark.slow
def test_another_cpu_is_refused_before_the_library_is_loaded(
    shop: BuildSandbox, distribution: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the missing features and the remedy, in this process and in a worker."""
    (found,) = kv.variants()
    assert set(found.manifest.cpu_flags) == PORTABLE
    object.__setattr__(found.manifest, "abi", loading.ABI)
    found.manifest.save(found.folder)
    loaded = []
    monkeypatch.setattr(library, "Local", loaded.append)
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: PORTABLE - {"avx2", "fma"})
    for spec in (None, found.id):
        for isolated in (False, True):
            with pytest.raises(CpuFeaturesMissing) as caught:
                kv.open(spec, isolated=isolated)
            assert caught.value.missing == ("avx2", "fma")
            assert "lacks: avx2, fma; build it here: pyllamakv build path:" in str(caught.value)
    assert not loaded
    # A local build for another CPU is skipped.
    made = build.build(shop.spec, native=False)
    assert made.folder.parent == variant.built()
    assert (
        variant._newest(
            variant.built(),
            variant.parse(shop.spec),
            spec_resolver.resolve(variant.parse(shop.spec).release),
            "cpu",
            {False: backend.choose("cpu", native=False)},
        )
        is None
    )
