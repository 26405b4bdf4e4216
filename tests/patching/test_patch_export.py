"""Test that ports are exported from their commits unchanged: hooks and shared files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from patching_kit import SeriesSandbox, fill, numbered

from pyllamakv.errors import PatchFormatError, UnknownRelease, UsageError
from pyllamakv.patching import apply, patch_export, series
from pyllamakv.source import fetch, spec_resolver
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.source.releases import Release

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20), "src/gone.cpp": b"x\n"}
ONE = OLD | {"src/a.cpp": numbered(60, l10="x", l40="y"), "src/new.h": b"// new\n"}
TWO = {k: v for k, v in ONE.items() if k != "src/gone.cpp"} | {"src/b.cpp": numbered(20, l2="z")}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a release with two patches, the second on top of the first."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", OLD)
    bench.add_patch("one", {"0.3.1": (OLD, ONE)})
    bench.add_patch("two", {"0.3.1": (ONE, TWO)}, requires=("one",))
    monkeypatch.setattr(spec_resolver, "resolve", lambda name, *_: bench.releases[name])
    return bench


def check(bench: SeriesSandbox) -> list[tuple[str, str]]:
    found = patch_export.check(series.load(bench.folder), store=bench.store)
    return [(one.id, one.kind) for one in found]


def test_exported_patch_equals_its_file(bench: SeriesSandbox) -> None:
    """Git's export of the commit of a port equals the file, byte for byte."""
    assert check(bench) == [("one", "same"), ("two", "same")]
    patched = apply.apply(
        bench.releases["0.3.1"], ["two"], series=series.load(bench.folder), store=bench.store
    )
    assert patch_export.format_patch(bench.store, patched.commit) == bench.mail("two", "0.3.1")


