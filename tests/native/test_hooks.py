"""What stands between the logic of the patches and llama.cpp, over stand-ins for it and ggml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cpp_kit import ROOT, Header, run

DEFRAG = Header(
    "llama-kv-defrag-ggml.h",
    "full-defrag",
    ROOT / "tests" / "native" / "kv_defrag_ggml.cpp",
    places=True,
    needs=("llama-kv-defrag.h", "llama-kv-settings.h"),
)
GGML = Header(
    "llama-kv-mmap-ggml.h",
    "mmap-kv",
    ROOT / "tests" / "native" / "kv_mmap_ggml.cpp",
    places=True,
    needs=("llama-kv-mmap.h",),
)
API = Header(
    "llama-kv-mmap-api-impl.h",
    "mmap-kv",
    ROOT / "tests" / "native" / "kv_mmap_api.cpp",
    places=True,
    needs=("llama-kv-mmap.h", "llama-kv-mmap-api.h"),
)
COMPACT = Header(
    "llama-kv-compact-impl.h",
    "compaction",
    ROOT / "tests" / "native" / "kv_compact.cpp",
    places=True,
    needs=(
        "llama-kv-compact.h",
        "llama-kv-compact-cells.h",
        "llama-kv-defrag.h",
        "llama-kv-defrag-ggml.h",
        "llama-kv-settings.h",
    ),
)
COUNTERS = Header(
    "llama-kv-counters-impl.h",
    "kv-counters",
    ROOT / "tests" / "native" / "kv_counters.cpp",
    places=True,
    needs=("llama-kv-counters.h",),
)
GROUPS = {
    COUNTERS: ("sums", "unknown"),
    DEFRAG: (
        "cells",
        "failures",
        "faults",
        "graphs",
        "middle",
        "moves",
        "overlaps",
        "picks",
        "reservations",
        "rows",
        "scratch",
        "slices",
        "throws",
        "worth",
    ),
    GGML: (
        "alloc",
        "cells",
        "clear",
        "contract",
        "describe",
        "devices",
        "log",
        "refusals",
        "sets",
    ),
    API: ("flush", "get", "gone", "trim"),
    COMPACT: (
        "due",
        "failed",
        "failed-graph",
        "moves",
        "refused",
        "same",
        "some-graphs",
        "sparse",
        "thold",
    ),
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files need Linux")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[Header, Path]:
    """Build the tests of both headers."""
    return {each: each.program(tmp_path_factory.mktemp(each.source.stem)) for each in GROUPS}


def test_every_group_has_a_test() -> None:
    """Each group that is run below is defined in the source of its program."""
    for header, groups in GROUPS.items():
        source = header.source.read_text(encoding="utf-8")
        assert all(f'{{ "{group}", ' in source for group in groups), header.name


@pytest.mark.slow
def test_every_group_is_listed(programs: dict[Header, Path]) -> None:
    """The programs know the groups that are run below, and no others."""
    for header, program in programs.items():
        assert tuple(run(program).stdout.split()) == GROUPS[header]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "group"), [(header, group) for header, names in GROUPS.items() for group in names]
)
def test_hooks(programs: dict[Header, Path], header: Header, group: str, tmp_path: Path) -> None:
    """A group holds, breaks no memory rule, and leaves no file behind."""
    result = header.run(programs[header], group, tmp_path)
    if "Operation not supported" in result.stdout:
        pytest.skip("this file system cannot secure space")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "faults"),
    [
        (
            COUNTERS,
            {
                "sums": ("kv->n_slot_searches - kv->n_slots_found", "kv->n_slots_found"),
                "unknown": ("-1, -1, -1, -1 };", "-1, -1, -1, 0 };"),
            },
        ),
        (
            DEFRAG,
            {
                "cells": ("+ stream*size", ""),
                "failures": (
                    "return RESULT_FAILED;\n            }\n        }\n\n        ready",
                    "return RESULT_HOST;\n            }\n        }\n\n        ready",
                ),
                "faults": ("wanted.order == ORDER_KEPT && todo.size() > 1", "false"),
                "graphs": ("moves_per_graph(g->max_nodes, device.size())", "n_batch / n_batch"),
                "middle": ("started = true;", ""),
                "moves": ("ggml_backend_sched_synchronize(g->sched);", ""),
                "overlaps": ("n_bytes/n_copies", "n_bytes/p.moves.size()"),
                "picks": ("(bytes != 2 && bytes != 4)", "bytes != 2"),
                "rows": ("i += n_max", "i += n_rows"),
                "scratch": ("n_scratch + buf.size() + ready", "n_scratch + ready"),
                "slices": ("v0*ct.where.stride", "0*ct.where.stride"),
                "throws": (
                    "catch (const std::exception &) {\n                done",
                    "catch (int) {\n                done",
                ),
                "worth": ("? worth/8 : worth", "? worth : worth"),
            },
        ),
        (
            GGML,
            {
                "alloc": ("ggml_backend_view_init(t);", ";"),
                "cells": ("cells.pos_set(i, pos[i]);", ";"),
                "clear": ("mapped->clear();", ";"),
                "contract": ("res->get_buffer(),", "res->data(),"),
                "describe": ("ggml_type_name(t->type)", '""'),
                "log": ("is_kept()              ?", "is_resumed() ?"),
                "refusals": ("is_2d || ", ""),
                "devices": ("current().failed = FAILURE_UNSUPPORTED;", ""),
                "sets": ("seq >= 0 && (uint32_t)", "seq >= 0 || (uint32_t)"),
            },
        ),
        (
            API,
            {
                "flush": ("tokens + (size_t)", "tokens + 0*(size_t)"),
                "get": ("out->n_committed = t.n_committed;", ""),
                "gone": ("return one && one->get_is_kept()", "return one->get_is_kept()"),
                "trim": ("res += one ?", "res = one ?"),
            },
        ),
        (
            COMPACT,
            {
                "due": ("thold > 0.0f &&", ""),
                "failed": ("return -2;", "return 0;"),
                "moves": ("t.mirror->get_compact_tensors(strm, tensors);", ""),
                "refused": ("if (t.kv->get_has_shared_cells()) {", "if (false) {"),
                "same": ("left.pos_get(i) != right.pos_get(i) ||", ""),
                "some-graphs": ("each.commit(n_moved);", "each.commit(plan.n_cells);"),
                "sparse": ("n_kv >= llama_kv_settings", "n_kv > llama_kv_settings"),
                "thold": ("{ ctx->defrag_thold, ", "{ "),
            },
        ),
    ],
)
def test_faults_are_noticed(header: Header, faults: dict, tmp_path: Path) -> None:
    """Each group fails when what it is about is wrong."""
    header.check_faults(tmp_path, faults)
