"""A built server is found by a spec, and checked before it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from building_kit import manifest
from native_kit import TEST_RELEASE

from pyllamakv.building import manifest as manifests
from pyllamakv.building import variant
from pyllamakv.building.variant import Spec, Variant
from pyllamakv.errors import LoadError, ManifestError, NotBuilt
from pyllamakv.server import server_artifact, server_patches
from pyllamakv.server.server_artifact import BuiltServer, ServerManifest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltServer:
    """Return a server in a data directory."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    folder = tmp_path / "built" / "0.3.9-stock-cpu-0123456789abcdef"
    folder.mkdir(parents=True)
    manifest(cpu_flags=()).save(folder)
    library = Variant(folder)
    made = server_artifact.servers() / server_artifact.server_id(library)
    made.mkdir(parents=True)
    (made / "llama-server").write_bytes(b"program")
    digest = hashlib.sha256(b"program").hexdigest()
    ServerManifest(
        made.name,
        library.id,
        "0.3.9",
        ("a", "b"),
        "cpu",
        True,
        digest,
        "2026",
        1.5,
        ("c",),
        {"d": "no port"},
        {"c": "0.3.8"},
    ).save(made)
    return BuiltServer(made, library)


def test_loaded_manifest_equals_the_saved_one(server: BuiltServer) -> None:
    """Tuples are loaded as tuples."""
    assert server.manifest.patches == ("a", "b")
    assert server.manifest.server_patches == ("c",)
    assert server.manifest.left_out == {"d": "no port"}
    assert server.manifest.carried == {"c": "0.3.8"}
    assert server.manifest.server == server.id
    assert server_artifact.lookup(server.variant) == server
    assert server.check_program() == server.program


def test_server_with_a_changed_program_or_manifest_is_refused(server: BuiltServer) -> None:
    """A changed program is refused, and so is an unreadable manifest."""
    server.program.write_bytes(b"changed")
    with pytest.raises(ManifestError, match="expected sha256"):
        server.check_program()
    (server.folder / "server.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ManifestError, match="build the server again"):
        _ = BuiltServer(server.folder, server.variant).manifest


def test_server_for_another_cpu_is_refused(
    server: BuiltServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program would end with an illegal instruction."""
    changed = dataclasses.replace(server.variant.manifest, cpu_flags=("no-such-flag",))
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: frozenset({"avx"}))
    monkeypatch.setattr(manifests, "load", lambda _folder: changed)
    with pytest.raises(LoadError, match="no-such-flag"):
        BuiltServer(server.folder, Variant(server.variant.folder)).check_program()


def other_variant(folder: Path, **changed: object) -> Variant:
    """Return another variant."""
    folder.mkdir(parents=True)
    manifest(**changed).save(folder)
    return Variant(folder)


def test_the_id_changes_with_variant_and_project(
    server: BuiltServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It depends on nothing else."""
    name = server_artifact.server_id(server.variant)
    assert name.startswith(f"{server.variant.id}-")
    assert server_artifact.server_id(other_variant(tmp_path / "other")) != name
    monkeypatch.setattr(server_artifact, "project", lambda: tmp_path)
    assert server_artifact.server_id(server.variant) != name


def test_the_id_of_a_patched_server_changes_with_the_patches_of_the_server(
    server: BuiltServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stock server has none of them."""
    patched = other_variant(tmp_path / "patched", patched_tree="b" * 40, patches=("kv-counters",))
    before = [server_artifact.server_id(each) for each in (server.variant, patched)]
    monkeypatch.setattr(server_patches, "digest", lambda: "another")
    after = [server_artifact.server_id(each) for each in (server.variant, patched)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("text", "series"),
    [("0.3.9", None), ("0.3.9+patched", None), ("0.3.9+stock", ()), ("0.3.9+a,b", ("a", "b"))],
)
def test_a_release_without_a_series_is_patched(text: str, series: tuple[str, ...] | None) -> None:
    """Without a series, the patches are included."""
    assert server_artifact.patched_spec(text) == Spec("0.3.9", series)


def test_a_server_is_found_by_its_spec(
    server: BuiltServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, the error has the command that builds it."""
    monkeypatch.setattr(variant, "find", lambda *_args, **_options: server.variant)
    assert server_artifact.find_server("0.3.9") == server
    server.program.unlink()
    with pytest.raises(NotBuilt, match=r"pyllamakv build 0\.3\.9\+patched --server"):
        server_artifact.find_server("0.3.9")
    monkeypatch.setattr(variant, "find", lambda *_args, **_options: None)
    with pytest.raises(NotBuilt, match="--server --backend cuda"):
        server_artifact.find_server("0.3.9+stock", backend="cuda")


def test_a_portable_server_is_found_next_to_a_tuned_build(
    server: BuiltServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tuned server is preferred if it is built as well."""
    tuned = other_variant(tmp_path / "built" / "tuned")
    built = {True: tuned, False: server.variant}
    monkeypatch.setattr(variant, "find", lambda *_args, native, **_options: built[native])
    assert server_artifact.find_server("0.3.9") == server
    assert server_artifact.find_server("0.3.9", native=False) == server
    with pytest.raises(NotBuilt, match=r"--server$"):
        server_artifact.find_server("0.3.9", native=True)
    other = server_artifact.servers() / server_artifact.server_id(tuned)
    other.mkdir()
    (other / "llama-server").touch()
    assert server_artifact.find_server("0.3.9").variant == tuned
    assert server_artifact.find_server("0.3.9", native=False) == server
    server.program.unlink()
    with pytest.raises(NotBuilt, match=r"--server --portable$"):
        server_artifact.find_server("0.3.9", native=False)


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="the loader of Linux reads LD_LIBRARY_PATH")
def test_a_server_loads_the_libraries_of_its_variant(tmp_path: Path) -> None:
    """They are even if LD_LIBRARY_PATH has libraries of the same names, for example of upstream."""
    try:
        found = server_artifact.find_server(TEST_RELEASE)
    except NotBuilt as error:
        pytest.skip(str(error))
    for library in found.variant.dropin.glob("*.so*"):
        (tmp_path / library.name).touch()
    done = subprocess.run(
        [str(found.check_program()), "--version"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
