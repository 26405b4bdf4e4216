"""Test builds with fake programs: published files, locks and failures."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from building_kit import NINJA, BuildSandbox, script

from pyllamakv import open_variant
from pyllamakv.building import artifacts, build, cuda, variant
from pyllamakv.building import manifest as manifests
from pyllamakv.errors import BuildError, CommandFailed, DiskFull, NotBuilt, UsageError
from pyllamakv.patching.apply import PatchedRelease
from pyllamakv.source import releases, spec_resolver
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSandbox:
    """Return a build environment with fakes for every program."""
    return BuildSandbox(tmp_path, monkeypatch)


def patched(shop: BuildSandbox, text: bytes) -> tuple[releases.Release, PatchedRelease]:
    """Return the release of the build environment and a patched tree of it."""
    release = spec_resolver.resolve(f"path:{shop.tree}")
    commit, tree = open_store().commit(release.commit, {"src/llama.cpp": text}, "a patch")
    return release, PatchedRelease(release.name, commit, tree, "digest", ("some-patch",))


def test_build_publishes_a_whole_variant(shop: BuildSandbox) -> None:
    """Library, drop-in and manifest are published together, and the manifest is valid."""
    found = build.build(shop.spec)
    manifest = found.manifest
    assert shop.built() == [found.id] == [manifest.variant]
    assert manifest.check_library(found.folder) == found.library
    assert found.library.read_text("utf-8") == f"{found.id}\n// stock\n"
    assert manifest.dropin == ("libllama.so", "libllama.so.0.1")
    assert (found.dropin / "libllama.so").resolve() == found.dropin / "libllama.so.0.1"
    assert manifest.capabilities == ("load",)
    assert manifest.probes == {"defrag": None, "load": "plain"}
    assert manifest.stock
    assert manifest.abi >= 1
    assert manifest.cpu_flags == ("pni",)


def test_second_build_runs_no_compiler_or_cmake(shop: BuildSandbox) -> None:
    """A built variant is found without running a compiler, cmake or ninja."""
    first = build.build(shop.spec)
    asked = shop.compiler_calls.read_text("utf-8")
    assert build.build(shop.spec) == first == variant.find(shop.spec)
    assert (shop.count("cmake"), shop.count("ninja")) == (1, 1)
    assert shop.compiler_calls.read_text("utf-8") == asked


def test_build_options_change_the_variant_id(shop: BuildSandbox) -> None:
    """CMake variables are passed to the build; options are part of the id, paths are not."""
    plain = build.build(shop.spec)
    options, paths = {"PLK_SANITIZE": "address"}, {"CMAKE_PROJECT_plk_INCLUDE": "/a/b.cmake"}
    made = build.build(shop.spec, options=options, paths=paths)
    assert made.id != plain.id
    assert build.build(shop.spec, options=options, paths={}) == made
    assert (shop.count("cmake"), shop.count("ninja")) == (2, 2)
    assert variant.find(shop.spec) == plain
    logs = [path.read_text("utf-8") for path in (shop.home / "objects").glob("*/build.log")]
    assert any("-DCMAKE_PROJECT_plk_INCLUDE=/a/b.cmake" in text for text in logs)
    assert any("-DPLK_SANITIZE=address" in text for text in logs)


def test_variant_without_index_entry_is_not_recompiled(shop: BuildSandbox) -> None:
    """The index is a cache: without it, the variant is found by its content."""
    first = build.build(shop.spec)
    shutil.rmtree(variant.built() / ".index")
    assert build.build(shop.spec) == first
    assert shop.count("ninja") == 1


@pytest.mark.slow
def test_built_variants_are_found_without_a_compiler(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A built variant is found by its spec without a compiler."""
    stock = build.build(shop.spec, native=False)
    release, changed = patched(shop, b"// patched\n")
    other = build.build_patched(release, changed, native=False)
    for series in (None, ("some-patch",)):
        spec = variant.Spec(release.name, series)
        wanted = variant.request_of(release, spec, backend="cpu", native=False)
        variant.add_to_index(wanted, other)
    monkeypatch.setenv("CC", "gone")
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: frozenset())
    every = [((), stock), (None, other), (("some-patch",), other), (("full-defrag",), None)]
    for series, expected in every:
        assert variant.find(variant.Spec(release.name, series)) == expected
    assert variant.find(shop.spec, backend="rpc") == stock
    assert variant.find(shop.spec, native=True) is None


