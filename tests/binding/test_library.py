"""Test that an unsuitable library is refused with a remedy, before any of its code runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fakes.build import fake
from library_kit import variant

from pyllamakv.binding import library as opening
from pyllamakv.binding import loading
from pyllamakv.binding.library import Library, open_library
from pyllamakv.binding.local import Local
from pyllamakv.binding.protocol import ContextParams, ModelParams
from pyllamakv.binding.remote import Remote
from pyllamakv.errors import Busy, Closed, LoadError, NativeError, UsageError
from pyllamakv.native._plk import ffi


def refused(where: Path, match: str) -> None:
    """Expect a LoadError, in this process and in a worker."""
    for isolated in (False, True):
        with pytest.raises(LoadError, match=match):
            open_library(where, isolated=isolated)


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True])
def test_variant_opens_by_directory_file_or_text(tmp_path: Path, isolated: bool) -> None:
    """A variant opens by its directory or its file; a bare file needs no manifest."""
    folder = variant(tmp_path / "v")
    for where in (folder, str(folder), folder / "libplk.so"):
        with open_library(where, isolated=isolated) as opened:
            assert opened.manifest is not None
            assert opened.manifest.variant == opened.about.variant == "fake"
            assert opened.path == folder / "libplk.so"
            assert isinstance(opened.native, Remote if isolated else Local)
            assert opened.isolated == isolated
    with open_library(fake()) as opened:
        assert opened.manifest is None


def test_subclass_of_library_opens_as_itself() -> None:
    """The runtime opens its own subclass."""

    class Mine(Library):
        pass

    with Mine.open(fake()) as opened:
        assert type(opened) is Mine


def test_struct_sizes_equal_those_of_c() -> None:
    """Every struct has the same size for cffi and the C compiler."""
    native = Local(fake())
    names = loading.struct_names()
    assert len(names) == 11
    for name in names:
        assert native._lib.plk_sizeof(name.encode()) == ffi.sizeof(name)
    assert native._lib.plk_sizeof(b"nothing") == -1
    native.close()


def test_missing_library_names_the_build_command(tmp_path: Path) -> None:
    """If no library is found, the error has the build command."""
    refused(tmp_path / "nowhere", "pyllamakv build")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "manifest")


def test_damaged_manifest_is_refused(tmp_path: Path) -> None:
    """An unreadable manifest is refused."""
    folder = variant(tmp_path / "v")
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    refused(folder, "build")


def test_library_with_another_digest_is_refused(tmp_path: Path) -> None:
    """A library with another hash than the manifest's is refused, even if it matched before."""
    folder = variant(tmp_path / "v")
    open_library(folder, isolated=True).close()
    with (folder / "libplk.so").open("ab") as file:
        file.write(b"x")
    refused(folder, "sha256")
    (folder / "libplk.so").unlink()
    refused(folder, "cannot be read")


def test_library_of_another_variant_is_refused(tmp_path: Path) -> None:
    """The id inside the library must be the manifest's."""
    refused(variant(tmp_path / "v", variant="another"), "another")


def test_library_of_another_interface_version_is_refused(tmp_path: Path) -> None:
    """Another interface number is refused, from the manifest and from the library."""
    refused(variant(tmp_path / "v", abi=99), "interface version 99")
    refused(fake("FAKE_ABI=7"), "interface version 7")


def test_library_with_another_struct_size_is_refused() -> None:
    """A struct of another size is named in the error."""
    refused(fake("FAKE_SIZE=72"), "plk_counters of 72 bytes")


def test_library_for_another_cpu_is_refused(tmp_path: Path) -> None:
    """Code for another CPU is refused before it runs."""
    refused(variant(tmp_path / "v", cpu_flags=("sse2", "no_such_flag")), "no_such_flag")
    refused(variant(tmp_path / "w", machine="vax"), "vax")


def test_files_without_the_interface_are_refused(tmp_path: Path) -> None:
    """Text files and other libraries are refused."""
    text = tmp_path / "libplk.so"
    text.write_text("not an ELF file", encoding="utf-8")
    refused(text, "cannot load")
    other = Path(__import__("_cffi_backend").__file__)
    refused(other, "not a libplk")


