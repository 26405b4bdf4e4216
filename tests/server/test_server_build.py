"""Test builds of a server: beside its variant, found again, and refused on errors."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from building_kit import CMAKE, NINJA, BuildSandbox
from cpp_kit import compiler
from patching_kit import SeriesSandbox

from pyllamakv.building import build, cmake, variant
from pyllamakv.errors import BuildError, CommandFailed, Unsupported
from pyllamakv.server import server_artifact, server_patches
from pyllamakv.server.server_build import build_server
from pyllamakv.server.server_patches import ServerSources
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

#: Makes the server if it is requested, else the output of `NINJA`.
SERVER_NINJA = (
    r"""
case "$*" in
*llama-server)
    cd "$2"
    echo '{"page": false}' >server.json
    cat "$(cat tree)/src/llama.cpp" >llama-server
    chmod +x llama-server
    exit 0 ;;
esac
"""
    + NINJA
)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSandbox:
    """Return a build environment with a release that has a server."""
    made = BuildSandbox(tmp_path, monkeypatch)
    made.use("cmake", f"variant=server\n{CMAKE}")
    made.use("ninja", SERVER_NINJA)
    place = made.tree / "tools" / "server"
    place.mkdir(parents=True)
    (place / "CMakeLists.txt").touch()
    return made


def test_a_server_is_built_beside_its_variant(shop: BuildSandbox) -> None:
    """It has a manifest; the variant and its id do not change."""
    library = build.build(shop.spec)
    found = build_server(shop.spec)
    assert found.folder.parent == shop.home / "servers"
    assert found.variant == library
    assert found.id == found.manifest.server
    assert found.id.startswith(f"{library.id}-")
    assert found.manifest.variant == library.id
    assert not found.manifest.page
    assert found.program.read_text("utf-8") == "// stock\n"
    assert shop.built() == [library.id]
    folders = {path.name for path in (shop.home / "objects").glob("*-server")}
    assert len(folders) == 1


@pytest.mark.slow
def test_the_manifest_has_the_patches_of_the_server(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those that were chosen."""
    choose = server_patches.choose

    def chosen(*args: Any, **options: Any) -> ServerSources:
        found = choose(*args, **options)
        return ServerSources(found.tree, ("show",), {"other": "no port"}, {"show": "0.3.8"})

    monkeypatch.setattr(server_patches, "choose", chosen)
    found = build_server(shop.spec).manifest
    assert found.server_patches == ("show",)
    assert found.left_out == {"other": "no port"}
    assert found.carried == {"show": "0.3.8"}


