"""Copies of quantised rows on the CPU, by ggml itself: what the patch quant-copy-fix is about.

A cache only copies rows onto rows as long as themselves; ggml's copy knows more ways, and each of
them counted elements where it should count blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_kit import built

from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.native

#: Copies, and says which came out wrong: in a process of its own, for a wrong one may end it.
PROGRAM = '''
import ctypes as c
import sys
from pathlib import Path

folder = Path(sys.argv[1])
kind = "dylib" if sys.platform == "darwin" else "so"
base = c.CDLL(str(folder / f"libggml-base.{kind}"), c.RTLD_GLOBAL)
cpu = c.CDLL(str(folder / f"libggml-cpu.{kind}"), c.RTLD_GLOBAL)

class Params(c.Structure):
    _fields_ = [("size", c.c_size_t), ("buffer", c.c_void_p), ("no_alloc", c.c_bool)]

P, N, Z = c.c_void_p, c.c_int64, c.c_size_t
for name, result, takes in (
    ("ggml_init", P, [Params]), ("ggml_free", None, [P]),
    ("ggml_new_tensor_2d", P, [P, c.c_int, N, N]), ("ggml_view_2d", P, [P, P, N, N, Z, Z]),
    ("ggml_cpy", P, [P, P, P]), ("ggml_get_data", P, [P]), ("ggml_nbytes", Z, [P]),
    ("ggml_row_size", Z, [c.c_int, N]), ("ggml_new_graph", P, [P]),
    ("ggml_build_forward_expand", None, [P, P]),
):
    function = getattr(base, name)
    function.restype, function.argtypes = result, takes
compute = cpu.ggml_graph_compute_with_ctx
compute.restype, compute.argtypes = c.c_int, [P, P, c.c_int]

Q8_0 = 8
SIZE, BLOCK, ROOM = 34, 32, 4096

def tried(src, dst, threads):
    """Copy between views: blocks per row, rows, and blocks from row to row of each."""
    context = base.ggml_init(Params(1 << 20, None, False))
    whole = [base.ggml_new_tensor_2d(context, Q8_0, BLOCK, ROOM // SIZE) for _ in range(2)]
    size = base.ggml_nbytes(whole[0])
    memory = [(c.c_uint8 * size).from_address(base.ggml_get_data(each)) for each in whole]
    memory[0][:] = [(7 * i + i // 251) % 251 for i in range(size)]
    memory[1][:] = [255] * size
    views = [
        base.ggml_view_2d(context, each, n * BLOCK, rows, step * SIZE, 0)
        for each, (n, rows, step) in zip(whole, (src, dst))
    ]
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, base.ggml_cpy(context, *views))
    compute(context, graph, threads)
    places = [
        [row * step + i for row in range(rows) for i in range(n)] for n, rows, step in (src, dst)
    ]
    expected = [255] * size
    for one, other in zip(*places):
        expected[other * SIZE : (other + 1) * SIZE] = memory[0][one * SIZE : (one + 1) * SIZE]
    right = expected == list(memory[1])
    base.ggml_free(context)
    return right

WAYS = {
    "all at once": ((3, 7, 3), (3, 7, 3)),
    "row by row": ((3, 7, 5), (3, 7, 4)),
    "rows of another length, gathered": ((3, 8, 4), (4, 6, 4)),
    "rows of another length, scattered": ((3, 8, 3), (4, 6, 5)),
    "longer rows, scattered": ((6, 4, 7), (4, 6, 5)),
}
for name, (src, dst) in [*WAYS.items()][: int(sys.argv[2])]:
    for threads in (1, 2, 3, 5, 16):
        if not tried(src, dst, threads):
            print(f"{name}, {threads} threads")
'''


#: The first ways are those that caches use.
USED, ALL = 2, 5


def wrong(variant: Variant, tmp_path: Path, ways: int) -> list[str]:
    """Return which copies came out wrong, or how the process ended."""
    program = tmp_path / "copies.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), str(variant.dropin), str(ways)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip
    return [*done.stdout.splitlines(), *([f"ended with {done.returncode}"] * bool(done.returncode))]


@pytest.mark.parametrize(
    ("spec", "ways"), [("0.3.9+stock", USED), ("0.3.9+patched", USED), ("0.3.8+patched", ALL)]
)
def test_copies_count_in_blocks(spec: str, ways: int, tmp_path: Path) -> None:
    """The blocks that should move do, and no byte more.

    Upstream cured what caches use in 0.3.9; to 0.3.36 its copies to rows of another length end the
    process.
    """
    assert wrong(built(spec), tmp_path, ways) == []


def test_stock_copies_did_not(tmp_path: Path) -> None:
    """The test sees what the patch cures."""
    assert wrong(built("0.3.8+stock"), tmp_path, USED)