def test_library_without_a_function_is_refused(tmp_path: Path) -> None:
    """A library without a function of the header is refused when it is opened."""
    text = (Path(__file__).parents[1] / "kits" / "fakes" / "fake_plk.c").read_text(encoding="utf-8")
    assert "plk_threads(" in text
    refused(fake("plk_threads=plk_renamed"), "plk_threads")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("libcuda.so.1: cannot open shared object file", "no NVIDIA driver"),
        ("libcublas.so.12: cannot open shared object file", "CUDA toolkit"),
        ("libvulkan.so.1: cannot open shared object file", "Vulkan loader"),
        ("version `GLIBC_2.99' not found", "newer C library"),
    ],
)
def test_missing_shared_library_has_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, hint: str
) -> None:
    """The error names the missing dependency and a hint."""
    target = tmp_path / "libplk.so"
    target.write_bytes(b"x")

    class Loader:
        """Replace cffi by a loader that finds every library."""

        RTLD_NOW = RTLD_LOCAL = 0
        error = ffi.error

        def dlopen(self, name: str, flags: int) -> object:
            """Fail like the loader."""
            raise OSError(f"cannot load library '{name}': {text}")

    monkeypatch.setattr(loading, "ffi", Loader())
    with pytest.raises(LoadError, match=hint):
        loading.load(target)


def test_library_path_is_not_searched_for_driver_names(tmp_path: Path) -> None:
    """Words of the path are not mistaken for the loader's message."""
    folder = tmp_path / "libcuda.so"
    folder.mkdir()
    (folder / "libplk.so").write_bytes(b"x")
    with pytest.raises(LoadError) as caught:
        loading.load(folder / "libplk.so")
    assert "NVIDIA" not in str(caught.value)


def test_replaced_library_opens_only_in_a_worker(tmp_path: Path) -> None:
    """The loader would return the old library, so this process refuses; a worker opens it."""
    target = tmp_path / "libplk.so"
    shutil.copy(fake(), target)
    open_library(target).close()
    new = tmp_path / "new.so"
    shutil.copy(fake('FAKE_VARIANT="newer"'), new)
    os.replace(new, target)  # noqa: PTH105
    with pytest.raises(LoadError, match="was replaced"):
        open_library(target)
    with open_library(target, isolated=True) as opened:
        assert opened.about.variant == "newer"


def test_two_open_variants_keep_separate_state() -> None:
    """Each library has its own names and state."""
    with open_library(fake()) as one, open_library(fake('FAKE_VARIANT="b"')) as two:
        assert (one.about.variant, two.about.variant) == ("fake", "b")
        model = one.native.model_load("m", ModelParams())
        other = two.native.model_load("m", ModelParams())
        one.native.context_new(model, ContextParams())
        assert one.native.model_meta(model, "fake.alive") == "2"
        assert two.native.model_meta(other, "fake.alive") == "1"


def test_failed_library_initialization_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a library cannot be loaded, the error has the reason."""
    monkeypatch.setenv("FAKE_PLK_INIT", "fail")
    for isolated in (False, True):
        with pytest.raises(NativeError, match="no backend"):
            open_library(fake(), isolated=isolated)


def test_environment_and_timeout_require_a_worker() -> None:
    """Environment variables require a process."""
    for options in ({"env": {"A": "b"}}, {"timeout": 3.0}):
        with pytest.raises(UsageError, match="isolated=True"):
            open_library(fake(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", sorted(opening._APART))
def test_gpu_backends_run_in_a_worker(tmp_path: Path, backend: str) -> None:
    """A backend that can end the process always runs in its own one."""
    folder = variant(tmp_path / "v", fake("FAKE_KIND=1"), backend=backend)
    with open_library(folder) as opened:
        assert opened.isolated


@pytest.mark.parametrize("backend", sorted(opening._APART))
def test_variant_without_its_device_is_refused(tmp_path: Path, backend: str) -> None:
    """A variant for a device does not silently compute on the CPU."""
    with pytest.raises(LoadError, match=f"is for {backend}, and no such device was found"):
        open_library(variant(tmp_path / "v", backend=backend))


def test_old_cuda_driver_is_named_with_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint contains the error of the CUDA runtime and the toolkit's version."""
    message = "ggml_cuda_init: CUDA driver version is insufficient for CUDA runtime version"
    monkeypatch.setenv("FAKE_PLK_LOG", message)
    folder = variant(tmp_path / "v", backend="cuda", options={"PLK_CUDA_VERSION": "13.0.88"})
    with pytest.raises(LoadError, match=r"too old for the toolkit 13\.0\.88: update it") as caught:
        open_library(folder)
    assert message in caught.value.log


def test_closed_library_is_refused_and_busy_library_stays_open() -> None:
    """A closed library cannot be used, and a library in use cannot be closed."""
    opened = open_library(fake())
    with opened.owner, pytest.raises(Busy):
        opened.close()
    opened.close()
    opened.close()
    assert opened.closed
    with pytest.raises(Closed):
        _ = opened.owner.raw
