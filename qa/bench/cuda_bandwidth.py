"""Measure how fast a GPU copies its own memory: the limit of a defragmentation there.

`python -m qa.bench.cuda_bandwidth LIBCUDART` prints bytes per second, read and written. It runs in
a child process, so that no CUDA context stays open beside the workers.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

from pyllamakv.building import cuda
from pyllamakv.errors import Untestable

#: Bytes of a copy, far above the size of the caches of a GPU, and the number of copies.
SIZE = 1 << 30
COPIES = 20

#: cudaMemcpyDeviceToDevice, from the enumeration cudaMemcpyKind of driver_types.h.
_DEVICE_TO_DEVICE = 3

#: The last one is that of a distribution's packages, whose nvcc is in /usr/bin.
_PLACES = (
    "lib64/libcudart.so*",
    "lib/libcudart.so*",
    "targets/*/lib/libcudart.so*",
    "lib/*-linux-gnu/libcudart.so*",
)


def measure(toolkit: cuda.Toolkit) -> float:
    """Return the bytes per second that the first GPU reads and writes while it copies.

    Raises Untestable without the runtime library of the toolkit, or if the GPU cannot copy.
    """
    root = toolkit.nvcc.parent.parent
    found = [path for pattern in _PLACES for path in sorted(root.glob(pattern))]
    if not found:
        raise Untestable(f"{root} has no libcudart.so")
    command = [sys.executable, "-m", __name__, str(found[0])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        raise Untestable(f"the GPU did not copy {SIZE} bytes in {error.timeout:g} s") from error
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Untestable(f"the GPU cannot copy memory: {last}")
    return float(done.stdout)


def copy(library: Path) -> float:
    """Return the bytes per second of copies in this process. Raises OSError if a call fails."""
    runtime = ctypes.CDLL(str(library))

    def call(name: str, *arguments: object) -> None:
        if status := getattr(runtime, name)(*arguments):
            raise OSError(f"{name} returned {status}")

    one, other = ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t(SIZE)
    for each in (one, other):
        call("cudaMalloc", ctypes.byref(each), size)
    seconds = 0.0
    # The first turn includes one-time initialization.
    for copies in (1, COPIES):
        call("cudaDeviceSynchronize")
        begin = time.perf_counter()
        for _ in range(copies):
            call("cudaMemcpyAsync", other, one, size, _DEVICE_TO_DEVICE, None)
        call("cudaDeviceSynchronize")
        seconds = time.perf_counter() - begin
    return 2 * SIZE * COPIES / seconds


if __name__ == "__main__":
    sys.stdout.write(f"{copy(Path(sys.argv[1]))}\n")
