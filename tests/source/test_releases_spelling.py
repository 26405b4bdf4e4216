"""Test that each name of `pyllamakv upstream list` works in every verb that takes a release."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from patching_kit import SeriesSandbox, numbered
from source_kit import isolate

from pyllamakv.building import variant
from pyllamakv.cli import main
from pyllamakv.patching import series
from pyllamakv.patching.definition import Definition
from pyllamakv.source import era, lockfile, vendor
from pyllamakv.source.releases import sdist_version
from pyllamakv.source.spec_resolver import resolve
from pyllamakv.source.store import open_store

OLD = {"include/llama.h": b"// the API\n", "src/a.cpp": numbered(60)}
NEW = OLD | {"src/a.cpp": numbered(60, l10="x")}
NAMES = ("0.4.0", "b4980", "v0.5.0", "b11549")
KINDS = {"b4980": "npm", "v0.5.0": "npm", "b11549": "xllamacpp"}
PACKAGES = {
    "0.4.0": "llama-cpp-python==0.4.0",
    "b4980": "node-llama-cpp@3.7.0",
    "v0.5.0": "node-llama-cpp@3.22.1",
    "b11549": "xllamacpp==2026.10.11549",
}

#: The verbs that take a release, and their exit codes for a release that is not built.
VERBS = {
    "upstream fetch {}": 0,
    "upstream verify {}": 0,
    "upstream sync {}": 0,
    "patch status {}": 0,
    "patch apply {}": 0,
    "patch drift {}": 0,
    "patch obsolete {}": 0,
    "patch export-series {}": 0,
    "patch rebase one --onto {}": 0,
    "matrix plan {}": 0,
    "matrix bisect {} 0.4.1": 125,
    "matrix bisect 0.4.1 {}": 125,
    "build {} --stock": 1,
    "check {} --quick": 125,
    "dropin env {}": 2,
    "rpc serve {}": 2,
    "upstream sync {}+patched": 0,
    "upstream sync {}+one": 0,
    "upstream sync {}+stock": 0,
    "build {}+patched": 1,
    "dropin env {}+stock": 2,
    "rpc serve {}+patched": 2,
}
#: Each of these configures a build.
COSTLY = ("matrix bisect", "build", "check")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a lock and a store with releases of each kind of name, and a patch for them."""
    isolate(tmp_path, monkeypatch)
    bench = SeriesSandbox(open_store(), tmp_path / "patches")
    for day, name in enumerate((*NAMES, "0.4.1"), 1):
        files = OLD | {"README.md": f"llama.cpp of {name}\n".encode()}
        made = bench.add_release(name, files, f"2026-09-{day:02}")
        found = era.detect(bench.store, made.tree)
        facts = {"kind": KINDS.get(name, "sdist"), "package": PACKAGES.get(name), "era": found}
        bench.releases[name] = replace(made, **facts)
        lockfile.save(lockfile.shipped(), [bench.releases[name]])
    bench.add_patch("one", {"0.4.0": (OLD, NEW)})
    loaded = series.load(bench.folder)
    monkeypatch.setattr(series, "load", lambda *_: loaded)
    return bench


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main.main([*words])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_locked_release_name_precedes_its_other_spelling(bench: SeriesSandbox) -> None:
    """`v0.5.0` and `0.5.0` are two releases; `v0.4.0` is `0.4.0` if no release has that name."""
    other = bench.add_release("0.5.0", {"include/llama.h": b"// 0.5.0\n"}, "2026-10-01")
    lockfile.save(lockfile.added(), [other])
    for name in (*NAMES, "0.5.0"):
        assert resolve(name).commit == bench.releases[name].commit
        assert resolve(f" {name} ").name == name
    assert resolve("v0.4.0").name == "0.4.0"
    assert resolve("llama-cpp-python==0.5.0").name == "0.5.0"
    for name, package in PACKAGES.items():
        assert resolve(package).name == name


@pytest.mark.slow
@pytest.mark.parametrize("words", VERBS)
def test_every_verb_accepts_every_listed_release(
    bench: SeriesSandbox, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each verb finds each listed name, and handles all of them alike."""
    _, out, _ = call(capsys, "upstream", "list", "--json")
    listed = [row["name"] for row in json.loads(out)]
    assert set(listed) == {*NAMES, "0.4.1"}
    for name in ["v0.5.0"] if words.startswith(COSTLY) else listed[:-1]:
        code, out, err = call(capsys, *words.format(name).split())
        assert "no release" not in err, (name, err)
        assert (code, name) == (VERBS[words], name), out + err


def test_versions_are_those_of_llama_cpp_python(bench: SeriesSandbox) -> None:
    """Tags of llama.cpp are not versions of llama-cpp-python, so markers select for them."""
    assert sdist_version("v0.5.0") is sdist_version("b4980") is sdist_version("") is None
    assert str(sdist_version("0.5.0")) == "0.5.0"
    limited = Definition("one", "t", "w", "o", "u", releases="<=0.3.8")
    assert [limited.covers_release(name) for name in (*NAMES, "0.3.8")] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_variant_spec_keeps_a_leading_v(bench: SeriesSandbox) -> None:
    """Specs of variants keep the name, and a request has the release of that name."""
    other = bench.add_release("0.5.0", {"include/llama.h": b"// 0.5.0\n"}, "2026-10-01")
    lockfile.save(lockfile.added(), [other])
    for patches in ("", "+stock", "+patched", "+one"):
        assert str(variant.parse(f"v0.5.0{patches}")).startswith("v0.5.0+")
        wanted = variant.request(f"v0.5.0{patches}")
        assert wanted.release.commit == bench.releases["v0.5.0"].commit
        assert wanted.variant_id("0" * 40).startswith("v0.5.0-patched-cpu-")
    assert [variant.release_name(name) for name in (*NAMES, "v0.4.0")] == [*NAMES, "0.4.0"]


@pytest.mark.slow
def test_tree_of_a_release_with_a_leading_v_is_managed_by_name(
    bench: SeriesSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vendored tree of `v0.5.0` is verified and removed by that name, with and without series."""
    for spec in ("v0.5.0", "v0.5.0+patched"):
        assert call(capsys, "upstream", "sync", spec)[0] == 0
        assert call(capsys, "upstream", "status", spec)[0] == 0
        assert vendor.find(spec).release == "v0.5.0"
        assert call(capsys, "upstream", "clean", spec)[0] == 0