def test_a_cuda_variant_is_found_without_a_gpu(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for a named architecture is found by its spec on a machine without a GPU."""
    toolkit = shop.folder / "cuda"
    script(toolkit / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cublas_v2.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv(cuda.ARCHITECTURE, "90-real")
    made = build.build(shop.spec, backend="cuda", native=False)
    monkeypatch.setenv(cuda.ARCHITECTURE, "")
    script(shop.programs / "nvidia-smi", "exit 9\n")
    monkeypatch.setenv("PATH", f"{shop.programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(manifests, "machine_flags", lambda *_path: frozenset())
    assert open_variant.find_built(shop.spec, backend="cuda") == made.folder
    with pytest.raises(NotBuilt, match="--backend cuda"):
        open_variant.find_built(f"{shop.spec.removesuffix('stock')}patched", backend="cuda")
    with pytest.raises(UsageError, match="abacus"):
        open_variant.find_built(shop.spec, backend="abacus")


def test_patched_after_stock_rewrites_only_what_differs(shop: BuildSandbox) -> None:
    """Stock and patched share a build directory; unchanged files keep their times."""
    stock = build.build(shop.spec)
    tree = shop.home / "objects" / f"{spec_resolver.resolve(f'path:{shop.tree}').key}-tree"
    for path in tree.rglob("*.cpp"):
        os.utime(path, (1, 1))
    release, changed = patched(shop, b"// patched\n")
    other = build.build_patched(release, changed)
    assert other.id != stock.id
    assert other.library.read_text("utf-8").endswith("// patched\n")
    assert other.manifest.patches == ("some-patch",)
    assert not other.manifest.stock
    assert (tree / "src" / "other.cpp").stat().st_mtime == 1
    assert (tree / "src" / "llama.cpp").stat().st_mtime != 1
    folders = [p for p in (shop.home / "objects").iterdir() if (p / "CMakeCache.txt").exists()]
    assert len(folders) == 1
    assert stock.manifest.check_library(stock.folder)


def test_edited_build_tree_is_restored_before_the_build(shop: BuildSandbox) -> None:
    """An edited file in the build tree does not change a variant."""
    first = build.build(shop.spec)
    shutil.rmtree(first.folder)
    (source,) = (shop.home / "objects").glob("*-tree/src/llama.cpp")
    source.write_text("// edited\n", encoding="utf-8")
    assert build.build(shop.spec).library.read_text("utf-8").endswith("// stock\n")


def test_compile_error_publishes_no_variant(shop: BuildSandbox) -> None:
    """The error has the first compiler error; the next build succeeds."""
    shop.use("ninja", "echo 'llama.cpp:1:1: error: broken'; echo 'x: error: later'; exit 1\n")
    with pytest.raises(CommandFailed) as caught:
        build.build(shop.spec)
    assert caught.value.first_error == "llama.cpp:1:1: error: broken"
    assert not variant.built().exists() or shop.built() == []
    assert variant.find(shop.spec) is None
    shop.use("ninja", NINJA)
    assert build.build(shop.spec).library.is_file()


def test_configure_error_names_the_failed_step(shop: BuildSandbox) -> None:
    """The error of a failed configure step names that step."""
    shop.use("cmake", "echo 'CMake Error at x:1 (y):'; echo '  no such thing'; exit 1\n")
    with pytest.raises(CommandFailed, match=r"configuring failed[^$]*no such thing"):
        build.build(shop.spec)


def test_build_without_a_library_raises_a_build_error(shop: BuildSandbox) -> None:
    """A build that succeeds without a library is a BuildError, not a variant."""
    shop.use("ninja", "exit 0\n")
    with pytest.raises(BuildError, match="libplk"):
        build.build(shop.spec)
    assert shop.built() == []


def test_full_disk_while_compiling_raises_disk_full(shop: BuildSandbox) -> None:
    """A compiler that finds no space raises DiskFull."""
    shop.use("ninja", "echo 'as: a.o: No space left on device'; exit 1\n")
    with pytest.raises(DiskFull):
        build.build(shop.spec)


def test_full_disk_while_publishing_leaves_no_variant(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that finds no space raises DiskFull and leaves nothing in built/."""

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(artifacts.shutil, "copy2", full)
        with pytest.raises(DiskFull):
            build.build(shop.spec)
    assert shop.built() == []
    assert build.build(shop.spec).library.is_file()


def test_incomplete_variant_directories_are_replaced(shop: BuildSandbox) -> None:
    """An incomplete directory, with or without its temporary name, is replaced."""
    name = build.build(shop.spec).id
    shutil.rmtree(variant.built() / ".index")
    (variant.built() / name / "manifest.json").unlink()
    (variant.built() / f".{name}.1.part").mkdir()
    assert build.build(shop.spec).manifest.variant == name
    assert shop.built() == [name]


PROGRAM = """
import sys
from pathlib import Path
from pyllamakv.building import build, cmake, variant
cmake.binary = lambda name: Path(sys.argv[1]) / name
variant.shim_digest = lambda: "shim"
print(build.build(sys.argv[2]).id, flush=True)
"""


def start(shop: BuildSandbox) -> subprocess.Popen[str]:
    """Start a build in its own process."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(shop.programs), shop.spec],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    for _ in range(2400):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"{path} never came")


def held_ninja(shop: BuildSandbox) -> tuple[Path, Path]:
    """Make ninja write a file when it starts, and wait for another one."""
    begun, go = shop.folder / "begun", shop.folder / "go"
    shop.use(
        "ninja",
        f"touch {shlex.quote(str(begun))}\n"
        # Bounded, so that a failing test leaves no process.
        f"n=0; while [ ! -e {shlex.quote(str(go))} ] && [ $n -lt 6000 ]; do\n"
        f"sleep 0.05; n=$((n + 1)); done\n{NINJA}",
    )
    return begun, go


@pytest.mark.slow
def test_concurrent_build_waits_and_compiles_nothing(shop: BuildSandbox) -> None:
    """The second of two builds waits for the first and runs no compiler."""
    begun, go = held_ninja(shop)
    first = start(shop)
    wait_for(begun)
    second = start(shop)
    waiting = threading.Event()
    thread = threading.Thread(
        target=lambda: build.build(shop.spec, progress=lambda *_facts: waiting.set()), daemon=True
    )
    thread.start()
    assert waiting.wait(120), "a waiting build reports progress"
    go.touch()
    names = [process.communicate(timeout=300)[0] for process in (first, second)]
    thread.join(300)
    assert names[0] == names[1] != ""
    assert shop.count("ninja") == 1


@pytest.mark.slow
def test_build_after_a_killed_build_succeeds(shop: BuildSandbox) -> None:
    """After SIGKILL nothing is published, no lock remains, and the next build succeeds."""
    begun, go = held_ninja(shop)
    process = start(shop)
    wait_for(begun)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    assert not variant.built().exists() or shop.built() == []
    # The orphaned compiler still holds the tree's lock: the next build must wait for its end.
    go.touch()
    assert build.build(shop.spec).library.is_file()


def test_permission_error_names_pyllamakv_home(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without permission the message names PYLLAMAKV_HOME."""

    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere")

    monkeypatch.setattr(artifacts.shutil, "copy2", refuse)
    with pytest.raises(BuildError, match="PYLLAMAKV_HOME"):
        build.build(shop.spec)


def test_definitions_are_reproducible(shop: BuildSandbox) -> None:
    """Paths are mapped, code is position-independent, and no compiler launcher is detected."""
    wanted = variant.request(shop.spec)
    definitions = build.definitions(wanted, "name")
    flags = shlex.split(definitions["CMAKE_CXX_FLAGS"])
    assert f"-ffile-prefix-map={wanted.tree}=llama.cpp" in flags
    assert definitions["CMAKE_POSITION_INDEPENDENT_CODE"] == "ON"
    assert definitions["CMAKE_CXX_COMPILER_LAUNCHER"] == ""
    assert definitions["PLK_VARIANT"] == "name"
    portable = dataclasses.replace(wanted, native=False)
    assert "PLK_NATIVE" in definitions["CMAKE_C_FLAGS"]
    assert "PLK_NATIVE" not in build.definitions(portable, "name")["CMAKE_C_FLAGS"]


def test_native_build_leaves_out_what_the_compiler_compiles_incorrectly(
    shop: BuildSandbox,
) -> None:
    """Its options reach C and C++; a portable build does not need them."""
    wanted = variant.request(shop.spec)
    broken = dataclasses.replace(wanted.compiler, native_options=("-mno-amx-int8",))
    native = dataclasses.replace(wanted, compiler=broken)
    for language in ("C", "CXX"):
        for request, passed in ((native, True), (dataclasses.replace(native, native=False), False)):
            flags = shlex.split(build.definitions(request, "name")[f"CMAKE_{language}_FLAGS"])
            assert ("-mno-amx-int8" in flags) == passed


def test_ccache_directory_is_set_without_home(
    shop: BuildSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ccache fails without a directory, so one is set if there is no HOME."""
    monkeypatch.delenv("CCACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    assert build.environment()["CCACHE_DIR"].startswith(str(shop.home))
    monkeypatch.setenv("HOME", str(shop.folder))
    assert "CCACHE_DIR" not in build.environment()


def test_number_of_jobs_is_limited_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is at least one job, and no more than fit into memory."""
    monkeypatch.setattr(build, "available_memory", lambda: 0)
    assert build.default_jobs() == 1
    monkeypatch.setattr(build, "available_memory", lambda: 1 << 60)
    assert build.default_jobs() >= 1
