"""Test llama-cpp-python on built variants: installation, its test suite, slot failures."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from building_kit import manifest, script
from patching_kit import release as made_release

from pyllamakv.building import llama_cpp_python_env as install
from pyllamakv.building.variant import Variant, find
from pyllamakv.errors import ArchiveError, CommandFailed, ToolMissing, Unsupported, Untestable
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source import fetch, spec_resolver
from pyllamakv.source.releases import Release
from pyllamakv.source.store import open_store
from qa import main
from qa.peer import command as verb
from qa.peer import hub, peer_comparison, slots, suite

pytest_plugins = ["pytester"]

PYPROJECT = """
[project]
name = "llama_cpp_python"
dependencies = ["numpy>=1.20.0", "jinja2>=2.11.3"]
[project.optional-dependencies]
test = ["pytest>=7.4.0", "llama_cpp_python[server]", "scipy>=1.10"]
"""
TEST = 'MODEL = "./vendor/llama.cpp/models/vocab.gguf"\n'


def sdist(folder: Path, files: dict[str, str]) -> Path:
    """Write an sdist with the given files."""
    path = folder / "llama_cpp_python-0.3.9.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-0.3.9/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


FILES = {
    "pyproject.toml": PYPROJECT,
    "tests/test_llama.py": TEST,
    "tests/sub/evil.py": "",
    "vendor/llama.cpp/pyproject.toml": "",
    "setup.py": "",
}


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Return a small release in its own data directory, whose sdist needs no network."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))
    found = made_release(open_store(), "0.3.9", {"models/vocab.gguf": b"words", "a.cpp": b""})
    monkeypatch.setattr(fetch, "fetch", lambda one, **_: one)
    monkeypatch.setattr(fetch, "archive", lambda *_: sdist(tmp_path / "home" / "downloads", FILES))
    return found


PIP = """
echo "${CMAKE_ARGS:-} $*" >>"$PIP_CALLS"
case "$*" in
*--version) exit "${NO_PIP:-0}" ;;
esac
[ -z "${PIP_FAILS:-}" ] || { echo "ERROR: it has no wheel" >&2; echo done >&2; exit 1; }
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace pip; return the file with its calls."""
    monkeypatch.setenv("PIP_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "python", PIP)))
    return tmp_path / "calls"


def test_installation_has_a_shared_and_an_own_environment(
    release: Release, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dependencies are shared, the package has its own environment, without its library."""
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    assert install.installed("0.3.9") is None
    peer = install.install(release)
    _, needs, package = calls.read_text("utf-8").splitlines()
    base = str(install.root() / "base" / "bin" / "python")
    assert f"--python {base} install" in needs
    assert needs.endswith("jinja2>=2.11.3 numpy>=1.20.0 pytest>=7.4.0 scipy>=1.10")
    assert package.startswith("-DLLAMA_BUILD=OFF ")
    assert f"--python {peer.python} install" in package
    assert "--no-deps --no-cache-dir" in package and package.endswith("0.3.9.tar.gz")
    assert not any(fetch.downloads().iterdir())
    assert (peer.suite / "tests" / "test_llama.py").read_text("utf-8") == TEST
    model = peer.suite / "vendor" / "llama.cpp" / "models" / "vocab.gguf"
    assert model.read_bytes() == b"words"
    assert not list(peer.suite.rglob("evil.py"))
    (path,) = peer.folder.glob("lib/*/site-packages/base.pth")
    assert Path(path.read_text("utf-8").strip()).is_relative_to(install.root() / "base")
    assert install.install(release) == install.installed("0.3.9") == peer
    assert len(calls.read_text("utf-8").splitlines()) == 3


