"""Test that a spec, an id or a path resolves to the right built variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runtime_kit as kit
from fakes.tiny_gguf import write_gguf

from pyllamakv import open_variant
from pyllamakv.building import variant
from pyllamakv.building.manifest import Manifest
from pyllamakv.errors import (
    Closed,
    LoadError,
    ManifestError,
    ModelError,
    NotBuilt,
    UnknownRelease,
    UsageError,
)
from pyllamakv.source import verified


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of built variants that contains only manifests."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / ".half").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "manifest.json").write_text("{")
    return folder


def publish(folder: Path, name: str, **more: Any) -> Path:
    """Write a manifest."""
    patches = more.pop("patches", ())
    facts: dict[str, Any] = {
        "variant": name, "release": "0.3.9", "commit": "c", "tree": "t",
        "patched_tree": "p" if patches else "t", "patches": patches, "series_digest": "",
        "backend": "cpu", "options": {}, "compiler": "", "cpu_flags": (), "abi": 1,
        "library": "libplk.so", "library_sha256": "", **more,
    }  # fmt: skip
    (folder / name).mkdir()
    Manifest(**facts).save(folder / name)
    (folder / name / "libplk.so").touch()
    return folder / name


def test_variant_is_found_by_the_builder_before_the_manifests(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check found and missing variants, and an id, which the builder does not resolve."""
    folder = publish(built, "0.3.9-stock-cpu-1")
    asked = []

    def find(spec: str, backend: str) -> variant.Variant | None:
        asked.append((spec, backend))
        return variant.Variant(folder) if spec == "0.3.9" else None

    monkeypatch.setattr(variant, "find", find)
    assert open_variant.find_built("0.3.9") == folder
    assert open_variant.find_built("0.3.9-stock-cpu-1") == folder
    assert asked == [("0.3.9", "cpu")]
    with pytest.raises(
        NotBuilt,
        match=r"build 0\.3\.9\+patched; these builds have other patches, shim or settings",
    ):
        open_variant.find_built("0.3.9+patched")
    monkeypatch.setattr(variant, "find", lambda *_, **__: None)
    with pytest.raises(
        NotBuilt,
        match=r"build 0\.3\.9; these builds have other patches, shim or settings",
    ):
        open_variant.find_built("0.3.9")
    with pytest.raises(
        NotBuilt,
        match=r"build v0\.3\.9; these builds have other patches, shim or settings",
    ):
        open_variant.find_built("v0.3.9")
    with pytest.raises(NotBuilt, match=r"0\.3\.8; built releases: 0\.3\.9$"):
        open_variant.find_built("0.3.8")
    with pytest.raises(NotBuilt, match=r"--backend rpc"):
        open_variant.find_built("0.3.9+patched", backend="rpc")


def test_variant_is_found_by_manifests_without_tools(built: Path) -> None:
    """Check stock, patched, patches and the newest of several, without reading sources."""
    names = {
        "old": {"created": "2026-01-01"},
        "new": {"created": "2026-02-01"},
        "one": {"patches": ("full-defrag",)},
        "two": {"patches": ("full-defrag", "kv-counters")},
        "cuda": {"backend": "cuda", "created": "2027"},
        "other": {"release": "path:/b", "created": "2027"},
    }
    for name, facts in names.items():
        publish(built, name, **{"release": "path:/a", **facts})
    for spec, name in (
        ("path:/a", "new"),
        ("path:/a+stock", "new"),
        ("path:/a+patched", "two"),
        ("path:/a+full-defrag", "one"),
        ("path:/a+kv-counters", "two"),
        ("path:/b", "other"),
    ):
        assert open_variant.find_recorded("gone", spec) == built / name, spec
    for spec in ("path:/a+absent", "path:/c", "path:/b+patched"):
        with pytest.raises(NotBuilt):
            open_variant.find_recorded("gone", spec)
    for spec in ("+patched", "path:/a+"):
        with pytest.raises(UsageError):
            open_variant.find_recorded("gone", spec)


def test_paths_are_opened_as_they_are(tmp_path: Path) -> None:
    """Check a path that is not a library."""
    with pytest.raises(LoadError):
        open_variant.open(tmp_path / "absent")
    with pytest.raises(LoadError):
        open_variant.open(str(tmp_path))


