"""Fetch a release: from an index on loopback, and from a git URL."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pyllamakv.source import fetch, lockfile
from pyllamakv.source.store import open_store
from qa.faults.step import GIT_LEAVES, FaultTarget
from qa.faults.steps import tiny_upstream

_VERSION: Final = "9.0.1"


def _held(store: Any) -> dict[str, Any]:
    """Return the results of a fetch: refs, the lock, and every file's content."""
    refs = store.refs("refs")
    content = {
        name: [(entry.path, entry.mode, entry.blob) for entry in store.entries(commit)]
        for name, commit in refs.items()
    }
    known = [asdict(release) for release in lockfile.load(lockfile.added())]
    return {"refs": refs, "content": content, "lock": known}


class FetchIndex(FaultTarget):
    """Add a version from a package index: find, download, verify, import, add to the lock."""

    name = "fetch from an index"
    plain = False
    # Downloaded parts of an archive are kept, so that the next attempt resumes.
    allowed_leftovers = (*GIT_LEAVES, r"home/downloads/.*\.part")
    _server: subprocess.Popen[bytes] | None = None

    def prepare(self, folder: Path) -> None:
        """Serve an index of one sdist."""
        site = folder.parent / "site"
        tiny_upstream.repository(site / "upstream", tiny_upstream.TREE)
        made = tiny_upstream.sdist(site, _VERSION, site / "upstream", plain=self.plain)
        files = site / "served" / "files"
        files.mkdir(parents=True)
        shutil.copy(made, files)
        page = site / "served" / "simple" / "llama-cpp-python"
        page.mkdir(parents=True)
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        link = f'<a href="/files/{made.name}#sha256={digest}">{made.name}</a>'
        (page / "index.html").write_text(f"<html><body>{link}</body></html>", encoding="utf-8")
        self._log = (site / "log").open("w+", encoding="utf-8")
        self._server = subprocess.Popen(
            [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
            cwd=site / "served",
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        while "port " not in (text := (site / "log").read_text(encoding="utf-8")):
            time.sleep(0.02)
        port = text.partition("port ")[2].split()[0]
        for name in [n for n in os.environ if n.startswith("PIP_")]:
            del os.environ[name]
        os.environ["PIP_CONFIG_FILE"] = os.devnull
        os.environ["PIP_INDEX_URL"] = f"http://127.0.0.1:{port}/simple"
        os.environ["NO_PROXY"] = "127.0.0.1"

    def run(self, folder: Path) -> Any:
        """Add the version."""
        fetch.add(_VERSION)
        return _held(open_store())

    def close(self) -> None:
        """End the server, if it was started."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._log.close()


class FetchPlain(FetchIndex):
    """Add a version whose sdist contains files without a clone."""

    name = "fetch files without a clone"
    plain = True


class FetchGit(FaultTarget):
    """Add a branch of a git URL."""

    name = "fetch from git"
    allowed_leftovers = GIT_LEAVES

    def prepare(self, folder: Path) -> None:
        """Create the repository."""
        self._url = folder.parent / "upstream"
        tiny_upstream.repository(self._url, tiny_upstream.TREE)

    def run(self, folder: Path) -> Any:
        """Add the branch."""
        fetch.add(f"git:file://{self._url}@main")
        return _held(open_store())