@pytest.mark.slow
def test_second_server_build_runs_no_compiler(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by the id of the variant, without a lock that another build holds."""
    first = build_server(shop.spec)
    ran = shop.count("ninja")
    monkeypatch.setattr(build, "locked_sources", None)
    assert build_server(shop.spec) == first == server_artifact.find_server(shop.spec)
    assert shop.count("ninja") == ran == 2


@pytest.mark.slow
def test_the_libraries_are_those_of_the_variant(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CMake gets their directory, the tree, and the same compilers, but no option of ggml."""
    given: list[dict[str, str]] = []
    usual = build.cmake.configure

    def configure(job: object, source: Path, definitions: dict[str, str]) -> None:
        given.append(definitions)
        usual(job, source, definitions)

    monkeypatch.setattr(build.cmake, "configure", configure)
    found = build_server(shop.spec)
    library, server = given
    assert server["PLK_LIBRARIES"] == str(found.variant.dropin)
    assert server["PLK_RPATH"] == f"../../built/{found.variant.id}/lib"
    assert (found.folder / server["PLK_RPATH"]).resolve() == found.variant.dropin
    for name in ("PLK_LLAMA_SRC", "CMAKE_C_COMPILER", "CMAKE_CXX_FLAGS", "CMAKE_BUILD_TYPE"):
        assert server[name] == library[name]
    assert not any(name.startswith("GGML_") for name in server)


@pytest.mark.slow
def test_server_of_another_series_contains_its_patches(shop: BuildSandbox, tmp_path: Path) -> None:
    """Its patches of the libraries and of the server are in it; a second build runs nothing."""
    stock = {"src/llama.cpp": b"// stock\n"}
    page = {"tools/server/page.txt": b"page\n"}
    queue = SeriesSandbox(open_store(), tmp_path / "queue")
    marker = ("src/llama.cpp", "// stock")
    fixed = {"src/llama.cpp": b"// stock\n// fixed\n"}
    queue.add_patch("fix", {"0.3.9": (stock, fixed)}, marker=marker)
    queue.add_patch("page", {"0.3.9": ({}, page)}, marker=marker, target="server")
    spec = shop.spec.replace("+stock", "+patched")
    found = build_server(spec, patches=str(queue.folder))
    assert found.program.read_text("utf-8") == "// stock\n// fixed\n"
    assert found.variant.manifest.patches == ("fix",)
    assert found.manifest.server_patches == ("page",)
    ran = shop.count("ninja")
    assert build_server(spec, patches=str(queue.folder)).id == found.id
    assert shop.count("ninja") == ran


@pytest.mark.slow
def test_series_of_server_patches_links_stock_libraries(shop: BuildSandbox, tmp_path: Path) -> None:
    """Its server is linked with the libraries of stock, and differs from stock's."""
    queue = SeriesSandbox(open_store(), tmp_path / "queue")
    page = {"tools/server/page.txt": b"page\n"}
    marker = ("src/llama.cpp", "// stock")
    queue.add_patch("page", {"0.3.9": ({}, page)}, marker=marker, target="server")
    spec = shop.spec.replace("+stock", "+patched")
    found = build_server(spec, patches=str(queue.folder))
    assert found.manifest.server_patches == ("page",)
    assert found.variant.manifest.stock
    assert found.id != build_server(shop.spec, patches=str(queue.folder)).id


def test_release_without_llama_server_is_refused(shop: BuildSandbox) -> None:
    """It is before anything is compiled, also if its variant is built."""
    (shop.tree / "tools" / "server" / "CMakeLists.txt").unlink()
    with pytest.raises(Unsupported, match="contains no llama-server"):
        build_server(shop.spec)
    assert shop.count("cmake") == 0
    build.build(shop.spec)
    with pytest.raises(Unsupported, match="contains no llama-server"):
        build_server(shop.spec)
    assert not (shop.home / "servers").exists()


@pytest.mark.slow
def test_the_server_of_old_releases_is_an_example(shop: BuildSandbox) -> None:
    """Through 0.3.8 it is built from there."""
    (shop.tree / "tools").rename(shop.tree / "examples")
    assert build_server(shop.spec).program.is_file()


@pytest.mark.slow
def test_a_failed_build_publishes_nothing(shop: BuildSandbox) -> None:
    """Check a compile error and a missing program."""
    build.build(shop.spec)
    shop.use("ninja", "echo 'server.cpp:1:1: error: broken'; exit 1\n")
    with pytest.raises(CommandFailed, match="broken"):
        build_server(shop.spec)
    shop.use("ninja", "exit 0\n")
    with pytest.raises(BuildError, match="expected llama-server"):
        build_server(shop.spec)
    assert variant.find(shop.spec) is not None
    assert not list((shop.home / "servers").glob("*"))


@pytest.mark.slow
def test_the_project_compiles_an_example_that_includes_files_of_the_tree(tmp_path: Path) -> None:
    """Servers through 0.3.8 do; upstream's project finds them only as the top project."""
    files = {
        "tree/CMakeLists.txt": "add_library(llama STATIC llama.cpp)\n"
        "add_subdirectory(examples/server)\n",
        "tree/examples/server/CMakeLists.txt": "add_executable(llama-server server.cpp)\n"
        "target_include_directories(llama-server PRIVATE ${CMAKE_SOURCE_DIR})\n"
        "target_link_libraries(llama-server PRIVATE llama ggml)\n",
        "tree/examples/server/server.cpp": '#include "common/name.hpp"\nint main() { name(); }\n',
        "tree/common/name.hpp": "void name();\n",
        "library.cpp": "void name() {}\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    (tmp_path / "lib").mkdir()
    library = [compiler(), "-shared", "-fPIC", tmp_path / "library.cpp"]
    subprocess.run([*library, "-o", tmp_path / "lib" / "libggml.so"], check=True)
    job = cmake.BuildSession(tmp_path / "build", tmp_path / "build.log", cmake.environment())
    definitions = {
        "PLK_LLAMA_SRC": str(tmp_path / "tree"),
        "PLK_LIBRARIES": str(tmp_path / "lib"),
        "PLK_RPATH": "../lib",
    }
    cmake.configure(job, server_artifact.project(), definitions)
    cmake.compile_targets(job, (server_artifact.PROGRAM,), 1)
    subprocess.run([tmp_path / "build" / server_artifact.PROGRAM], check=True)