@pytest.mark.regression(
    "names of sources that are invalid as paths raised untyped errors",
    by="hostile input",
    of="Python",
)
@pytest.mark.regression(
    "`replay` and `shrink` of a trace loaded a library with its name from the current directory",
    by="hostile input",
    of="Python",
)
def test_a_bare_name_is_never_a_file(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library in the current directory is loaded only by a path: a bare name is a build's."""
    monkeypatch.chdir(tmp_path)
    folder, find = publish(built, "0.3.9-stock-cpu-1"), variant.find

    def known(spec: str, backend: str) -> variant.Variant | None:
        return variant.Variant(folder) if spec == "0.3.9" else find(spec, backend=backend)

    monkeypatch.setattr(variant, "find", known)
    for name in ("0.3.9", "0.3.8", "evil.so"):
        (tmp_path / name).write_bytes(b"native code")
    assert open_variant.variant_path("0.3.9") == folder
    for name in ("0.3.8", "evil.so"):
        with pytest.raises(NotBuilt, match=rf"for a path in this directory, write \./{name}"):
            open_variant.open(name)
    for name in ("x" * 300, "x\0"):  # too long for any file system
        with pytest.raises((NotBuilt, UnknownRelease, UsageError)):
            open_variant.variant_path(name)
    assert open_variant.variant_path("./evil.so") == Path("./evil.so")
    assert open_variant.variant_path(Path("evil.so")) == Path("evil.so")


def test_recorded_variant_is_found_by_id_or_spec(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id is tried first, then the spec; the source of a URL or directory is not read."""
    monkeypatch.setattr(variant, "find", lambda spec, backend: variant.Variant(Path(spec)))
    folder = publish(built, "path-1-stock-cpu-1", release="path:/a/folder")
    assert open_variant.find_recorded(folder.name, "0.3.9+stock") == folder
    assert open_variant.find_recorded("gone", "path:/a/folder+stock") == folder
    assert open_variant.find_recorded("gone", "0.3.9+stock") == Path("0.3.9+stock")
    for names in (("gone", ""), ("gone", "path:/a/folder+patched"), ("gone", "path:/b")):
        with pytest.raises(NotBuilt):
            open_variant.find_recorded(*names)


def test_without_a_name_the_newest_verified_build_is_opened(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`open` and `serve_rpc` use it, for the given backend."""
    folder = publish(built, "0.3.9-patched-cpu-1")
    asked = []

    def newest(backend: str) -> variant.Variant:
        asked.append(backend)
        return variant.Variant(folder)

    monkeypatch.setattr(variant, "newest_verified", newest)
    for attempt in (open_variant.open, open_variant.serve_rpc):
        with pytest.raises((LoadError, ManifestError)):
            attempt(backend="rpc")
    assert asked == ["rpc", "rpc"]
    assert open_variant.variant_path(None) == folder


def test_an_unknown_architecture_names_a_release(tmp_path: Path) -> None:
    """The error of the library is kept, and has a remedy."""
    file = write_gguf(tmp_path / "refused.gguf", architecture="gpt-oss")
    with kit.library() as opened, pytest.raises(ModelError) as caught:
        opened.load_model(file)
    newest = verified.newest().name
    assert str(caught.value).endswith(
        f"unknown model architecture (architecture 'gpt-oss'); {newest} knows it: run "
        f"`pyllamakv build {newest}` and open {newest}+patched"
    )
    with kit.library() as opened, pytest.raises(ModelError) as caught:
        opened.load_model(tmp_path / "absent.gguf")
    assert "knows it" not in str(caught.value)


def test_an_opened_library_names_itself(tmp_path: Path) -> None:
    """Check devices, the name, and closing."""
    with kit.library() as opened:
        assert [device.name for device in opened.devices()] == ["CPU"]
        assert repr(opened) == "<OpenLibrary simulated>"
        model = opened.load_model(write_gguf(tmp_path / "tiny.gguf"))
    assert model.closed
    assert "closed" in repr(opened)
    for attempt in (opened.devices, lambda: opened.load_model(tmp_path / "tiny.gguf")):
        with pytest.raises(Closed):
            attempt()
