"""Inject a failed allocation into each creation: nothing leaks, and the next one succeeds."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cpp_kit
import pytest
from native_kit import TEST_RELEASE, built

from pyllamakv.scenarios import synthetic_models

SOURCE = Path(__file__).with_name("failing_new.cpp")

SCRIPT = textwrap.dedent(
    """
    import ctypes, os, sys
    from pathlib import Path

    import pyllamakv as kv
    from pyllamakv.errors import KvError

    counter = ctypes.CDLL(None)
    counter.failing_new_begin.argtypes = [ctypes.c_long]
    counter.failing_new_end.restype = counter.failing_new_live.restype = ctypes.c_long
    folder, path, place = sys.argv[1:]
    library = kv.open(Path(folder))
    model = library.load_model(path)
    real, options = library.native._lib, {"n_ctx": 64, "n_batch": 32, "n_seq_max": 2}


    class Failing:
        '''The C library with one function in which one allocation fails.'''

        def __init__(self, name, at):
            self.name, self.at, self.count = name, at, 0

        def __getattr__(self, name):
            return self.call if name == self.name else getattr(real, name)

        def call(self, *arguments):
            counter.failing_new_begin(self.at)
            try:
                return getattr(real, self.name)(*arguments)
            finally:
                self.count = counter.failing_new_end()


    def attempt(make, name, at):
        native = library.native
        before = counter.failing_new_live(), len(os.listdir("/proc/self/fd"))
        native._lib = failing = Failing(name, at)
        try:
            make().close()
        except KvError as error:
            found = type(error).__name__
        else:
            found = ""
        finally:
            native._lib = real
        native.logs()
        after = counter.failing_new_live(), len(os.listdir("/proc/self/fd"))
        return found, failing.count, [b - a for a, b in zip(before, after)]


    def keep():
        return model.context(**options, kv_backing=Path(place) / "kept", kv_keep=True)


    # Function that creates, its C function, and how many of the last allocations to fail. Earlier
    # allocations are those of llama.cpp, whose constructors may leak a file or small objects.
    CASES = {
        "context": (lambda: model.context(**options), "plk_context_new", 1000),
        "kept": (keep, "plk_context_new", 1000),
        "model": (lambda: library.load_model(path), "plk_model_load", 12),
        "chain": (lambda: model.sampler(temperature=1.0, top_k=9), "plk_sampler_new", 1000),
        "grammar": (lambda: model.sampler(grammar='root ::= "a"'), "plk_sampler_new", 1),
    }
    for what, (make, name, last) in CASES.items():
        attempt(make, name, -1)
        _, n, leaked = attempt(make, name, -1)
        assert n and leaked == [0, 0], f"{what}: {leaked} leaked objects and files without a fault"
        errors = 0
        for at in range(max(0, n - last), n):
            for _ in range(2):  # the first call may fill caches
                error, _, (objects, files) = attempt(make, name, at)
            assert not files, f"{what}, allocation {at} of {n}: {files} files remain open"
            assert objects <= 2, f"{what}, allocation {at} of {n}: {objects} objects leaked"
            again = attempt(make, name, -1)[0]
            assert not again, f"{what}, after failed allocation {at} of {n}: {again}"
            errors += bool(error)
        assert errors > min(n, last) / 2, f"{what}: {errors} errors in {n} allocations"
    """
)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library and reads /proc")
@pytest.mark.parametrize("release", [TEST_RELEASE, "b11549"])
def test_failed_allocation_during_creation_leaks_nothing(release: str, tmp_path: Path) -> None:
    """No model, context, sampler, open file or lock of a kept file remains."""
    variant, model = built(f"{release}+patched"), synthetic_models.model("bytes")
    library = tmp_path / "failing_new.so"
    command = [cpp_kit.compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", str(SOURCE)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=300)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(variant.folder), str(model), str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
