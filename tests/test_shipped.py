"""What a wheel carries packed is files again, once per home, whoever asks first."""

from __future__ import annotations

import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyllamakv import home, shipped


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return an archive of two files."""
    folder = tmp_path / "folder"
    (folder / "a" / "0.3.9").mkdir(parents=True)
    (folder / "series.toml").write_text("order\n", encoding="utf-8")
    (folder / "a" / "0.3.9" / "a.patch").write_bytes(b"--- a\r\n\xff")
    shipped.pack(folder, tmp_path / "packed.tar.xz", "**/*")
    return tmp_path / "packed.tar.xz"


def test_what_goes_in_comes_out(packed: Path, tmp_path: Path) -> None:
    """Names and bytes are kept, and a second call reads nothing again."""
    place = shipped.unpacked(packed, tmp_path / "home")
    assert place.parent == tmp_path / "home" / "shipped"
    assert (place / "series.toml").read_text("utf-8") == "order\n"
    assert (place / "a" / "0.3.9" / "a.patch").read_bytes() == b"--- a\r\n\xff"
    (place / "mark").touch()
    shipped.unpacked.cache_clear()
    assert (shipped.unpacked(packed, tmp_path / "home") / "mark").exists()
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_the_archive_depends_on_the_files_alone(packed: Path, tmp_path: Path) -> None:
    """Times and modes of the files do not change it."""
    for path in (tmp_path / "folder").rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    shipped.pack(tmp_path / "folder", tmp_path / "again.tar.xz", "**/*")
    assert (tmp_path / "again.tar.xz").read_bytes() == packed.read_bytes()


def test_many_at_once(packed: Path, tmp_path: Path) -> None:
    """Whoever comes second takes what the first has made, and nobody sees half of it."""

    def one(_: int) -> int:
        place = shipped.unpacked.__wrapped__(packed, tmp_path / "home")
        return len(list(place.rglob("*.*")))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(16))) == {3}
    assert len(list((tmp_path / "home" / "shipped").iterdir())) == 1


def test_a_home_that_cannot_be_written(packed: Path, tmp_path: Path) -> None:
    """The files then lie in a temporary folder."""
    (tmp_path / "file").touch()
    place = shipped.unpacked(packed, tmp_path / "file" / "home")
    assert (place / "series.toml").is_file()
    assert not place.is_relative_to(tmp_path / "file")


def test_nothing_leaves_the_folder(tmp_path: Path) -> None:
    """Odd members are left out."""
    with tarfile.open(tmp_path / "odd.tar.xz", "w:xz") as tar:
        for name in ("../out", "/tmp/out", "good"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    place = shipped.unpacked(tmp_path / "odd.tar.xz", tmp_path / "home")
    assert [path.name for path in place.rglob("*")] == ["good"]


def test_an_installed_package_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout patches and shim are unpacked ones, and the lock lies in the package."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    package = tmp_path / "pyllamakv"
    (package / "data").mkdir(parents=True)
    patterns = ("pyllamakv/native/**/*", "patches/*")
    root = Path(home.__file__).parents[1]
    shipped.pack(root, package / "data" / "sources.tar.xz", *patterns)
    named = ("CMakeLists.txt", "*.cmake", "*.h", "*.cpp", "*.cpp.in", "*.map")
    sources = {each.relative_to(home.shim()) for name in named for each in home.shim().rglob(name)}
    monkeypatch.setattr(home, "checkout", lambda: None)
    monkeypatch.setattr(home, "_PACKAGE", package)
    assert (home.data("patches") / "series.toml").is_file()
    found = {each.relative_to(home.shim()) for each in home.shim().rglob("*.*")}
    assert Path("plk.h") in sources and sources == found
    assert home.data("vendor/upstream.lock.toml").parts[-3:-1] == ("data", "vendor")