def test_interrupted_installation_is_repeated(
    release: Release, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has pip's message; the package counts as installed only at the end."""
    monkeypatch.setenv("PIP_FAILS", "1")
    with pytest.raises(CommandFailed, match="it has no wheel"):
        install.install(release)
    assert install.installed("0.3.9") is None
    monkeypatch.delenv("PIP_FAILS")
    assert install.install(release).python.exists()
    # An environment cannot be moved: that of a copied data directory is recreated.
    moved = install.root().parent.with_name("moved")
    shutil.copytree(install.root().parent, moved, symlinks=True)
    monkeypatch.setenv("PYLLAMAKV_HOME", str(moved))
    assert install.installed("0.3.9") is None


def test_a_failed_installation_is_reported(
    release: Release, calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A release without a package, a Python without pip and an sdist without tests are reported."""
    other = Release("b4980", "npm", "c" * 40, "t" * 40, "context", "2025-01-01T00:00:00Z")
    with pytest.raises(Unsupported, match="b4980 is not a release of llama-cpp-python"):
        install.install(other)
    monkeypatch.setenv("NO_PIP", "1")
    with pytest.raises(ToolMissing, match="needs pip"):
        install.install(release)
    with pytest.raises(ArchiveError, match="no tests"):
        install.extract_tests(
            sdist(tmp_path / "x", {"pyproject.toml": PYPROJECT}), tmp_path / "y", release
        )


REPORT = b"""<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.test_llama" name="test_good"/>
<testcase classname="tests.test_llama" name="test_hub">
<skipped message="needs a model hub"/></testcase>
<testcase classname="tests.test_llama" name="test_later"><skipped message="later"/></testcase>
<testcase classname="tests.test_llama" name="test_bad"><failure message="no"/></testcase>
<testcase classname="tests.test_llama" name="test_worse"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_suite_outcomes_are_counted_and_compared() -> None:
    """Each test has one outcome; a test that would download a model has its own."""
    found = suite.Suite(suite.read(REPORT))
    assert found.counts() == {"passed": 1, "failed": 2, "skipped": 1, "not run": 1}
    assert str(found) == "1 passed, 2 failed, 1 skipped, 1 not run (needs a model hub)"
    stock = suite.Suite({"a": "passed", "b": "failed", "c": "passed", "d": "passed"})
    other = suite.Suite({"a": "passed", "b": "failed", "c": "failed"})
    assert other.worse_than(stock) == ("c", "d")
    assert stock.worse_than(other) == ()
    assert str(suite.Suite(crash="it hung")) == "it hung"


def variant(folder: Path) -> Variant:
    """Return a variant with an ordinary library."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libllama.so").touch()
    manifest().save(folder)
    return Variant(folder)


def peer_with(folder: Path, body: str) -> install.LlamaCppPythonEnv:
    """Return a peer whose Python is this script."""
    (folder / "suite").mkdir(parents=True)
    script(folder / "bin" / "python", body)
    return install.LlamaCppPythonEnv(folder, "0.3.9")


def test_the_suite_runs_on_the_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in its directory, with the variant's libraries, without variables of the caller."""
    monkeypatch.setenv("LLAMA_CPP_LIB", "/elsewhere")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nothing")
    found = variant(tmp_path / "v")
    peer = peer_with(
        tmp_path / "peer",
        f"""
[ -z "${{LLAMA_CPP_LIB:-}}" ] && [ -z "${{PYTEST_ADDOPTS:-}}" ] || exit 3
[ "$LLAMA_CPP_LIB_PATH" = "{found.dropin}" ] || exit 4
[ "$(pwd -P)" = "{(tmp_path / "peer" / "suite").resolve()}" ] || exit 5
[ -f "$PYTHONPATH/pyllamakv_model_hub.py" ] || exit 6
for word; do case $word in --junitxml=*) file=${{word#*=}} ;; esac; done
cat >"$file" <<'XML'
{REPORT.decode()}
XML
exit 1
""",
    )
    assert suite.run(peer, found).counts()["passed"] == 1


@pytest.mark.slow
def test_crashing_or_hanging_suite_is_a_result(tmp_path: Path) -> None:
    """The last lines of a crash are kept, and a hang is ended."""
    found = variant(tmp_path / "v")
    dead = suite.run(peer_with(tmp_path / "dead", "echo boom >&2; exit 7\n"), found)
    assert dead.crash == "it ended with status 7: boom" and not dead.outcomes
    slow = suite.run(peer_with(tmp_path / "slow", "exec sleep 600\n"), found, seconds=0.5)
    assert "no end after" in slow.crash


def test_tests_that_download_a_model_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the reason, also if the function was imported by name."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    shutil.copy(hub.__file__, pytester.path / "the_hub.py")
    pytester.makepyfile(huggingface_hub="def hf_hub_download(*_):\n    raise SystemExit('asked')\n")
    pytester.makepyfile(
        """
        import pytest
        from huggingface_hub import hf_hub_download

        @pytest.fixture
        def model():
            return hf_hub_download("repo", "file")

        def test_real_model(model):
            raise AssertionError

        def test_other():
            pass
        """
    )
    done = pytester.runpytest_subprocess("-p", "the_hub", "-p", "no:cacheprovider", "-rs")
    done.assert_outcomes(passed=1, skipped=1)
    assert hub.REASON in done.stdout.str()


def answering(folder: Path, library: Path, code: str, difference: str) -> Path:
    """Return a Python that responds like the child."""
    facts = f'{{"version": "0.3.9", "library": "{library}", "code": {code}, '
    return script(folder / "p", f"echo 'hello'\necho '{facts}\"difference\": {difference}}}'\n")


@pytest.mark.parametrize(
    ("code", "difference", "placed", "shown"),
    [
        ("0", "0.001", True, "placed"),
        ("1", "null", False, "no slot: `llama_decode` returns 1"),
        ("-3", "null", False, "`llama_decode` returns -3"),
        ("0", "0.5", False, "wrong logits, off by 0.5"),
    ],
)
def test_slot_result_is_placed_if_the_logits_are_right(
    tmp_path: Path, code: str, difference: str, placed: bool, shown: str
) -> None:
    """The decode must succeed with the right logits."""
    found = variant(tmp_path / "v")
    python = answering(tmp_path, found.dropin / "libllama.so", code, difference)
    asked = slots.ask(python, found, tmp_path / "m.gguf")
    assert (asked.placed, str(asked)) == (placed, shown)


def test_another_library_is_reported(tmp_path: Path) -> None:
    """The peer must run on the variant."""
    found = variant(tmp_path / "v")
    with pytest.raises(Untestable, match="not the libraries"):
        slots.ask(answering(tmp_path, Path("/lib/libllama.so"), "0", "0"), found, tmp_path)
    with pytest.raises(Untestable, match="No module named llama_cpp"):
        slots.ask(
            script(tmp_path / "q", "echo No module named llama_cpp >&2; exit 1\n"), found, tmp_path
        )


def side(name: str, code: int, **outcomes: str) -> peer_comparison.PeerResult:
    """Return one side of a run."""
    found = slots.Slots("0.3.9", "", code, None if code else 0.0)
    return peer_comparison.PeerResult(name, suite.Suite(outcomes), found)


def test_comparison_reports_only_regressions_from_stock() -> None:
    """Only worse outcomes than on stock are faults, and slot failures on patched."""
    stock = side("s", 1, a="passed", b="failed")
    good = peer_comparison.PeerComparison(
        "0.3.9", "unified", stock, side("p", 0, a="passed", b="failed")
    )
    assert good.faults == ()
    bad = peer_comparison.PeerComparison(
        "0.3.9", "unified", stock, side("p", 1, a="failed", b="failed")
    )
    assert [fault.split(" ")[0] for fault in bad.faults] == ["a", "no", "scattered"]
    table = peer_comparison.markdown([good, bad]).splitlines()
    assert len(table) == 4
    assert (
        "| 1 passed, 1 failed | the same | no slot: `llama_decode` returns 1 | placed |" in table[2]
    )
    assert json.dumps(bad.to_json())


def test_peer_command_exits_with_1_on_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs the named releases, oldest first, or one per era; a fault exits with 1."""
    tried: list[str] = []
    codes = {"0.3.16": 1}

    def run(release: Release, **_: object) -> peer_comparison.PeerComparison:
        tried.append(release.name)
        patched = side("p", codes.get(release.name, 0), a="passed")
        return peer_comparison.PeerComparison(
            release.name, release.era, side("s", 1, a="passed"), patched
        )

    monkeypatch.setattr(peer_comparison, "run", run)

    def call(*words: str) -> int:
        with pytest.raises(SystemExit) as leaving:
            main.main(["peer", *words])
        return int(leaving.value.code or 0)

    assert call() == 0 and tried == ["0.3.9"]
    assert "scattered cells: placed" in capsys.readouterr().out
    tried.clear()
    assert call("0.3.16", "0.2.90", "--json") == 1 and tried == ["0.2.90", "0.3.16"]
    results = json.loads(capsys.readouterr().out)
    assert [bool(one["faults"]) for one in results] == [False, True]
    tried.clear()
    assert call("0.2.90", "--sample", "--markdown") == 1
    eras = [spec_resolver.resolve(name).era for name in verb._one_per_era()]
    assert len(eras) == len(set(eras)) >= 6
    assert tried == ["0.2.90", *verb._one_per_era()]
    assert "0.3.9" in tried
    assert call("--json", "--markdown") == 2


def test_the_document_has_a_row_per_era() -> None:
    """The table has the releases of its command, and no slot failure on patched."""
    text = (Path(__file__).parents[3] / "docs" / "drop-in.md").read_text("utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 0.")]
    assert [row[1].strip() for row in rows] == ["0.2.90", *verb._one_per_era()]
    for row in rows:
        assert row[2].strip() == spec_resolver.resolve(row[1].strip()).era
        assert row[4].strip() == "the same"
        assert row[6].strip() == "placed"


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.peer
def test_slot_failure_through_llama_cpp_is_fixed_by_patched(
    stock: Variant, patched: Variant
) -> None:
    """With fragmented cells, stock finds no slot through llama_cpp, patched does."""
    model = synthetic_models.model("deep")
    set_up = install.installed("0.3.9")
    python = set_up.python if set_up else Path(sys.executable)
    try:
        before = slots.ask(python, stock, model)
        after = slots.ask(python, patched, model)
    except Untestable as error:
        pytest.skip(f"{error}; `pyllamakv dropin setup 0.3.9` installs it")
    if before.version != "0.3.9":
        pytest.skip(f"llama-cpp-python {before.version} is not the release of the variant")
    assert before.code == 1
    assert after.placed


@pytest.mark.native
@pytest.mark.peer
def test_llama_cpp_python_suite_has_equal_outcomes_on_stock_and_patched(
    stock: Variant, patched: Variant
) -> None:
    """If it is installed, its suite has the same outcomes on patched as on stock."""
    peer = install.installed("0.3.9")
    if peer is None:
        pytest.skip("`pyllamakv dropin setup 0.3.9`, or `make dropin`, installs it")
    before, after = suite.run(peer, stock), suite.run(peer, patched)
    assert before.outcomes == after.outcomes
    assert before.counts()["passed"] >= 8 and not before.counts().get("failed")


@pytest.mark.native
@pytest.mark.peer
@pytest.mark.slow
def test_a_variable_compacts_the_cache_of_llama(tmp_path: Path) -> None:
    """The program of docs/drop-in.md has the output of the page, on the newest release."""
    release = verb._one_per_era()[-1]
    peer, patched = install.installed(release), find(f"{release}+patched")
    if peer is None or patched is None:
        pytest.skip(f"`python -m qa peer {release}` installs and builds it")
    text = (Path(__file__).parents[3] / "docs" / "drop-in.md").read_text("utf-8")
    program = tmp_path / "sparse.py"
    program.write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    printed = []
    for more in ({}, {"LLAMA_KV_DEFRAG_THOLD": "0.5"}):
        done = subprocess.run(
            [peer.python, program, synthetic_models.model("bytes")],
            env=suite.environment(patched) | more,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed == [
        "compactions: 0, cells moved: 0\n",
        "compactions: 1, cells moved: 160\n",
    ]
    assert all(line in text for line in printed)
