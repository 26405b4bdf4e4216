"""Generated upstreams, archives and indexes for tests of the source layer."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import math
import os
import tarfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.source import git_command, lockfile
from pyllamakv.source.releases import Release
from pyllamakv.source.store import open_store
from qa.faults.steps import tiny_upstream
from qa.faults.steps.tiny_upstream import MODULE, clone
from qa.faults.steps.tiny_upstream import fill as fill
from qa.faults.steps.tiny_upstream import pack as pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

    from pyllamakv.source.store import Store

#: What makes a tree look like llama.cpp, of the first era.
TREE = {
    "include/llama.h": b"// the API\n",
    "src/llama.cpp": b"static bool llama_kv_cache_find_slot() { do_defrag; }\n",
    "scripts/run.sh": b"#!/bin/sh\n",
    "docs/crlf.txt": b"one\r\ntwo\r\n",
    ".gitattributes": b"* text=auto eol=lf\n",
}
#: The same with every file that an sdist of xllamacpp must have.
WHOLE_TREE = TREE | {
    "CMakeLists.txt": b"project(llama)\n",
    "src/CMakeLists.txt": b"add_library(llama)\n",
    "common/CMakeLists.txt": b"add_library(common)\n",
    "ggml/CMakeLists.txt": b"project(ggml)\n",
    "ggml/include/ggml.h": b"// ggml\n",
    "ggml/src/CMakeLists.txt": b"add_library(ggml)\n",
}
#: The newest modification time in an sdist of xllamacpp: 2026-10-10T15:29:42Z.
NEWEST = 1_791_646_182


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate data directory, lock and pip configuration; return the data directory."""
    home = folder / "home"
    for name in [n for n in os.environ if n.startswith("PIP_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYLLAMAKV_HOME", str(home))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(lockfile, "shipped", lambda: folder / "shipped.lock.toml")
    monkeypatch.setattr("pyllamakv.source.download._PAUSE", 0.0)
    return home


def repository(folder: Path, files: Mapping[str, bytes] = TREE, *, commits: int = 2) -> str:
    """Make a repository whose last commit has these files; return that commit."""
    return tiny_upstream.repository(folder, files, commits=commits)


def sdist_members(folder: Path, version: str, files: Mapping[str, bytes] = TREE) -> dict[str, Any]:
    """Return the members of an sdist: a shallow clone, and the tree as unpacked."""
    source = folder / f"upstream-{version}"
    repository(source, files)
    top = f"llama_cpp_python-{version}"
    module = clone(folder / f"clone-{version}", source)
    module["hooks/post-checkout"] = b"#!/bin/sh\nexit 1\n"
    members: dict[str, Any] = {f"{top}/{MODULE}/{name}": data for name, data in module.items()}
    members |= {f"{top}/vendor/llama.cpp/{name}": data for name, data in files.items()}
    members[f"{top}/vendor/llama.cpp/.git"] = b"gitdir: ../../.git/modules/vendor/llama.cpp\n"
    members[f"{top}/vendor/llama.cpp/common/build-info.cpp"] = b"int made_by_a_build;\n"
    members[f"{top}/setup.py"] = b"raise SystemExit('nothing of an sdist may run')\n"
    return members


def sdist(folder: Path, version: str, files: Mapping[str, bytes] = TREE) -> Path:
    """Write an sdist of llama-cpp-python with a tiny llama.cpp inside."""
    members = sdist_members(folder / "making", version, files)
    return pack(folder / f"llama_cpp_python-{version}.tar.gz", members)


def xllamacpp_sdist(
    folder: Path,
    version: str,
    files: Mapping[str, bytes] = WHOLE_TREE,
    *,
    newest: float = NEWEST,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write an sdist of xllamacpp; its files in llama.cpp are a second apart, up to ``newest``."""
    top = f"xllamacpp-{version}"
    tree = f"{top}/thirdparty/llama.cpp"
    members: dict[str, Any] = {f"{top}/setup.py": b"raise SystemExit('nothing of it may run')\n"}
    members |= {f"{tree}/{name}": data for name, data in files.items()}
    members[f"{tree}/.git"] = b"gitdir: ../../.git/modules/thirdparty/llama.cpp\n"
    members |= extra or {}
    file = pack(folder / f"{top}.tar.gz", members)
    with tarfile.open(file) as made:
        found = [(info, made.extractfile(info)) for info in made]
        contents = [(info, source.read() if source else b"") for info, source in found]
    with tarfile.open(file, "w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as out:
        for age, (info, data) in enumerate(contents):
            seconds = newest - age if "/thirdparty/" in info.name else newest + 1000
            if math.isfinite(seconds):
                info.mtime = seconds
            else:
                info.pax_headers = {"mtime": str(seconds)}
            out.addfile(info, io.BytesIO(data))
    return file


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """Return a link as a member of an archive."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def pinned(folder: Path, version: str, files: Mapping[str, bytes] = TREE) -> tuple[Release, Path]:
    """Return a release as in a lock, and its archive, with an empty data directory."""
    file = sdist(folder, version, files)
    other = open_store(folder / "making" / f"store-{version}.git")
    source = folder / "making" / f"upstream-{version}"
    git_command.git(other.path, "fetch", "-q", str(source), "HEAD:refs/heads/x", network=True)
    commit = git_command.git(other.path, "rev-parse", "refs/heads/x")
    release = Release(
        name=version,
        kind="sdist",
        commit=commit,
        tree=other.tree_of(commit),
        era="monolith",
        date=other.date(commit),
        archive=file.name,
        sha256=sha256(file),
        package=f"llama-cpp-python=={version}",
    )
    return release, file


def imported(store: Store, name: str, files: Mapping[str, bytes], date: str) -> Release:
    """Add a release to a store without fetching."""
    commit, tree = store.commit(None, files, f"upstream {name}")
    store.update_ref(f"refs/upstream/{name}", commit)
    return Release(name, "sdist", commit, tree, "monolith", date)


class Server:
    """Serve files on loopback; `cut` and `fail` make the next answers bad."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, str | None]] = []
        #: Lengths after which the next answers break off.
        self.cut: list[int] = []
        #: Status of the next answers.
        self.fail: list[int] = []
        self.ranges = True
        #: Content types of paths, where a test needs others than those of a plain server.
        self.types: dict[str, str] = {}
        self.url = ""


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """Run a server for the duration of a test."""
    server = Server(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            server.asked.append((self.path, wanted))
            if server.fail:
                self.send_error(server.fail.pop(0))
                return
            data = server.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            start = int(wanted[6:-1]) if wanted and server.ranges else 0
            if start >= len(data) > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            kind = "text/html" if self.path.endswith("/") else "application/octet-stream"
            self.send_header("Content-Type", server.types.get(self.path, kind))
            self.end_headers()
            body = data[start:]
            if server.cut and kind != "text/html":
                body = body[: server.cut.pop(0)]
                self.close_connection = True
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http_server.server_port}"
    thread = threading.Thread(target=http_server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http_server.shutdown()
        http_server.server_close()


def index_page(server: Server, *files: Path, stated: bool = True, project: str = "") -> str:
    """Make the server a package index that offers these files; return the index's URL.

    The project of a file is the name before its version, unless ``project`` is given.
    """
    pages: dict[str, list[str]] = {project or "llama-cpp-python": []}
    for file in files:
        server.files[f"/files/{file.name}"] = file.read_bytes()
        mark = f"#sha256={sha256(file)}" if stated else ""
        name = project or file.name.rpartition("-")[0].replace("_", "-")
        anchor = f'<a href="/files/{file.name}{mark}">{file.name}</a>'
        pages.setdefault(name, []).append(anchor)
    for name, anchors in pages.items():
        page = "<html><body>" + "".join(anchors) + "</body></html>"
        server.files[f"/simple/{name}/"] = page.encode()
    return server.url + "/simple"


def json_index(server: Server, *files: Path, dates: Mapping[str, str]) -> str:
    """Make the server a JSON index with dates of upload by file name; return the index's URL."""
    index_page(server, *files)
    pages: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        facts = {"filename": file.name, "url": f"/files/{file.name}"}
        entry: dict[str, Any] = facts | {"hashes": {"sha256": sha256(file)}}
        if file.name in dates:
            entry["upload-time"] = dates[file.name]
        pages.setdefault(file.name.rpartition("-")[0].replace("_", "-"), []).append(entry)
    for project, entries in pages.items():
        path = f"/simple/{project}/"
        page = {"meta": {"api-version": "1.1"}, "name": project, "files": entries}
        server.files[path] = json.dumps(page).encode()
        server.types[path] = "application/vnd.pypi.simple.v1+json"
    return server.url + "/simple"


def refs(store: Store) -> dict[str, str]:
    """Return all refs of a store."""
    return store.refs("refs")


def objects(store: Store) -> set[str]:
    """Return the names of all object files of a store."""
    folder = Path(store.path) / "objects"
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
