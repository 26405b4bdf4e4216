"""Apply a patch and write the tree; rebase a patch onto another release."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from pyllamakv.patching import apply, rebase, rebase_session, series
from pyllamakv.patching.definition import Port
from pyllamakv.source import git_command, spec_resolver, vendor
from pyllamakv.source.store import open_store
from qa.faults.step import GIT_LEAVES, FaultTarget
from qa.faults.steps import tiny_upstream

_OLD: Final = "9.0.1"
_NEW: Final = "9.0.2"


def _lines(**changed: str) -> bytes:
    return "".join(changed.get(f"l{n}", f"line {n}") + "\n" for n in range(1, 61)).encode()


_BEFORE: Final = tiny_upstream.TREE | {"src/a.cpp": _lines()}
_AFTER: Final = _BEFORE | {"src/a.cpp": _lines(l10="x", l40="y"), "src/new.cpp": b"int new;\n"}
#: A change that strict apply refuses and git merges.
_NEAR: Final = _BEFORE | {"src/a.cpp": _lines(l13="upstream", l30="up")}


def _patch(scratch: Path) -> bytes:
    """Create the patch with git."""
    tiny_upstream.repository(scratch, _BEFORE)
    for name in ("src/a.cpp", "src/new.cpp"):
        (scratch / name).write_bytes(_AFTER[name])
    git_command.git(scratch, "add", "-A", "-f")
    return git_command.git_bytes(scratch, "diff", "--cached", "--full-index", "--no-renames")


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Apply(FaultTarget):
    """Apply a patch to a release and write the patched tree."""

    name = "apply and vendor"
    allowed_leftovers = GIT_LEAVES

    def prepare(self, folder: Path) -> None:
        """Create a data directory with the release, at its final path."""
        data = _patch(folder.parent / "scratch")
        (folder / "one.patch").write_bytes(data)
        _released(folder)

    def run(self, folder: Path) -> Any:
        """Apply, and sync the tree."""
        text = Port.from_file(folder / "one.patch", "one")
        release = spec_resolver.resolve(_OLD)
        done = apply.apply(release, [text])
        spec = f"{_OLD}+one"
        store = open_store()
        vendored, _ = vendor.sync(store, release, done.commit, spec=spec, series=("one",))
        difference = vendor.verify(store, vendor.find(spec))
        files = _hashes(Path(vendored.folder))
        return [done.commit, done.tree, str(difference), files, store.refs("refs")]


class Rebase(FaultTarget):
    """Rebase a patch onto a release whose context lines changed."""

    name = "rebase"
    allowed_leftovers = GIT_LEAVES

    def prepare(self, folder: Path) -> None:
        """Create two releases, and a series of one patch for the older."""
        one = folder / "patches" / "one"
        one.mkdir(parents=True)
        listed = 'schema = 1\norder = [\n  "one",\n]\n'
        (folder / "patches" / "series.toml").write_text(listed, encoding="utf-8")
        facts = {
            "id": "one",
            "title": "Do one thing",
            "why": "Because it is needed.",
            "origin": "own work",
            "upstream": "not submitted",
            "releases": "",
        }
        lines = ["schema = 1", *(f'{key} = "{value}"' for key, value in facts.items())]
        lines += ["requires = []", 'scenarios = ["some-scenario"]', "", "[[port]]"]
        lines += [f'base = "{_OLD}"', 'era = "monolith"']
        lines += ['markers = [{ file = "src/a.cpp", has = "line 1" }]']
        (one / "patch.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (one / f"{_OLD}.patch").write_bytes(_patch(folder.parent / "scratch"))
        _released(folder)

    def run(self, folder: Path) -> Any:
        """Rebase, unless an earlier run did; only the series is compared."""
        patches = folder / "patches"
        store = open_store()
        if rebase_session.ids(store):
            rebase.abort("one", store=store)
        states = [each.state for each in rebase.rebase(["one"], _NEW, patches=patches)]
        assert states in (["clean"], ["applies"]), states
        done = apply.apply(spec_resolver.resolve(_NEW), ["one"], series=series.load(patches))
        return [done.tree, _hashes(patches)]


def _released(folder: Path) -> None:
    """Add both releases to a data directory in the folder."""
    with tiny_upstream.at_home(folder / "home"):
        tiny_upstream.release(_OLD, _BEFORE, "2025-01-01")
        tiny_upstream.release(_NEW, _NEAR, "2025-01-02")
