"""Check asks both sides, remembers, and answers in every shape."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from fakes.rolling import Opener, Rolling

from pyllamakv.cli import main
from pyllamakv.errors import (
    CommandFailed,
    FetchError,
    HarnessError,
    LoadError,
    NoTextApplies,
    PatchConflict,
    ToolMissing,
    UnknownRelease,
    UsageError,
)
from pyllamakv.harness import check as checking
from pyllamakv.harness import lab, report, scenario
from pyllamakv.harness.check import Question, check
from pyllamakv.harness.verdict import Verdict

SOME = ("fragmented", "fork-then-defrag")


@dataclass
class World:
    """Hold what the checked world does; fields that are errors are raised."""

    build_stock: object = None
    build_patched: object = None
    applied: object = None
    fetched: object = None
    make: object = None
    skipped: tuple = ()
    opener: Opener = field(init=False)
    calls: list = field(default_factory=list)

    def variant(self, side: str, trouble: object) -> object:
        self.calls.append(side)
        if isinstance(trouble, Exception):
            raise trouble
        folder = Path("/nowhere") / side
        manifest = SimpleNamespace(library_sha256=side)
        return SimpleNamespace(folder=folder, id=f"id-{side}", manifest=manifest)


@pytest.fixture
def world(monkeypatch, tmp_path) -> World:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.delenv("PYLLAMAKV_TEST_MODEL", raising=False)
    world = World()

    def build(spec, **_):
        stock = str(spec).endswith("+stock")
        return world.variant(
            *(("stock", world.build_stock) if stock else ("patched", world.build_patched))
        )

    def apply(release, names, **_):
        world.calls.append(("apply", names))
        if isinstance(world.applied, Exception):
            raise world.applied
        return SimpleNamespace(patches=("full-defrag",), skipped=world.skipped)

    def fetch(release, **_):
        if isinstance(world.fetched, Exception):
            raise world.fetched
        return release

    def make(path: Path):
        return (world.make or (lambda side: Rolling(heals=side == "patched")))(path.name)

    make.by_path = True
    world.opener = Opener(make)
    monkeypatch.setattr(checking, "build", build)
    monkeypatch.setattr(
        checking, "build_patched", lambda *_, **__: world.variant("patched", world.build_patched)
    )
    monkeypatch.setattr(checking.apply, "apply", apply)
    monkeypatch.setattr(checking.fetch, "fetch", fetch)
    monkeypatch.setattr(checking.releases, "resolve", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(lab, "open_worker", world.opener)
    return world


def ask(**words) -> checking.Answer:
    return check(Question("0.3.9", scenarios=words.pop("scenarios", SOME), **words))


def test_needed(world: World) -> None:
    """Stock fails, patched passes, every run is kept."""
    answer = ask()
    assert answer.judgement.verdict is Verdict.NEEDED
    runs = len(scenario.find(SOME[0]).settings) + len(scenario.find(SOME[1]).settings)
    assert answer.judgement.runs == runs
    assert [len(answer.runs[side]) for side in ("stock", "patched")] == [runs, runs]
    assert answer.variants == {"stock": "id-stock", "patched": "id-patched"}


def test_a_second_run_starts_nothing(world: World) -> None:
    """Results are remembered by content; --fresh runs them again."""
    first = ask()
    opened = len(world.opener.opened)
    second = ask()
    assert len(world.opener.opened) == opened
    assert second.to_json() == first.to_json()
    ask(fresh=True)
    assert len(world.opener.opened) > opened
    assert all(held.closed for held in world.opener.opened)


def test_broken_apply(world: World) -> None:
    """No text applies and stock fails: a port is due, and nothing patched is built."""
    world.applied = NoTextApplies("src/llama-context.cpp hunk 2")
    answer = ask()
    assert answer.judgement.verdict is Verdict.BROKEN_APPLY
    assert "hunk 2" in answer.judgement.reason
    assert "patched" not in world.calls
    assert {run.outcome.status for run in answer.runs["stock"]} >= {"fail"}


def test_native(world: World) -> None:
    """No text applies and stock passes: upstream does it itself."""
    world.applied = PatchConflict("no such function")
    world.make = lambda side: Rolling(heals=True)
    assert ask().judgement.verdict is Verdict.NATIVE


def test_broken_build(world: World) -> None:
    """The first error of the compiler is the reason."""
    world.build_patched = CommandFailed("x", ["ninja"], 1, "log", "error: no member 'head'")
    answer = ask()
    assert answer.judgement.verdict is Verdict.BROKEN_BUILD
    assert "no member 'head'" in answer.judgement.reason


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("build_stock", CommandFailed("stock is broken", ["ninja"], 1, "log")),
        ("build_stock", ToolMissing("no C++ compiler")),
        ("build_patched", ToolMissing("no C++ compiler")),
        ("fetched", FetchError("no network")),
    ],
)
def test_untestable(world: World, where: str, error: Exception) -> None:
    """What keeps stock from running says nothing about the patch."""
    setattr(world, where, error)
    answer = ask()
    assert answer.judgement.verdict is Verdict.UNTESTABLE
    assert answer.judgement.exit_code == 125
    assert str(error) in answer.judgement.reason


def test_a_library_that_does_not_load(world: World) -> None:
    """A patched one is a broken build; a stock one says nothing about the patch."""

    def refusing(side: str):
        def make(path_side: str) -> Rolling:
            if path_side == side:
                msg = "undefined symbol: ggml_x"
                raise LoadError(msg)
            return Rolling()

        return make

    world.make = refusing("patched")
    answer = ask()
    assert answer.judgement.verdict is Verdict.BROKEN_BUILD
    assert "undefined symbol" in answer.judgement.reason
    world.make = refusing("stock")
    assert ask(fresh=True).judgement.verdict is Verdict.UNTESTABLE


def test_an_unknown_release_is_a_usage_error(world: World) -> None:
    """A wrong name is not called untestable."""
    world.fetched = UnknownRelease("no release 0.3.99")
    with pytest.raises(UnknownRelease):
        ask()


def test_a_harmful_patch_is_red(world: World) -> None:
    """A patched library that loses tokens is named with its scenario and setting."""

    class Losing(Rolling):
        def defrag(self, context):
            report = super().defrag(context)
            cache = self._get(context).cache
            cache.drop(cache.has(1), 1)
            return report

    world.make = lambda side: Losing(heals=True) if side == "patched" else Rolling()
    answer = ask()
    assert answer.judgement.verdict is Verdict.HARMFUL
    assert "fork-then-defrag" in answer.judgement.reason
    assert answer.judgement.scenarios["fragmented"] is Verdict.NEEDED


def test_a_fault_of_ours_is_never_a_verdict(world: World) -> None:
    """A broken scenario ends the check, and nothing is remembered of it."""

    class Odd(Rolling):
        def seq_cp(self, *_):
            raise ZeroDivisionError

    world.make = lambda side: Odd(heals=True)
    with pytest.raises(HarnessError, match="fork-then-defrag"):
        ask()


def test_isolate_takes_the_patches_own_scenarios_and_the_guards(world: World) -> None:
    """One patch is judged by what it names; other guards may not be harmed."""
    answer = ask(isolate="full-defrag", scenarios=(*SOME, "counters"))
    names = set(answer.judgement.scenarios)
    assert "fragmented" in names
    assert "counters" not in names
    assert ("apply", ["full-defrag"]) in world.calls


def test_a_scenario_of_ones_own_is_asked_of_one_patch(world: World, tmp_path: Path) -> None:
    """No shipped patch names it; asked for by name it is judged all the same."""
    text = scenario.find("fragmented").source.read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace('id="fragmented"', 'id="mine"'))
    folders = (tmp_path,)
    answer = ask(isolate="full-defrag", scenarios=("mine", "counters"), folders=folders)
    assert answer.judgement.scenarios == {"mine": Verdict.NEEDED}


def test_a_foreign_patch(world: World, tmp_path: Path) -> None:
    """A file goes through the same doors; a missing one is named."""
    file = tmp_path / "theirs.patch"
    file.write_text("")
    assert ask(patches=(file,)).judgement.verdict is Verdict.NEEDED
    assert ("apply", [str(file)]) in world.calls
    with pytest.raises(UsageError, match="nowhere"):
        ask(patches=(tmp_path / "nowhere.patch",))
    with pytest.raises(UsageError, match="choose one"):
        ask(patches=(file,), isolate="full-defrag")
    with pytest.raises(UsageError, match="full-defrag"):
        ask(isolate="full-defrga")


def test_a_part_of_the_series_left_out(world: World) -> None:
    """Scenarios that only a patch proves that did not apply have no patched side."""
    world.skipped = (SimpleNamespace(id="full-defrag", reason="hunk 4 fails", conflicts=(1,)),)
    answer = ask()
    assert answer.judgement.verdict is Verdict.BROKEN_APPLY
    assert "hunk 4" in answer.judgement.reason
    assert answer.skipped == {"full-defrag": "hunk 4 fails"}


def run_cli(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main.main(["check", *words])
    out, err = capsys.readouterr()
    return int(leaving.value.code or 0), out, err


def names(*chosen: str) -> list[str]:
    return [word for name in chosen for word in ("--scenario", name)]


def test_the_command_prints_table_maps_and_verdict(world: World, capsys) -> None:
    """People read the table; the verdict is the last line, unbroken."""
    code, out, _ = run_cli(capsys, "0.3.9", *names(*SOME))
    assert code == 0
    assert "fork-then-defrag" in out
    assert "128 of 256 cells used, 128 holes" in out
    last = out.strip().splitlines()[-1]
    assert last.startswith("needed: stock fails ")
    assert last.endswith("patched passes all")


def test_the_command_prints_json_and_junit(world: World, capsys, tmp_path: Path) -> None:
    """JSON on stdout is the whole answer; JUnit counts only what is wrong with patched."""
    file = tmp_path / "junit.xml"
    code, out, _ = run_cli(capsys, "0.3.9", "--json", "--junit", str(file), *names(*SOME))
    found = json.loads(out)
    assert (code, found["verdict"], found["exit_code"]) == (0, "needed", 0)
    assert set(found["results"]) == {"stock", "patched"}
    root = ET.parse(file).getroot()
    assert [suite.get("failures") for suite in root] == ["0", "0", "0"]
    assert len(root[0]) == len(found["results"]["stock"])


def test_the_command_tells_bisect(world: World, capsys) -> None:
    """1 for bad, 125 for skip, 128 for a fault of the harness, 2 for a wrong question."""
    world.make = lambda side: Rolling()
    assert run_cli(capsys, "0.3.9", *names(*SOME))[0] == 1
    world.build_stock = CommandFailed("x", ["ninja"], 1, "log")
    assert run_cli(capsys, "0.3.9", *names(*SOME))[0] == 125
    world.build_stock = ZeroDivisionError("oops")
    code, _, err = run_cli(capsys, "0.3.9", *names(*SOME))
    assert code == 128
    assert "oops" in err
    assert run_cli(capsys, "0.3.9", "--scenario", "fragmentd")[0] == 2


def test_summaries() -> None:
    """A side's settings in a few words."""
    from pyllamakv.harness.verdict import Outcome

    good, skip, lost = Outcome("pass"), Outcome("skip"), Outcome("fail", "lost")
    assert report.summary([good, skip]) == "passes 1"
    assert report.summary([good, lost]) == "fails 1/2: lost"
    assert report.summary([skip]) == "skipped"
    assert report.summary([None]) == "not patched"
    assert report.summary([Outcome("absent")]) == "absent 1/1"
