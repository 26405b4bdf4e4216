"""Test the verbs `build` and `dropin env`: builds, output and refused options."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from building_kit import BuildSandbox
from typer.testing import CliRunner

from pyllamakv.building import build as builds
from pyllamakv.building import dropin, llama_cpp_python_env
from pyllamakv.building.variant import Variant, parse
from pyllamakv.cli import build
from pyllamakv.cli import dropin as dropin_verb
from pyllamakv.errors import NotBuilt, UnknownPatch, UsageError
from pyllamakv.server import server_build
from pyllamakv.server.server_artifact import BuiltServer, ServerManifest
from pyllamakv.source import lockfile, verified

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSandbox:
    """Return a build environment with fakes for every program."""
    return BuildSandbox(tmp_path, monkeypatch)


def invoke(app: Any, *words: str) -> str:
    """Run a verb, raise its errors, and return its stdout."""
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_build_prints_id_folder_and_capabilities(shop: BuildSandbox) -> None:
    """The output has the id and the directory, and the missing capabilities."""
    output = invoke(build.app, f"path:{shop.tree}", "--stock")
    (name,) = shop.built()
    assert name in output
    assert str(shop.home / "built" / name) in output
    assert "none (stock)" in output
    assert "load" in output
    assert "absent        defrag" in output


def test_build_json_contains_the_manifest(shop: BuildSandbox) -> None:
    """The JSON contains the manifest, and stdout nothing else."""
    (row,) = json.loads(invoke(build.app, shop.spec, "--json"))
    assert row["spec"] == shop.spec
    assert row["manifest"]["variant"] == row["id"] == shop.built()[0]


@pytest.mark.slow
def test_list_names_origins(shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without JSON; nothing is built, and options of a build are refused."""
    assert invoke(build.app, "--list") == ""
    assert json.loads(invoke(build.app, "--list", "--json")) == []
    made = builds.build(shop.spec)
    calls = shop.count("ninja")
    assert invoke(build.app, "--list") == f"{made.id}  tuned     data directory\n"
    (row,) = json.loads(invoke(build.app, "--list", "--json"))
    assert (row["id"], row["origin"]) == (made.id, "data directory")
    assert row["manifest"]["variant"] == made.id
    monkeypatch.setattr(Variant, "origin", "pyllamakv-prebuilt")
    assert invoke(build.app, "--list").endswith("  pyllamakv-prebuilt\n")
    for words in (["0.3.9"], ["--stock"], ["--portable"], ["--server"], ["--backend", "cuda"]):
        with pytest.raises(UsageError, match="--list has no other option than --json"):
            invoke(build.app, "--list", *words)
    assert shop.count("ninja") == calls


def test_build_makes_stock_and_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option both are built, stock first, so that patched compiles only differences."""
    asked: list[str] = []

    class Standing:
        """Replace a variant whose content is not read."""

    def built(spec: object, **_options: object) -> Standing:
        asked.append(str(spec))
        return Standing()

    monkeypatch.setattr(builds, "build", built)
    monkeypatch.setattr(build, "_text", lambda *_facts: "")
    invoke(build.app, "0.3.9")
    invoke(build.app, "0.3.9", "--series", "full-defrag,kv-counters")
    assert asked == [
        "0.3.9+stock",
        "0.3.9+patched",
        "0.3.9+full-defrag,kv-counters",
    ]


def test_env_and_dropin_default_to_the_newest_verified_release(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dropin env` and `dropin setup` use the newest release of llama-cpp-python."""
    monkeypatch.setattr(builds, "build", lambda spec, **_options: str(spec))
    monkeypatch.setattr(builds, "check_series", lambda *_arguments, **_options: None)  # fetches
    monkeypatch.setattr(build, "_text", lambda spec, _variant, _server: [str(spec)])
    known = lockfile.known()
    monkeypatch.setattr(
        verified, "releases", lambda kind=None: [known["0.3.36" if kind == "sdist" else "b11549"]]
    )
    assert invoke(build.app) == "b11549+stock\nb11549+patched\n"
    with pytest.raises(NotBuilt, match=r"pyllamakv build 0\.3\.36$"):
        invoke(dropin_verb.app, "env")
    monkeypatch.setattr(
        llama_cpp_python_env, "install", lambda release, **_: SimpleNamespace(python=release.name)
    )
    assert invoke(dropin_verb.app, "setup") == "0.3.36\n"


