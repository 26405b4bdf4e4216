"""Test the pytest plugin in a separate project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyllamakv.building.variant import Variant
from pyllamakv.errors import UsageError
from pyllamakv.home import home
from pyllamakv.source import verified
from pyllamakv.source.releases import TEST_RELEASE
from pyllamakv.testing import build_under_test

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a project whose pytest has this plugin and no other."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(home()))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -p pyllamakv.testing.plugin --strict-markers")
    return pytester


def run(project: pytest.Pytester, *words: str) -> pytest.RunResult:
    if not any(word.startswith("--llama-release") for word in words):
        words = (f"--llama-release={TEST_RELEASE}", *words)
    return project.runpytest_subprocess("-p", "no:cacheprovider", *words, timeout=600)


THREE_LINES = """
import pytest

@pytest.mark.kv_fix
def test_scattered_cells_are_enough(kv_context):
    a, b, c = (kv_context.sequence() for _ in range(3))
    for token in range(128):
        kv_context.decode([a.feed([token % 32]), b.feed([token % 32])])
    b.remove()
    kv_context.decode([c.feed(list(range(16)))])
"""


@pytest.mark.slow
@pytest.mark.native
def test_kv_fix_test_must_fail_on_stock(
    project: pytest.Pytester, stock: Variant, patched: Variant
) -> None:
    """A fix passes on patched and must fail on stock; otherwise it is reported."""
    project.makepyfile(THREE_LINES)
    run(project, "-v").stdout.fnmatch_lines(["*cells_are_enough[[]0.3.9+patched[]] PASSED*"])
    both = run(project, "--llama-series", "stock", "--llama-series", "patched", "-v")
    both.assert_outcomes(passed=1, xfailed=1)
    project.makepyfile("import pytest\n@pytest.mark.kv_fix\ndef test_none(kv_context): pass\n")
    run(project, "--llama-series=stock").assert_outcomes(failed=1)


@pytest.mark.slow
@pytest.mark.native
def test_plugin_fixtures_share_the_library_and_define_contexts(
    project: pytest.Pytester, patched: Variant
) -> None:
    """The library is shared, a worker belongs to one test, and markers define contexts."""
    project.makepyfile(
        """
        import os
        import pytest
        import pyllamakv as kv

        seen = []

        def test_library(kv_library):
            assert not kv_library.isolated
            seen.append(kv_library)

        def test_library_again(kv_library):
            assert seen == [kv_library]

        def test_default(kv_context, kv_library):
            assert kv_context.native is kv_library.native
            assert (kv_context.info.n_ctx, kv_context.info.n_seq_max) == (256, 4)

        @pytest.mark.kv(n_ctx=512, n_seq_max=2, model="grouped", type_k="q8_0")
        def test_options(kv_context):
            assert (kv_context.info.n_ctx, kv_context.info.n_seq_max) == (512, 2)
            assert kv_context.model.info.n_embd == 128

        @pytest.mark.kv(guard="off")
        def test_guard(kv_context):
            assert not kv_context.guard and kv_context.model.isolated

        @pytest.mark.kv(env={"LLAMA_SET_ROWS": "0"})
        class TestInAWorker:
            @pytest.mark.kv(n_ctx=512)
            def test_both_markers(self, kv_context, kv_worker):
                assert kv_context.native is kv_worker.native
                assert kv_context.info.n_ctx == 512

        def test_worker_one(kv_worker):
            seen.append(kv_worker.native)
            assert kv_worker.isolated

        def test_worker_two(kv_worker):
            assert kv_worker.native is not seen[-1]
        """
    )
    run(project).assert_outcomes(passed=8)
    markers = run(project, "--markers").stdout.str()
    assert "kv_fix" in markers and "kv(model, env" in markers


@pytest.mark.slow
@pytest.mark.native
def test_caches_are_on_the_requested_device(project: pytest.Pytester, patched: Variant) -> None:
    """With RPC each library has a server; a library in host memory is an error by default."""
    project.makepyfile(
        """
        import pytest
        from pyllamakv.scenarios import synthetic_models
        from pyllamakv.scenarios.device_placement import ALL, DevicePlacement
        from pyllamakv.binding.protocol import ModelParams

        def host(context):
            context.decode(context.sequence().feed([1, 2, 3]))
            return [cells.info.host for cells in context.kv.snapshot().streams]

        def test_context(kv_context):
            assert kv_context.model.isolated
            assert host(kv_context) == [0]

        def test_both_libraries_at_once(kv_library, kv_worker):
            made = [
                library.load_model(synthetic_models.model("tiny")).context(n_ctx=256)
                for library in (kv_library, kv_worker)
            ]
            assert [host(context) for context in made] == [[0], [0]]

        @pytest.mark.kv(offload_kqv=False)
        def test_cache_without_offload(kv_context):
            assert host(kv_context) == [1]

        @pytest.fixture
        def astray(monkeypatch):
            monkeypatch.setattr(
                DevicePlacement, "params",
                lambda self, at: ModelParams(n_gpu_layers=0, rpc_servers=at),
            )

        def test_in_host_memory(astray, kv_context):
            pass
        """
    )
    done = run(project, "--llama-backend=rpc", "-v")
    done.assert_outcomes(passed=3, errors=1)
    done.stdout.fnmatch_lines(
        ["*::test_context[[]0.3.9+patched-rpc[]] PASSED*", "*Untestable: *not on a rpc device*"]
    )


def test_an_unused_plugin_builds_and_imports_nothing(project: pytest.Pytester) -> None:
    """Loading the plugin imports no large module and starts no build."""
    project.makepyfile(
        """
        import sys

        def test_without_fixtures():
            heavy = {"numpy", "_cffi_backend", "git", "gguf", "unearth", "packaging", "filelock"}
            ours = {name for name in sys.modules if name.startswith("pyllamakv.")}
            assert ours == {"pyllamakv.testing", "pyllamakv.testing.plugin"}
            assert not heavy & set(sys.modules) - {"packaging"}
        """
    )
    run(project, "--llama-release=no-such").assert_outcomes(passed=1)


@pytest.mark.slow
def test_wrong_options_end_the_session_with_a_message(project: pytest.Pytester) -> None:
    """An unknown series or backend ends the session with a message, before any test."""
    project.makepyfile("def test_uses_a_context(kv_context): pass\n")
    for words, message in (
        ("--llama-patches=./no-such.patch", "no-such.patch"),
        ("--llama-series=full-defrag,./no.patch", "is not a variant"),
        ("--llama-series=", "expected patched, stock"),
        ("--llama-backend=abacus", "there is no backend 'abacus'"),
    ):
        done = run(project, words)
        assert done.ret != 0
        assert message in done.stdout.str() + done.stderr.str()
    assert run(project, "--llama-release=0.0.1").ret != 0


def test_options_select_each_release_with_each_series(tmp_path: Path) -> None:
    """Every release is tested with every series, once."""
    found = build_under_test.choose(["0.3.9", "b4980"], ["stock", "patched", "stock"], "rpc")
    assert [one.name for one in found] == [
        "0.3.9+stock-rpc",
        "0.3.9+patched-rpc",
        "b4980+stock-rpc",
        "b4980+patched-rpc",
    ]
    assert {one.place.backend for one in found} == {"rpc"}
    assert [one.stock for one in found] == [True, False, True, False]
    assert [one.name for one in build_under_test.choose((), (), "cuda")] == [
        f"{verified.newest().name}+patched-cuda"
    ]
    file = tmp_path / "mine.patch"
    file.touch()
    stock, own = build_under_test.choose(["0.3.9"], ["stock", "patched"], "cpu", str(file))
    assert (own.name, own.stock, own.patches) == ("0.3.9+patched+mine", False, str(file.resolve()))
    assert (stock.stock, stock.patches) == (True, "")
    with pytest.raises(UsageError):
        build_under_test.choose((), ["Full Defrag"], "cpu")


@pytest.mark.native
def test_the_plugin_is_found_by_pytest_itself(patched: Variant) -> None:
    """If the package is installed, its entry point is this plugin."""
    code = (
        "import importlib.metadata as m;"
        "print([e.value for e in m.entry_points(group='pytest11') if 'pyllamakv' in e.name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    if done.stdout.strip() == "[]":
        pytest.skip("the package is not installed in this interpreter, or before it had a plugin")
    assert done.stdout.strip() == "['pyllamakv.testing.plugin']"
