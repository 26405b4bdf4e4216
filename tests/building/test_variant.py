"""Test specs of variants, ids, and the search for built variants."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from building_kit import BuildSandbox, manifest
from hypothesis import given
from hypothesis import strategies as st

from pyllamakv.building import variant
from pyllamakv.building.backend import Backend
from pyllamakv.building.compiler import Compiler
from pyllamakv.errors import UnknownPatch, UsageError
from pyllamakv.source.releases import Release

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RELEASE = Release("0.3.9", "sdist", "c" * 40, "a" * 40, "unified", "2025-05-08T00:00:00Z")
COMPILER = Compiler("/bin/gcc", "/bin/g++", "gcc 1.2.3", "x86_64", ("avx2", "fma"))


def request(**changed: object) -> variant.BuildRequest:
    """Return a request with the named fields changed."""
    values: dict[str, object] = {
        "spec": variant.Spec("0.3.9", ()),
        "release": RELEASE,
        "backend": Backend("cpu", {"GGML_RPC": "ON"}),
        "compiler": COMPILER,
        "native": True,
        **changed,
    }
    return variant.BuildRequest(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "release", "series"),
    [
        ("0.3.9", "0.3.9", ()),
        ("0.3.9+stock", "0.3.9", ()),
        ("0.3.9+patched", "0.3.9", None),
        ("0.3.9+full-defrag", "0.3.9", ("full-defrag",)),
        (" 0.3.9+full-defrag,kv-counters ", "0.3.9", ("full-defrag", "kv-counters")),
        ("b4980+patched", "b4980", None),
        ("git:https://host/x.git@v1+patched", "git:https://host/x.git@v1", None),
        ("git:ssh+git://host/X@main", "git:ssh+git://host/X@main", ()),
        ("path:/some/C++/llama", "path:/some/C++/llama", ()),
        ("path:/some/C++/llama+stock", "path:/some/C++/llama", ()),
    ],
)
def test_spec_is_split_into_release_and_series(
    text: str, release: str, series: tuple[str, ...] | None
) -> None:
    """A spec is a release, and a series after the last plus."""
    assert variant.parse(text) == variant.Spec(release, series)


@pytest.mark.parametrize(
    "text",
    ["", "+stock", "0.3.9+", "0.3.9+a,,b", "0.3.9+a,a", "0.3.9+stock,a", "0.3.9+a b", "0.3.9+A"],
)
def test_malformed_spec_is_refused(text: str) -> None:
    """A malformed spec is refused before anything is looked up."""
    with pytest.raises(UsageError):
        variant.parse(text)


names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,12}", fullmatch=True).filter(
    lambda name: name not in {"stock", "patched"}
)


@given(st.none() | st.lists(names, unique=True, max_size=4).map(tuple))
def test_printed_spec_parses_to_the_same_spec(series: tuple[str, ...] | None) -> None:
    """Printing and parsing a spec gives the same spec."""
    spec = variant.Spec("0.3.9", series)
    assert variant.parse(str(spec)) == spec


def test_id_is_deterministic_and_names_stock_or_patched() -> None:
    """Equal inputs have equal ids, and the ids of stock and patched contain the series."""
    assert request().variant_id("a" * 40) == request().variant_id("a" * 40)
    assert request().variant_id("a" * 40).startswith("0.3.9-stock-cpu-")
    assert request().variant_id("b" * 40).startswith("0.3.9-patched-cpu-")


@pytest.mark.parametrize(
    "changed",
    [
        {"backend": Backend("cpu", {"GGML_RPC": "OFF"})},
        {"compiler": dataclasses.replace(COMPILER, version="gcc 9")},
        {"compiler": dataclasses.replace(COMPILER, native_flags=("avx2",))},
        {"native": False},
        {"release": dataclasses.replace(RELEASE, commit="d" * 40)},
    ],
)
def test_id_changes_with_options_compiler_flags_and_release(changed: dict[str, object]) -> None:
    """Options, compiler version, CPU flags and the release change the id."""
    assert request(**changed).variant_id("a" * 40) != request().variant_id("a" * 40)
    assert request(**changed).objects != request().objects


def test_id_ignores_paths_of_tools() -> None:
    """The same compiler at another path has the same id."""
    moved = request(compiler=dataclasses.replace(COMPILER, c="/opt/gcc", cxx="/opt/g++"))
    assert moved.variant_id("a" * 40) == request().variant_id("a" * 40)
    placed = request(backend=Backend("cpu", {"GGML_RPC": "ON"}, {"CUDAToolkit_ROOT": "/x"}))
    assert placed.variant_id("a" * 40) == request().variant_id("a" * 40)


def test_two_specs_of_one_tree_have_one_id() -> None:
    """Two specs of one tree have the same id and the same build directory."""
    named = request(spec=variant.Spec("0.3.9", ("full-defrag",)))
    whole = request(spec=variant.Spec("0.3.9", None))
    assert named.variant_id("b" * 40) == whole.variant_id("b" * 40)
    assert named.objects == whole.objects == request().objects
    assert named.key != whole.key


def test_changed_shim_changes_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed shim has another id, in the same build directory."""
    before, objects = request().variant_id("a" * 40), request().objects
    monkeypatch.setattr(variant, "shim_digest", lambda: "other")
    assert request().variant_id("a" * 40) != before
    assert request().objects == objects


def test_files_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    """The digest depends on names and contents, not on times and compiled Python."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1", encoding="utf-8")
    first = variant.files_digest([tmp_path])
    (tmp_path / "a" / "x.pyc").write_text("2", encoding="utf-8")
    (tmp_path / "a" / "x").touch()
    assert variant.files_digest([tmp_path]) == first
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    assert variant.files_digest([tmp_path]) != first


def test_unbuilt_variant_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that was not built is not found."""
    shop = BuildSandbox(tmp_path, monkeypatch)
    assert variant.find(shop.spec) is None


@pytest.mark.parametrize(
    ("typed", "meant"), [("ful-defrag", "full-defrag"), ("stok", "stock"), ("patchd", "patched")]
)
@pytest.mark.parametrize("search", [variant.find, variant.request])
def test_unknown_patch_in_a_spec_gets_the_closest_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    search: Callable[[str], object],
    typed: str,
    meant: str,
) -> None:
    """An unknown variant is refused with the closest known name."""
    shop = BuildSandbox(tmp_path, monkeypatch)
    release = shop.spec.partition("+")[0]
    with pytest.raises(UnknownPatch, match=rf"did you mean {meant}\?") as caught:
        search(f"{release}+{typed}")
    assert (caught.value.name, caught.value.close) == (typed, (meant,))


def test_finding_a_variant_runs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search runs neither compiler nor cmake, not even the first time."""
    shop = BuildSandbox(tmp_path, monkeypatch)
    variant.find(shop.spec)
    assert not shop.compiler_calls.exists()
    assert shop.count("cmake") == 0


def test_index_entry_of_an_incomplete_variant_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index entry without its library or manifest is ignored."""
    shop = BuildSandbox(tmp_path, monkeypatch)
    wanted = variant.request(shop.spec)
    folder = variant.built() / "some-variant"
    folder.mkdir(parents=True)
    (folder / "libplk.so").touch()
    manifest().save(folder)
    variant.add_to_index(wanted, variant.Variant(folder))
    found = variant.lookup(wanted)
    assert found is not None
    assert found.id == "some-variant"
    assert found.manifest == manifest()
    assert found.library == folder / "libplk.so"
    (folder / "libplk.so").unlink()
    assert variant.lookup(wanted) is None
    (folder / "libplk.so").touch()
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    assert variant.lookup(wanted) is None