@pytest.mark.slow
def test_build_with_servers_prints_the_path_of_each(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of each server is printed, and its manifest is in the JSON."""
    asked: list[str] = []

    def build_server(spec: object, **_options: object) -> BuiltServer:
        asked.append(str(spec))
        made = BuiltServer(shop.home / "servers" / "x", builds.build(shop.spec))
        made.folder.mkdir(parents=True, exist_ok=True)
        ServerManifest("x", "y", "0.3.9", (), "cpu", False, "0", "2026", 1.0).save(made.folder)
        return made

    monkeypatch.setattr(server_build, "build_server", build_server)
    output = invoke(build.app, shop.spec, "--server")
    assert f"  server        {shop.home}/servers/x/llama-server (without web page)" in output
    (row,) = json.loads(invoke(build.app, shop.spec, "--server", "--json"))
    assert row["server"]["page"] is False
    assert asked == [shop.spec, shop.spec]
    assert "llama-server" not in invoke(build.app, shop.spec)


def test_build_names_carried_patches() -> None:
    """They have the base of the port that was merged."""
    manifest = SimpleNamespace(
        patches=("compaction",),
        carried={"compaction": "0.3.30"},
        devices=(),
        capabilities=(),
        probes={},
    )
    made = SimpleNamespace(id="x", folder="y", manifest=manifest)
    server = SimpleNamespace(
        program="z",
        manifest=SimpleNamespace(
            page=True, server_patches=("show",), left_out={}, carried={"show": "0.3.17"}
        ),
    )
    lines = build._text(parse("0.3.36+patched"), made, server)
    assert "  carried       compaction from port 0.3.30" in lines
    assert lines[-2:] == ["  its patches   show", "  carried       show from port 0.3.17"]


@pytest.mark.parametrize(
    "words",
    [
        ("0.3.9", "--stock", "--series", "a"),
        ("0.3.9+stock", "--stock"),
        ("0.3.9", "--series", "a,,b"),
        ("0.3.9", "--stock", "--backend", "abacus"),
    ],
)
def test_contradictory_build_options_are_refused(
    shop: BuildSandbox, words: tuple[str, ...]
) -> None:
    """Contradictory options are refused before anything is done."""
    with pytest.raises(UsageError):
        invoke(build.app, *words)
    assert shop.count("cmake") == 0


def test_env_of_an_unbuilt_variant_names_the_build_command(shop: BuildSandbox) -> None:
    """The error has the command that builds it."""
    with pytest.raises(NotBuilt, match="pyllamakv build path:"):
        invoke(dropin_verb.app, "env", shop.spec)


def test_env_prints_only_the_export_line(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdout has only the line for the shell; the JSON has the package as well."""
    invoke(build.app, shop.spec)
    described = dropin.DropIn("LLAMA_CPP_LIB_PATH", "/x/lib", "llama-cpp-python==0.3.9")
    monkeypatch.setattr(dropin, "describe", lambda _variant: described)
    assert invoke(dropin_verb.app, "env", shop.spec) == "export LLAMA_CPP_LIB_PATH='/x/lib'\n"
    assert json.loads(invoke(dropin_verb.app, "env", shop.spec, "--json")) == {
        "variable": "LLAMA_CPP_LIB_PATH",
        "value": "/x/lib",
        "package": "llama-cpp-python==0.3.9",
        "variant": shop.built()[0],
    }


@pytest.mark.parametrize("words", [("0.3.9+typo",), ("0.3.9", "--series", "typo")])
def test_an_unknown_patch_is_refused_before_anything_else(
    shop: BuildSandbox, words: tuple[str, ...]
) -> None:
    """Nothing is fetched, and no lock is taken, which another build may hold for a long time."""
    with pytest.raises(UnknownPatch, match="typo"):
        invoke(build.app, *words)
    assert not (shop.home / "locks").exists() and not (shop.home / "downloads").exists()
    assert shop.count("cmake") == 0
