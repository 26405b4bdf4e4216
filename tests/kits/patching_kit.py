"""Small trees, releases and series for the tests of patching; git itself writes the patches."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.patching import hunks, series, shared_files
from pyllamakv.patching.strict_apply import DraftEntry
from pyllamakv.source import git_command
from pyllamakv.source.releases import Release

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyllamakv.patching.definition import Port
    from pyllamakv.source.store import Store

Files = dict[str, bytes]


@dataclass(frozen=True)
class MemoryTree:
    """Serve a tree from a mapping of paths to contents."""

    files: Mapping[str, bytes | DraftEntry]

    def entry(self, path: str) -> DraftEntry | None:
        """Return the file, or None."""
        found = self.files.get(path)
        return DraftEntry(found) if isinstance(found, bytes) else found

    def paths(self) -> Iterable[str]:
        """Return the paths of all files."""
        return self.files


def numbered(count: int, **changed: str) -> bytes:
    """Return lines `line 1` to `line N`; ``l3="x"`` replaces line 3, an empty text removes it."""
    lines = [changed.get(f"l{n}", f"line {n}\n") for n in range(1, count + 1)]
    return "".join(
        line if line.endswith("\n") or not line else line + "\n" for line in lines
    ).encode()


def code(name: str, *lines: str, count: int = 20) -> bytes:
    """Return a function whose body is numbered lines, with others in its middle."""
    body = [f"    {name}_{n}();" for n in range(count)]
    body[count // 2 : count // 2] = [f"    {line}" for line in lines]
    return "\n".join([f"static int {name}(int a, int b) {{", *body, "}", "", ""]).encode()


#: Lines of which a hunk is made: as many as it shows, so that they match wherever they are.
SHOWN = ("n = 1;", "m = 2;", "use(n);", "use(m);", "n = 0;", "m = 0;")
WITH = (*SHOWN[:3], "log(n);", *SHOWN[3:])


def fill(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def git(folder: Path, *args: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git in a directory that is a separate repository."""
    return git_command.run(folder, *args, input=input)


def repository(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Create a temporary repository with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    git_command.git(folder, "init", "-q", ".")
    fill(folder, files)
    git_command.git(folder, "add", "-A", "-f")
    git_command.git(folder, "commit", "-q", "--allow-empty", "-m", "base")
    return folder


def diff(old: Mapping[str, bytes], new: Mapping[str, bytes], *options: str) -> bytes:
    """Return git's patch between two sets of files."""
    with tempfile.TemporaryDirectory() as name:
        folder = repository(Path(name) / "r", old)
        for path in set(old) - set(new):
            (folder / path).unlink()
        fill(folder, new)
        git_command.git(folder, "add", "-A", "-f")
        return git_command.git_bytes(
            folder, "diff", "--cached", "--full-index", "--no-renames", *options
        )


def git_apply(files: Mapping[str, bytes], patch: bytes) -> Files | None:
    """Apply a patch with git, in a repository outside any other; None when git refuses."""
    with tempfile.TemporaryDirectory() as name:
        folder = repository(Path(name) / "r", files)
        if git(folder, "apply", "--whitespace=nowarn", "-", input=patch).returncode:
            return None
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and ".git" not in path.relative_to(folder).parts
        }


def release(
    store: Store, name: str, files: Mapping[str, bytes], date: str = "2025-01-01"
) -> Release:
    """Put a small release into the store."""
    commit, tree = store.commit(None, dict(files), f"release {name}")
    store.update_ref(f"refs/upstream/{name}", commit)
    return Release(name, "sdist", commit, tree, "unified", f"{date}T00:00:00Z")


TOML = """\
schema = 1
id = "{id}"
title = "Do what {id} does"
why = "Because {id} is needed."
origin = "own work"
upstream = "not submitted"
releases = "{releases}"
requires = {requires}
scenarios = ["some-scenario"]
{shared}"""
TEXT = """
[[port]]
base = "{base}"
era = "unified"
markers = [{{ file = "{file}", has = "{has}" }}]
"""


class SeriesSandbox:
    """A store, releases and a series directory that tests fill step by step."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.releases: dict[str, Release] = {}
        self.files: dict[str, Files] = {}
        self.order: list[str] = []
        folder.mkdir(parents=True)

    def add_release(self, name: str, files: Files, date: str = "2025-01-01") -> Release:
        """Put a release into the store and remember it by name."""
        self.releases[name] = release(self.store, name, files, date)
        self.files[name] = files
        return self.releases[name]

    def add_patch(
        self,
        id: str,
        texts: Mapping[str, tuple[Files, Files]],
        *,
        requires: tuple[str, ...] = (),
        releases: str = "",
        shared: tuple[str, ...] = (),
        marker: tuple[str, str] = ("src/a.cpp", "line 1"),
        target: str = "library",
    ) -> None:
        """Write a patch: for each base the files before and after.

        Files of ``shared`` are stored once, so they must be equal for all bases.
        """
        place = self.folder / id
        place.mkdir()
        listed = f"{list(requires)}".replace("'", '"')
        kept = f"shared = {list(shared)}\n".replace("'", '"') if shared else ""
        kept += f'target = "{target}"\n' if target != "library" else ""
        toml = TOML.format(id=id, releases=releases, requires=listed, shared=kept)
        for base in texts:
            toml += TEXT.format(base=base, file=marker[0], has=marker[1])
        (place / "patch.toml").write_text(toml, encoding="utf-8")
        for base, (old, new) in texts.items():
            patch = hunks.parse(diff(old, new))
            data, contents = shared_files.separate(patch, shared)
            (place / f"{base}.patch").write_bytes(data)
            fill(self.folder / shared_files.FOLDER, contents)
        self.order.append(id)
        listed = "".join(f'  "{name}",\n' for name in self.order)
        (self.folder / "series.toml").write_text(
            f"schema = 1\norder = [\n{listed}]\n", encoding="utf-8"
        )

    def file(self, id: str, base: str) -> Path:
        """Return the file of a port's hooks."""
        return self.folder / id / f"{base}.patch"

    def text(self, id: str, base: str) -> Port:
        """Return a port as it is composed of message, hooks and shared files."""
        return series.load(self.folder).definition(id).port(base)

    def mail(self, id: str, base: str) -> bytes:
        """Return a port as one whole patch."""
        return self.text(id, base).patch.data
