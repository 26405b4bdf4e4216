"""Test the lock: strict parsing, comments kept on writing, sorted by upstream's dates."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pyllamakv.errors import LockFileError
from pyllamakv.home import data
from pyllamakv.source import lockfile
from pyllamakv.source.era import ERAS
from pyllamakv.source.releases import Release

ROOT = Path(__file__).resolve().parents[2]

#: The reference releases of the project, in upstream's order.
REFERENCE = [
    "0.2.90",
    "0.3.2",
    "0.3.5",
    "0.3.6",
    "0.3.7",
    "0.3.8",
    "b4980",
    "0.3.9",
    "b5415",
    "0.3.10",
    "0.3.12",
    "0.3.14",
    "0.3.15",
    "0.3.16",
    "b6845",
    "0.3.17",
    "0.3.20",
    "0.3.25",
    "0.3.30",
    "0.3.36",
]


pytestmark = pytest.mark.usefixtures("home")


def release(name: str, date: str = "2025-01-01T00:00:00Z") -> Release:
    return Release(
        name=name,
        kind="sdist",
        commit="1" * 40,
        tree="2" * 40,
        era="split",
        date=date,
        archive=f"llama_cpp_python-{name}.tar.gz",
        sha256="3" * 64,
        package=f"llama-cpp-python=={name}",
    )


def test_saved_releases_are_read_back_in_order(tmp_path: Path) -> None:
    """Saved releases are read back, sorted by date and then by number."""
    file = tmp_path / "lock.toml"
    late, ten, nine = release("a", "2026-01-01T00:00:00Z"), release("0.10"), release("0.9")
    git = Release("git:x@y", "git", "4" * 40, "5" * 40, "rows", "2024-01-01T00:00:00Z", url="x")
    lockfile.save(file, [late, ten])
    lockfile.save(file, [nine, git])
    assert lockfile.load(file) == [git, nine, ten, late]
    text = file.read_text()
    assert text.index("git:x@y") < text.index('"0.9"') < text.index('"0.10"') < text.index('"a"')


def test_comments_are_kept(tmp_path: Path) -> None:
    """Replacing a release changes only its lines."""
    file = tmp_path / "lock.toml"
    lockfile.save(file, [release("0.1"), release("0.2", "2025-02-01T00:00:00Z")])
    before = file.read_text().replace('name = "0.1"', 'name = "0.1"  # the first')
    file.write_text(before)
    lockfile.save(file, [replace(release("0.1"), era="memory", package=None)])
    after = file.read_text()
    assert "# the first" in after
    assert len(set(before.splitlines()) ^ set(after.splitlines())) <= 2
    assert lockfile.load(file)[0].era == "memory"
    assert lockfile.load(file)[0].package is None


def test_saving_the_same_changes_nothing(tmp_path: Path) -> None:
    """Saving the same releases does not change the file."""
    file = tmp_path / "lock.toml"
    lockfile.save(file, [release("0.1"), release("0.2")])
    before = file.read_bytes()
    lockfile.save(file, [release("0.2")])
    assert file.read_bytes() == before


def test_concurrent_saves_lose_no_release(tmp_path: Path) -> None:
    """If several threads add releases at the same time, all are saved."""
    file = tmp_path / "lock.toml"
    names = [f"0.{number}" for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: lockfile.save(file, [release(name)]), names))
    assert [r.name for r in lockfile.load(file)] == names


def test_shipped_wins_over_added() -> None:
    """An added release does not override an entry of the shipped lock."""
    lockfile.save(lockfile.added(), [replace(release("0.1"), era="rows"), release("0.5")])
    lockfile.save(lockfile.shipped(), [release("0.1")])
    assert lockfile.known()["0.1"].era == "split"
    assert list(lockfile.known()) == ["0.1", "0.5"]


def test_missing_lock_file_is_empty(tmp_path: Path) -> None:
    """A missing lock is an empty one."""
    assert lockfile.load(tmp_path / "none.toml") == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("version = [", "cannot read"),
        ("version = 9\n", "version 9"),
        ("version = 0x" + "f" * 5000, "has an invalid version"),
        ("version = -128\n", "has an invalid version"),
        ("", "version None"),
        ("version = 1\nrelease = 3\n", "list of tables"),
        ("version = 1\nrelease = [1]\n", "list of tables"),
        ('version = 1\nrelease = ["ab"]\n', "list of tables"),
        ('version = 1\n[[release]]\nname = "x"\n', "lacks `kind`"),
        ("{good}x = 1\n", "unknown key `x`"),
        ("{good}url = 0x" + "f" * 5000, "`url` that is not a text"),
        ("{good}{good}", "twice"),
        ("{badkind}", "unknown kind"),
        ("{badcommit}", "40 hexadecimal"),
        ("{badhash}", "64 hexadecimal"),
        ("{badfile}", "not a file name"),
        ("{badname}", "not safe"),
    ],
)
@pytest.mark.regression(
    "entries of a lock with invalid types, and a version of thousands of digits, raised untyped "
    "errors",
    by="hostile input",
    of="Python",
)
def test_invalid_lock_file_is_refused_with_its_fault(tmp_path: Path, text: str, word: str) -> None:
    """An invalid lock is refused with the reason."""
    good = (
        '[[release]]\nname = "x"\nkind = "sdist"\ncommit = "{}"\ntree = "{}"\nera = "split"\n'
        'date = "2025"\narchive = "a.tar.gz"\nsha256 = "{}"\n'
    ).format("1" * 40, "2" * 40, "3" * 64)
    filled = text.format(
        good=good,
        badkind=good.replace("sdist", "wheel"),
        badcommit=good.replace("1" * 40, "main"),
        badhash=good.replace("3" * 64, "3"),
        badfile=good.replace("a.tar.gz", "../a.tar.gz"),
        badname=good.replace('"x"', '"x/../y"'),
    )
    file = tmp_path / "lock.toml"
    head = "version = 1\n" if text.startswith("{") else ""
    file.write_text(head + filled)
    if text == "":
        file.write_text("other = 1\n")
    with pytest.raises(LockFileError, match=word) as caught:
        lockfile.load(file)
    assert "lock.toml" in str(caught.value)


def test_the_shipped_lock_pins_every_reference_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped lock contains the twenty reference releases, complete and in order."""
    monkeypatch.undo()
    found = lockfile.load(data("vendor/upstream.lock.toml"))
    assert [r.name for r in found if r.name in REFERENCE] == REFERENCE
    for one in found:
        assert one.archive
        assert one.sha256
        assert one.package
    eras = list(dict.fromkeys(r.era for r in found))
    assert eras == list(ERAS)


def test_the_shipped_lock_names_no_host() -> None:
    """The lock contains no address of a registry."""
    text = (ROOT / "vendor" / "upstream.lock.toml").read_text()
    assert "://" not in text


def test_a_lock_is_parsed_once_and_never_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced file is read again, even with the same size and modification time."""
    path, other, parsed = tmp_path / "lock.toml", tmp_path / "other.toml", []
    release = lockfile.load(data("vendor/upstream.lock.toml"))[0]
    lockfile.save(path, [release])
    lockfile.save(other, [replace(release, commit="d" * 40)])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    assert other.stat().st_size == path.stat().st_size
    read = lockfile._parsed
    monkeypatch.setattr(lockfile, "_parsed", lambda path: parsed.append(path) or read(path))
    lockfile.load(path).clear()
    assert lockfile.load(path) == [release]
    assert parsed == [path]
    other.replace(path)
    assert lockfile.load(path) == [replace(release, commit="d" * 40)]
    path.unlink()
    assert lockfile.load(path) == []
