"""Create tiny upstreams: repositories, sdists with one inside, and releases of them in a store."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pyllamakv.source import era, git_command, lockfile
from pyllamakv.source.releases import Release
from pyllamakv.source.store import open_store

#: Files that identify a tree as llama.cpp.
TREE: Final = {
    "include/llama.h": b"// the API\n",
    "src/llama.cpp": b"static bool llama_kv_cache_find_slot() { do_defrag; }\n",
    "CMakeLists.txt": b"project(llama)\n",
    **{f"src/part-{n}.cpp": b"int part_%d;\n" % n * 40 for n in range(4)},
}
MODULE: Final = ".git/modules/vendor/llama.cpp"


def fill(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below a directory; scripts are executable."""
    for path, data in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o755 if path.endswith(".sh") else 0o644)
    return folder


def repository(folder: Path, files: Mapping[str, bytes], *, commits: int = 2) -> str:
    """Create a repository whose last commit has these files; return that commit."""
    folder.mkdir(parents=True)
    git_command.git(folder, "init", "-q", ".")
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "attributes").write_text("* -text\n")
    for number in range(commits - 1):
        git_command.git(folder, "commit", "-q", "--allow-empty", "-m", f"before {number}")
    fill(folder, files)
    git_command.git(folder, "add", "-A", "-f")
    git_command.git(folder, "commit", "-q", "-m", "state")
    return git_command.git(folder, "rev-parse", "HEAD")


def clone(folder: Path, source: Path) -> dict[str, bytes]:
    """Clone a repository as in an sdist, shallow; return the clone's files."""
    git_command.git(
        source, "clone", "-q", "--bare", "--depth=1", f"file://{source}", str(folder), network=True
    )
    git_command.git(folder, "repack", "-q", "-a", "-d")
    commit = git_command.git(folder, "rev-parse", "HEAD")
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    found = {name: path.read_bytes() for name, path in files.items()}
    return found | {"HEAD": f"{commit}\n".encode()}


def pack(file: Path, members: Mapping[str, Any]) -> Path:
    """Write a gzipped tar; a TarInfo is added unchanged, bytes as a plain file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wb", compresslevel=1) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
                info.mode = 0o755 if name.endswith(".sh") else 0o644
                tar.addfile(info, io.BytesIO(data))
            else:
                tar.addfile(info)
    return file


def sdist(folder: Path, version: str, source: Path, *, plain: bool = False) -> Path:
    """Write an sdist of llama-cpp-python with a shallow clone of a repository inside.

    A ``plain`` one has the files alone.
    """
    top = f"llama_cpp_python-{version}"
    module = {} if plain else clone(folder / f"clone-{version}", source)
    members = {f"{top}/{MODULE}/{name}": data for name, data in module.items()}
    members |= {f"{top}/vendor/llama.cpp/{name}": data for name, data in TREE.items()}
    return pack(folder / f"{top}.tar.gz", members)


@contextlib.contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Use a separate data directory, not the step's."""
    before = os.environ["PYLLAMAKV_HOME"]
    os.environ["PYLLAMAKV_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ["PYLLAMAKV_HOME"] = before


def release(name: str, files: Mapping[str, bytes], date: str) -> Release:
    """Add a release to the store and the lock of the data directory."""
    store = open_store()
    commit, tree = store.commit(None, dict(files), f"release {name}")
    store.update_ref(f"refs/upstream/{name}", commit)
    found = Release(name, "sdist", commit, tree, era.detect(store, tree), f"{date}T00:00:00Z")
    lockfile.save(lockfile.added(), [found])
    return found
