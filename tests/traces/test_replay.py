"""Test that a replay finds the first row with another result, with the states around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trace_kit
from cli_kit import cli
from fakes.simulated import SimulatedNative

import pyllamakv
from pyllamakv import open_variant
from pyllamakv.errors import UsageError, WorkerDied
from pyllamakv.open_variant import OpenLibrary
from pyllamakv.source import spec_resolver
from pyllamakv.traces import minimize, trace, variant_selection
from pyllamakv.traces.replay import replay
from pyllamakv.traces.script_session import ScriptSession

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "stock-fails.jsonl"


@pytest.fixture(autouse=True)
def _home(request, tmp_path, monkeypatch) -> None:
    if request.node.get_closest_marker("native"):
        return  # builds lie in the real one
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path / "home"))


@pytest.fixture
def story(tmp_path: Path):
    """Return head and rows of a trace."""
    return trace.read(trace_kit.record(tmp_path / "trace.jsonl"))


def found(story, native, **options):
    """Replay on a library and return the rows played and the divergences."""
    return replay(*story, ScriptSession(native), **options)


def test_replay_on_the_same_library_has_no_divergence(story) -> None:
    """Every row is compared strictly."""
    assert found(story, SimulatedNative()) == (len(story[1]), [])
    assert found(story, SimulatedNative(), strict=False, every=True) == (len(story[1]), [])


class Keeping(SimulatedNative):
    """Remove nothing."""

    def seq_rm(self, context, seq, p0, p1):
        return True


def test_the_first_divergence_ends_a_replay(story) -> None:
    """The counts around it are returned, unless all divergences are requested."""
    rows, first = found(story, Keeping())
    assert rows == 5
    assert str(first[0]).startswith("row 6 (remove): used was 16, now 32; cells before: 32 used")
    rows, every = found(story, Keeping(), every=True)
    assert rows == len(story[1])
    assert len(every) > 3


def test_replay_on_another_build_ignores_cell_placement(story) -> None:
    """Holes, moves and snapshots are compared only on the recorded build."""

    class Lazy(SimulatedNative):
        def defrag(self, context):
            self._get(context).cache.compact()
            return super().defrag(context)

    assert found(story, Lazy(), strict=False, every=True)[1] == []
    assert found(story, Lazy())[1][0].op == "defrag"


def test_replay_reports_different_logits(story) -> None:
    """Other builds may differ if the choice was close; the recorded one must match the logits."""

    class Louder(SimulatedNative):
        def _row(self, cache, seq, pos):
            return super()._row(cache, seq, pos) * 1.5

    class Other(SimulatedNative):
        def _row(self, cache, seq, pos):
            return super()._row(cache, seq, pos)[::-1].copy()

    assert found(story, Louder(), strict=False)[1] == []
    assert found(story, Louder())[1][0].what.startswith("logit[")
    assert found(story, Other(), strict=False)[1][0].what.startswith("best[")


def test_replay_ends_at_a_crash(story) -> None:
    """The last row is the one that ended the worker."""

    class Dying(SimulatedNative):
        def defrag(self, context):
            raise WorkerDied("the worker was killed by signal 6")

    rows, divergences = found(story, Dying(), every=True)
    assert rows < len(story[1])
    assert "signal 6" in str(divergences[-1])
    assert divergences[-1].op == "defrag"


def test_replay_variants_default_to_the_recorded_release(story) -> None:
    """They are of the recorded release unless given completely; patches must be compatible."""
    head = trace.Head("0.3.9-stock-cpu-0123456789abcdef", spec="0.3.9+stock")
    assert variant_selection.specs(head, []) == ["recorded"]
    assert variant_selection.specs(head, ["stock,patched"]) == ["0.3.9+stock", "0.3.9+patched"]
    several = ["0.3.9+full-defrag,kv-counters,stock", "b4980+patched"]
    assert variant_selection.specs(head, several) == [
        "0.3.9+full-defrag,kv-counters", "0.3.9+stock", "b4980+patched",
    ]  # fmt: skip
    bare = trace.Head("0.3.9-stock-cpu-0123456789abcdef")
    assert variant_selection.specs(bare, ["patched"]) == ["0.3.9+patched"]
    with pytest.raises(UsageError, match=r"0\.3\.9\+patched"):
        variant_selection.specs(trace.Head(), ["patched"])
    with pytest.raises(UsageError, match="pass --variant"):
        variant_selection.opened("recorded", trace.Head())
    with pytest.raises(UsageError, match="pass --variant"):
        variant_selection.variant_folder("recorded", trace.Head())


@pytest.mark.parametrize("release", ["git:https://example.org/x.git@main", "path:/a/folder"])
@pytest.mark.regression(
    "a trace could make `replay` read a directory or fetch a URL",
    by="hostile input",
    of="Python",
)
def test_variant_names_in_a_trace_are_only_looked_up_in_builds(release: str) -> None:
    """The names of a trace are not looked up outside of the built variants."""
    head = trace.Head("git-0123456789ab-stock-cpu-0123456789abcdef", spec=f"{release}+stock")
    with pytest.raises(UsageError, match="pass a complete variant"):
        variant_selection.specs(head, ["patched"])


def test_a_recorded_build_is_opened_in_its_environment(monkeypatch, tmp_path: Path) -> None:
    """It is opened by its directory, which its id or its spec resolves to."""
    asked = []
    monkeypatch.setattr(
        open_variant, "find_recorded", lambda *names: asked.append(names) or tmp_path
    )
    monkeypatch.setattr(pyllamakv, "open", lambda *a, **k: (a, k), raising=False)
    head = trace.Head("id", spec="0.3.9+stock", environment={"LLAMA_X": "1"})
    options = {"isolated": True, "env": {"LLAMA_X": "1"}}
    assert variant_selection.opened("recorded", head) == ((tmp_path,), options)
    assert variant_selection.opened("0.3.9", head) == (("0.3.9",), options)
    assert variant_selection.variant_folder("recorded", head) == tmp_path
    assert asked == [("id", "0.3.9+stock")] * 2


@pytest.mark.parametrize("words", [("replay",), ("minimize",), ("replay", "--variant", "stock")])
@pytest.mark.parametrize(
    ("head", "file"),
    [
        ({"variant": "evil.so"}, "evil.so"),
        ({"variant": "gone", "spec": "evil.so"}, "evil.so"),
        ({"spec": "0.3.9+stock"}, "0.3.9+stock"),
        ({"variant": "path:evil.so"}, "path:evil.so"),
        ({"spec": "path:/evil.so"}, "path:/evil.so"),
        ({"spec": "path:/evil.so+stock"}, "path:/evil.so+stock"),
        ({"spec": "git:/evil.so"}, "git:/evil.so"),
        ({"spec": " path:evil.so"}, " path:evil.so"),
        ({"spec": "git:evil.so@main"}, "git:evil.so@main"),
    ],
)
@pytest.mark.regression(
    "`replay` and `shrink` of a trace loaded a library with its name from the current directory",
    by="hostile input",
    of="Python",
)
@pytest.mark.regression(
    "a trace could make `replay` read a directory or fetch a URL",
    by="hostile input",
    of="Python",
)
def test_replay_opens_only_built_variants(
    capsys, monkeypatch, tmp_path: Path, head: dict[str, str], file: str, words: tuple[str, ...]
) -> None:
    """It opens no library beside the trace, reads no directory and fetches no URL."""
    monkeypatch.chdir(tmp_path)
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(b"native code")
    Path("run.jsonl").write_text(json.dumps({"trace": 2, **head}) + '\n{"op": "clear"}\n')

    def touched(*what: object, **_: object) -> None:
        raise AssertionError(what)

    monkeypatch.setattr(OpenLibrary, "open", touched)
    monkeypatch.setattr(minimize, "minimize", touched)
    monkeypatch.setattr(spec_resolver, "from_folder", touched)
    monkeypatch.setattr(spec_resolver, "pin_git", touched)
    code, _, err = cli(capsys, "trace", words[0], "run.jsonl", *words[1:])
    assert code == 2
    assert "Traceback" not in err


class Opened:
    """Simulate an opened library under a name."""

    def __init__(self, spec: str, native: SimulatedNative) -> None:
        self.native = native
        self.about = type("About", (), {"variant": spec})()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.native.close()


def test_replay_shows_variants_side_by_side(capsys, monkeypatch, tmp_path: Path) -> None:
    """Exit code 1 only if the recorded build has another result."""
    path = trace_kit.record(tmp_path / "trace.jsonl")
    wrong: set[str] = set()

    def open_(spec, **options):
        spec = str(spec)
        return Opened(spec, Keeping() if spec in wrong else SimulatedNative())

    monkeypatch.setattr(pyllamakv, "open", open_, raising=False)
    monkeypatch.setattr(open_variant, "find_recorded", lambda variant, spec: Path(variant))
    code, out, _ = cli(capsys, "trace", "replay", path, "--variant", "simulated,0.3.9+patched")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["variant", "rows", "diverges"]
    assert "simulated *" in out
    wrong.add("0.3.9+patched")
    code, out, _ = cli(capsys, "trace", "replay", path, "--variant", "simulated,0.3.9+patched")
    assert code == 0
    assert "row 6 (remove): used" in out
    wrong.add("simulated")
    code, out, _ = cli(capsys, "trace", "replay", path, "--json")
    replays = json.loads(out)["replays"]
    assert code == 1
    assert replays[0]["recorded"]
    assert replays[0]["divergences"][0]["row"] > 1
    # A truncated trace is reported, and played up to its end.
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    wrong.clear()
    code, _, err = cli(capsys, "trace", "replay", path)
    assert code == 0
    assert "is incomplete" in err
    path.write_bytes(b"\x00\x01")
    assert cli(capsys, "trace", "replay", path)[0] == 2


@pytest.mark.slow
@pytest.mark.native
def test_the_example_diverges_where_stock_fails(stock, patched, capsys) -> None:
    """The trace was recorded on stock: patched decodes the batch that stock could not place."""
    code, out, _ = cli(
        capsys,
        "trace",
        "replay",
        EXAMPLE,
        "--variant",
        f"{stock.folder},{patched.folder}",
        "--json",
    )
    replays = json.loads(out)["replays"]
    assert code == 0
    assert replays[0]["divergences"] == []
    (divergence,) = replays[1]["divergences"]
    assert (divergence["what"], divergence["recorded"], divergence["found"]) == ("status", 1, 0)
    assert divergence["before"]["largest_hole"] < 16 <= divergence["after"]["largest_hole"] + 16
