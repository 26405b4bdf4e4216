"""Test xllamacpp: the plain tree of llama.cpp in its sdists."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from archive_kit import not_fetched
from source_kit import (
    NEWEST,
    WHOLE_TREE,
    Server,
    index_page,
    link,
    objects,
    refs,
    sha256,
    xllamacpp_sdist,
)

from pyllamakv.errors import FetchError, HashMismatch, UnknownRelease
from pyllamakv.source import fetch, lockfile, package_sources, release_chain
from pyllamakv.source.releases import Release
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import open_store
from pyllamakv.source.xllamacpp import import_package

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "2026.10.11549"
PACKAGE = f"xllamacpp=={VERSION}"
TREE_FOLDER = f"xllamacpp-{VERSION}/thirdparty/llama.cpp"


pytestmark = pytest.mark.usefixtures("home")


def without(*names: str) -> dict[str, bytes]:
    return {name: data for name, data in WHOLE_TREE.items() if name not in names}


@pytest.mark.slow
def test_a_release_is_added_and_fetched_again(tmp_path: Path, server: Server, home: Path) -> None:
    """A version has the name of its build; its lock entry is enough to fetch it again."""
    file = xllamacpp_sdist(tmp_path, VERSION)
    index_page(server, file)
    release = fetch.add(PACKAGE)
    assert (release.name, release.kind, release.key) == ("b11549", "xllamacpp", "b11549")
    assert (release.package, release.archive) == (PACKAGE, file.name)
    assert (release.sha256, release.date) == (sha256(file), "2026-10-10T15:29:41Z")
    store = open_store()
    assert {path: store.read(release, path) for path in store.ls(release)} == WHOLE_TREE
    assert not list((home / "downloads").iterdir())
    before = len(server.asked)
    assert fetch.add(PACKAGE) == fetch.ensure(PACKAGE) == resolve(PACKAGE) == release
    assert len(server.asked) == before
    store.delete_ref("refs/upstream/b11549")
    assert fetch.fetch(resolve("b11549")) == release
    assert store.has(release)
    assert not store.problems(release)


def test_the_same_archive_gives_the_same_ids(tmp_path: Path) -> None:
    """Ids depend on the archive; other modification times are another commit of the same tree."""
    file = xllamacpp_sdist(tmp_path, VERSION)
    first = import_package(open_store(tmp_path / "1.git"), file, VERSION)
    assert first == import_package(open_store(tmp_path / "2.git"), file, VERSION)
    assert first[2] == "b11549"
    later = xllamacpp_sdist(tmp_path / "later", VERSION, newest=NEWEST + 60)
    other = import_package(open_store(tmp_path / "1.git"), later, VERSION)
    assert other[0] != first[0]
    assert other[1] == first[1]


def test_a_version_without_a_build_number_keeps_its_version(tmp_path: Path) -> None:
    """Sdists before 2026.4 do not contain the build number, and one build may have two sdists."""
    names = {"0.2.14": "xllamacpp-0.2.14", "2026.4.8672.1": "xllamacpp-2026.4.8672.1"}
    for version, name in names.items():
        release = fetch.add(str(xllamacpp_sdist(tmp_path, version)))
        assert release.name == name
        assert resolve(name) == resolve(f"xllamacpp=={version}") == release


def test_a_tag_that_another_source_has_is_not_replaced(tmp_path: Path) -> None:
    """A build that is pinned from npm keeps its name, commit and objects."""
    pinned = Release("b11549", "npm", "1" * 40, "2" * 40, "rows", "2026-01-01T00:00:00Z")
    lockfile.save(lockfile.shipped(), [replace(pinned, package="node-llama-cpp@3.23.0")])
    release = fetch.add(str(xllamacpp_sdist(tmp_path, VERSION)))
    assert release.name == f"xllamacpp-{VERSION}"
    assert set(refs(open_store())) == {f"refs/upstream/xllamacpp-{VERSION}"}
    assert resolve("b11549").kind == "npm"


@pytest.mark.slow
def test_releases_are_in_the_chain(tmp_path: Path) -> None:
    """Releases of xllamacpp are sorted by date among all others."""
    for age, version in enumerate(("2026.9.11063", VERSION, "2026.9.10809")):
        newest = NEWEST - 86400 * (30 + age if version != VERSION else 0)
        fetch.add(str(xllamacpp_sdist(tmp_path, version, newest=newest)))
    names = [link.release.name for link in release_chain.chain(open_store())]
    assert names == ["b10809", "b11063", "b11549"]
    assert list(lockfile.known()) == names


def test_concurrent_additions_download_an_sdist_once(
    tmp_path: Path, server: Server, home: Path
) -> None:
    """Concurrent additions of a version return the same release, and it is downloaded once."""
    file = xllamacpp_sdist(tmp_path, VERSION)
    index_page(server, file)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fetch.add(PACKAGE), range(4)))
    assert [release.name for release in found] == ["b11549"]
    assert sum(path.endswith(".tar.gz") for path, _ in server.asked) == 1
    assert not list((home / "downloads").iterdir())


@pytest.mark.parametrize("name", ["include/llama.h", "src/llama.cpp", "ggml/src/CMakeLists.txt"])
def test_sdist_without_a_full_tree_is_refused(tmp_path: Path, name: str) -> None:
    """Early sdists contain a few headers only."""
    file = xllamacpp_sdist(tmp_path, VERSION, without(name))
    not_fetched(str(file), f"no complete llama.cpp: .*{name} is missing")


@pytest.mark.parametrize("version", ["2026.10", "2026.10.0", "2026.10.11549b", "2026.10.b1"])
def test_version_without_a_build_number_is_refused(tmp_path: Path, version: str) -> None:
    """A version of the new scheme must contain the build of llama.cpp."""
    not_fetched(str(xllamacpp_sdist(tmp_path, version)), "states no build number")


@pytest.mark.parametrize("newest", [0, 1000.5, 1e12, -1e9, math.nan, math.inf])
def test_invalid_modification_time_is_refused(tmp_path: Path, newest: float) -> None:
    """Releases are sorted by date, so an invalid time is refused."""
    not_fetched(str(xllamacpp_sdist(tmp_path, VERSION, newest=newest)), "modification time|header")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{TREE_FOLDER}/../../../out", "outside"),
        (f"{TREE_FOLDER}//etc/passwd", "outside"),
    ],
)
def test_sdist_member_outside_the_tree_is_refused(tmp_path: Path, name: str, words: str) -> None:
    """A member whose path is outside the tree is refused."""
    not_fetched(str(xllamacpp_sdist(tmp_path, VERSION, extra={name: b"x"})), words)


def test_sdist_with_a_hard_link_is_refused(tmp_path: Path) -> None:
    """A member that is neither a file nor a symbolic link is refused."""
    name = f"{TREE_FOLDER}/src/x.cpp"
    made = link(name, f"{TREE_FOLDER}/src/llama.cpp", b"1")
    not_fetched(str(xllamacpp_sdist(tmp_path, VERSION, extra={name: made})), "not a plain file")


def test_renamed_sdist_is_refused(tmp_path: Path) -> None:
    """The version in the file name must be that of the archive."""
    file = xllamacpp_sdist(tmp_path, VERSION)
    not_fetched(str(file.rename(tmp_path / "xllamacpp-2026.10.11550.tar.gz")), "no complete llama")


def test_truncated_sdist_is_refused(tmp_path: Path) -> None:
    """A truncated archive is detected while it is read."""
    file = xllamacpp_sdist(tmp_path, VERSION)
    file.write_bytes(file.read_bytes()[:-30])
    not_fetched(str(file), "truncated")


def test_sdist_other_than_pinned_is_refused(tmp_path: Path, server: Server) -> None:
    """An archive with another hash, commit or tree than the lock has is refused."""
    file = xllamacpp_sdist(tmp_path, VERSION)
    index_page(server, file)
    release = fetch.add(str(file))
    store = open_store()
    store.delete_ref("refs/upstream/b11549")
    before = objects(store)
    for wrong, words in (
        (replace(release, sha256="0" * 64), "SHA-256"),
        (replace(release, commit="1" * 40), "commit"),
        (replace(release, tree="1" * 40), "tree"),
    ):
        with pytest.raises(HashMismatch, match=words):
            fetch.fetch(wrong)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(HashMismatch, match="the lock file expects"):
        fetch.add(str(file))
    assert objects(store) == before
    assert not refs(store)


def test_unknown_xllamacpp_version_names_the_newest(server: Server, tmp_path: Path) -> None:
    """An unknown version is refused with the newest one; a pinned one is a failed fetch."""
    index_page(server, xllamacpp_sdist(tmp_path, VERSION))
    with pytest.raises(
        UnknownRelease, match=rf"xllamacpp 2026\.1\.1; the newest there is {VERSION}"
    ):
        fetch.add("xllamacpp==2026.1.1")
    lost = Release("b1", "xllamacpp", "1" * 40, "2" * 40, "rows", "2026-01-01T00:00:00Z")
    lost = replace(lost, package="xllamacpp==2026.1.1", archive="x", sha256="0" * 64)
    with pytest.raises(FetchError, match=r"no sdist of xllamacpp 2026\.1\.1"):
        fetch.fetch(lost)


@pytest.mark.parametrize(
    "spec", ["xllamacpp==", "xllamacpp==x", "xllamacpp@1.0", "xllamacpp==1.0/x", "xllamacpp==1 "]
)
def test_invalid_package_specs_are_refused(spec: str) -> None:
    """Invalid versions of the project are refused before an index is requested."""
    assert package_sources.find_package(spec) is None


def test_package_names_of_each_source_are_parsed() -> None:
    """Each source parses the names that it writes."""
    for source in package_sources.SOURCES:
        for version in ("3.7.0", VERSION, "1.0rc1"):
            found = (source, version)
            assert package_sources.find_package(source.spec(version)) == found
            assert package_sources.find_package(source.package(version)) == found
            stem = source.project.replace("-", "_") if source.plain else source.project
            assert package_sources.find_archive(f"{stem}-{version}{source.suffix}") == found
    long = "1." + "0" * 200
    assert package_sources.find_package(long) is None
    assert package_sources.find_archive(f"xllamacpp-{long}.tar.gz") is None