def test_a_base_without_a_lock_is_fetched(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is fetched from the package index, and verified by the blob ids."""

    def unknown(spec: str, lock: Path | None = None) -> Release:
        raise UnknownRelease("not in the lock", name=spec, suggestions=[])

    monkeypatch.setattr(spec_resolver, "resolve", unknown)
    monkeypatch.setattr(fetch, "fetch_unlisted", bench.releases.__getitem__)
    assert check(bench) == [("one", "same"), ("two", "same")]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (b"@@ -7,7 +7,7 @@", b"@@ -6,7 +6,7 @@", "positions"),
        (b"@@ -7,7 +7,7 @@ line 6", b"@@ -7,7 +7,7 @@ line 5", "positions"),
        (b"-line 10", b"-line 11", "failed"),
    ],
)
def test_a_changed_byte_of_a_port_is_reported(
    bench: SeriesSandbox, old: bytes, new: bytes, kind: str
) -> None:
    """The report shows the difference of an edited file."""
    file = bench.file("one", "0.3.1")
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))
    assert check(bench)[0] == ("one", kind)


def test_export_repairs_hunk_positions(bench: SeriesSandbox) -> None:
    """The positions are corrected; a second export changes nothing."""
    file = bench.file("one", "0.3.1")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"@@ -7,7", b"@@ -6,7"))
    loaded = series.load(bench.folder)
    assert patch_export.write(loaded, patch_export.select_ports(loaded), store=bench.store) == (
        file,
    )
    assert file.read_bytes() == data
    loaded = series.load(bench.folder)
    assert patch_export.write(loaded, patch_export.select_ports(loaded), store=bench.store) == ()


def test_export_from_a_directory_writes_the_port(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A manual change in a tree becomes the port, without the required patches."""
    file = bench.file("two", "0.3.1")
    data = file.read_bytes()
    file.unlink()
    folder = tmp_path / "tree"
    fill(folder, TWO)
    (folder / "common").mkdir()
    (folder / "common" / "build-info.cpp").write_bytes(b"made by the build\n")
    loaded = series.load(bench.folder, missing_ok=True)
    pairs = patch_export.select_ports(loaded, ["two"], "0.3.1")
    assert patch_export.write(loaded, pairs, folder, store=bench.store) == (file,)
    assert file.read_bytes() == data


def test_a_folder_without_change_is_refused(bench: SeriesSandbox, tmp_path: Path) -> None:
    """An unchanged tree makes no patch."""
    fill(tmp_path / "tree", ONE)
    loaded = series.load(bench.folder)
    with pytest.raises(UsageError, match=r"equals 0\.3\.1 with"):
        patch_export.write(
            loaded, patch_export.select_ports(loaded, ["two"]), tmp_path / "tree", store=bench.store
        )


def test_a_tree_with_other_patches_is_refused(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The changes of a later patch, or of upstream, would become a part of the port."""
    listed = series.load(bench.folder)
    bench.add_release("0.3.2", OLD | {"src/b.cpp": numbered(20, l2="upstream")})
    folder = tmp_path / "tree"

    def exported(id_: str, *names: str, release: str = "0.3.1") -> bytes:
        made = apply.apply(bench.releases[release], names, series=listed, store=bench.store)
        bench.store.export(made.commit, folder)
        (folder / "src" / "more.h").write_bytes(b"// more\n")
        found = listed.definition(id_)
        return patch_export.from_folder(listed, found, "0.3.1", folder, store=bench.store)

    assert b"more.h" in exported("one", "one")
    assert b"more.h" in exported("one")
    assert b"more.h" in exported("two", "one", "two")
    assert b"gone.cpp" not in exported("two", "one")
    hint = r"of other patches: .* apply 0\.3\.1 one --to DIR`\."
    with pytest.raises(UsageError, match=hint):
        exported("one", "one", "two")
    for names in ((), ("one",)):
        with pytest.raises(UsageError, match="another release"):
            exported("one", *names, release="0.3.2")


def test_no_port_is_written_if_one_fails(bench: SeriesSandbox) -> None:
    """Either both ports are written, or none."""
    one, two = bench.file("one", "0.3.1"), bench.file("two", "0.3.1")
    one.write_bytes(one.read_bytes().replace(b"@@ -7,7", b"@@ -6,7"))
    two.write_bytes(two.read_bytes().replace(b"-line 2", b"-line 9"))
    before = one.read_bytes()
    loaded = series.load(bench.folder)
    with pytest.raises(Exception, match="does not apply"):
        patch_export.write(loaded, patch_export.select_ports(loaded), store=bench.store)
    assert one.read_bytes() == before


def test_unknown_base_is_refused(bench: SeriesSandbox) -> None:
    """A base without a port is a usage error."""
    with pytest.raises(UsageError, match=r"0\.9"):
        patch_export.select_ports(series.load(bench.folder), [], "0.9")


@pytest.mark.slow
def test_shared_files_are_written_once(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A changed shared file is written once, for every port."""
    shared = {"src/shared.h": b"// shared\n"}
    other = OLD | {"src/a.cpp": b"other\n" + numbered(60)}
    bench.add_release("0.3.2", other, "2025-02-01")
    ports = {
        "0.3.1": (OLD, ONE | shared),
        "0.3.2": (other, other | shared | {"src/b.cpp": numbered(20, l3="w")}),
    }
    bench.add_patch("three", ports, shared=("src/shared.h",))
    file = bench.folder / "shared" / "src" / "shared.h"
    assert file.read_bytes() == b"// shared\n"
    assert check(bench)[2:] == [("three", "same"), ("three", "same")]
    before = [bench.file("three", base).read_bytes() for base in ports]
    fill(tmp_path / "tree", ONE | {"src/shared.h": b"// changed\n"})
    loaded = series.load(bench.folder)
    pairs = patch_export.select_ports(loaded, ["three"], "0.3.1")
    assert patch_export.write(loaded, pairs, tmp_path / "tree", store=bench.store) == (file,)
    assert file.read_bytes() == b"// changed\n"
    assert [bench.file("three", base).read_bytes() for base in ports] == before
    for base in ports:
        assert b"+// changed\n" in bench.mail("three", base)
    assert check(bench)[2:] == [("three", "same"), ("three", "same")]


def test_a_folder_without_a_shared_file_is_refused(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The error names the missing file, and nothing is written."""
    ports = {"0.3.1": (OLD, ONE | {"src/shared.h": b"// shared\n"})}
    bench.add_patch("three", ports, shared=("src/shared.h",))
    before = bench.file("three", "0.3.1").read_bytes()
    fill(tmp_path / "tree", ONE)
    loaded = series.load(bench.folder)
    pairs = patch_export.select_ports(loaded, ["three"], "0.3.1")
    with pytest.raises(PatchFormatError, match=r"does not add src/shared\.h"):
        patch_export.write(loaded, pairs, tmp_path / "tree", store=bench.store)
    assert bench.file("three", "0.3.1").read_bytes() == before
