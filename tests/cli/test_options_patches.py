"""Test that verbs with ``--patches`` resolve the git commits that a series pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import typer
from patching_kit import SeriesSandbox, code, repository

from pyllamakv.building import variant
from pyllamakv.cli import lazy_group, main
from pyllamakv.errors import BuildError, UnknownRelease
from pyllamakv.server import server_check
from pyllamakv.server.server_build import build_server
from pyllamakv.source import lockfile, spec_resolver
from pyllamakv.source.store import open_store
from pyllamakv.verification import result_cache
from pyllamakv.verification.cell import CellSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyllamakv.source.releases import Release

OLD = {
    "include/llama.h": b"// llama.cpp\n",
    "tools/server/CMakeLists.txt": b"# a server\n",
    "src/one.cpp": code("one"),
}
NEW = OLD | {"src/one.cpp": code("one", "fix(a);")}
#: The verbs with a release, with their further arguments.
VERBS = {
    "matrix bisect": ("{name}", "{name}"),
    "build": ("{name}",),
    "build --server": ("{name}",),
    "check": ("{name}",),
    "check --server": ("{name}",),
    "matrix plan": ("{name}",),
    "matrix run": ("{name}",),
    "matrix accept": ("{name}",),
    "matrix report": ("{name}", "--json"),
    "matrix show": ("{name}",),
    "matrix watch": ("{name}", "--branch", ""),
    "patch accept": ("{name}",),
    "patch apply": ("{name}",),
    "patch drift": ("{name}",),
    "patch export": ("mine", "--base", "{name}", "--check"),
    "patch export-series": ("{name}",),
    "patch newest": ("{name}", "--apply-only"),
    "patch obsolete": ("{name}",),
    "patch rebase": ("mine", "--onto", "{name}"),
    "patch status": ("{name}", "--json"),
}
#: The verbs without a release.
OTHERS = {"patch diff", "patch lint", "patch show"}


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Return a commit that only the lock of a series pins; the series is in ``queue``."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lockfile, "shipped", lambda: tmp_path / "none.lock.toml")
    upstream = repository(tmp_path / "llama.cpp", OLD)
    release = spec_resolver.fetch_git(f"git:{upstream}@main")
    queue = SeriesSandbox(open_store(), tmp_path / "queue")
    queue.add_patch("mine", {release.key: (OLD, NEW)}, marker=("src/one.cpp", "one_1"))
    lockfile.pin(queue.folder, release)
    (found,) = lockfile.pins(queue.folder / lockfile.SERIES_LOCK).values()
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Replace builds; return the commit of each requested one, and whether it is stock."""
    found: list[tuple[str, bool]] = []

    def request_of(release: Release, spec: variant.Spec, **_: Any) -> None:
        found.append((release.commit, spec.series == ()))
        raise BuildError("nothing is built here")

    monkeypatch.setattr(variant, "request_of", request_of)
    return found


@pytest.mark.slow
def test_verb_with_patches_knows_the_pins_of_the_series(
    pinned: Release, requested: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's lock is not changed, so other commands do not know them."""
    for verb, words in VERBS.items():
        requested.clear()
        arguments = [word.format(name=pinned.key) for word in words]
        with pytest.raises(SystemExit):
            main.main([*verb.split(), *arguments, "--patches", "queue"])
        text = "".join(capsys.readouterr())
        assert "there is no release" not in text, verb
        assert (pinned.commit, True) in requested or pinned.key in text or pinned.name in text, verb
        assert not lockfile.added().exists(), verb
    with pytest.raises(UnknownRelease):
        spec_resolver.resolve(pinned.key)


def test_builds_and_checks_resolve_the_pins_of_the_series(
    pinned: Release, requested: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock, patched and both servers are requested for it; its cell has a key."""
    from pyllamakv.building.build import build_series

    for names in ((), None):
        for build in (
            lambda names=names: build_series(pinned.key, names, "queue"),
            lambda names=names: build_server(variant.Spec(pinned.key, names), patches="queue"),
        ):
            with pytest.raises(BuildError, match="nothing is built"):
                build()
    # Patches have no spec: their request is that of a series.
    assert [commit for commit, _ in requested] == [pinned.commit] * 4
    monkeypatch.setattr(server_check, "build_server", lambda *_, **__: None)
    monkeypatch.setattr(server_check, "_cannot_run", lambda _: "")
    applied: list[Release] = []

    def apply(release: Release, *_: Any, **__: Any) -> None:
        applied.append(release)
        raise BuildError("nothing is applied here")

    monkeypatch.setattr(server_check.apply, "apply", apply)
    with pytest.raises(BuildError, match="nothing is applied"):
        server_check.check_server(pinned.key, patches="queue", scenarios=["server-slots"])
    assert applied == [pinned]
    assert result_cache.key(CellSpec(pinned.key, patches="queue"), "elsewhere")
    assert result_cache.key(CellSpec(pinned.key), "elsewhere") is None


def test_verbs_with_patches_are_all_listed() -> None:
    """A new verb with ``--patches`` must resolve the commits as well."""
    there = {name.removesuffix(" --server") for name in VERBS} | OTHERS
    assert there == set(_with_patches("", typer.main.get_command(main.app)))


def _with_patches(name: str, command: Any) -> Iterator[str]:
    if any("--patches" in one.opts for one in command.params):
        yield name
    lazy = getattr(command, "modules", {})
    for word, below in getattr(command, "commands", {}).items():
        loaded = lazy_group.load(lazy[word][0]) if word in lazy else below
        yield from _with_patches(f"{name} {word}".strip(), loaded)
