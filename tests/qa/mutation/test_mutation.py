"""Mutants are made by rules and run by scenarios; an undetected one is a defect."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mutation_kit import some

from pyllamakv.errors import PatchFormatError
from pyllamakv.patching import series
from pyllamakv.patching.hunks import Hunk
from pyllamakv.scenarios import scenario
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.verification import discovery, parallel_runs
from pyllamakv.verification.header_tests import HEADERS
from qa import mutation as mutants
from qa.entry import StressOptions
from qa.mutation import (
    equivalent_mutants,
    header_tests,
    mutant,
    mutant_results,
    mutant_schemata,
    mutation_run,
    operators,
    scenario_runs,
)
from qa.mutation.mutant import Made, Mutant
from qa.mutation.mutant_evaluation import MutantEvaluator
from qa.mutation.mutant_results import MutantResult
from qa.mutation.scenario_runs import ScenarioRun

RELEASE = "0.3.9"


def made_of(line: str, above: str = "") -> set[str]:
    """Return what a line of code becomes."""
    return {change.now.strip() for change in operators.changes(line, above)}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("    for (int i = 0; i < n; ++i) {", {"for (int i = 0; i <= n; ++i) {"}),
        ("x = p[n - 1] + 1;", {"x = p[n] + 1;", "x = p[n - 1];", ""}),
        ("n = std::min(a, b);", {"n = std::max(a, b);", ""}),
        ("const auto * k = k_l[il];", {"const auto * k = v_l[il];"}),
        ("add(tensors, v, v_trans, size);", {"add(tensors, v, !v_trans, size);", ""}),
        ("if (ok) {", {"if (!(ok)) {"}),
        ("if (a == b) {", {"if (a != b) {", "if (!(a == b)) {"}),
        ("return true;", {"return false;"}),
        ("return !found;", {"return found;"}),
        ("return a && b;", {"return a || b;", "return !(a && b);"}),
        ("pending.ranges.clear();", {""}),
        ("h->generation++;", {""}),
        ("do_defrag = false;", {""}),
        ("throw error(FAILURE_IO, path);", {""}),
        ("break;", {""}),
        ("while (x) {  // if (y) {", {"while (!(x)) {  // if (y) {"}),
    ],
)
def test_operators(line: str, wrong: set[str]) -> None:
    """Each slip of the hand is made, and no other."""
    assert made_of(line) == wrong


@pytest.mark.parametrize(
    "line",
    [
        "// i < n",
        "#if N < 2",
        "GGML_ASSERT(i < n);",
        'LLAMA_LOG_WARN("%d < %d", i, n);',
        "std::vector<int> found;",
        "size_t size() const { return n; }",
        "file() = default;",
        "}",
        "",
    ],
)
def test_what_is_left_alone(line: str) -> None:
    """Comments, asserts, logs, declarations and strings are no code to make wrong."""
    assert made_of(line) == set()


def test_statements_go_whole_or_not_at_all() -> None:
    """Lines of a statement that spans several lines are not removed."""
    assert "" in made_of("    call(b);", "    call(a);")
    assert "" not in made_of("    call(b);", "    x = y +")
    assert "" not in made_of("    call(a,", "}")
    assert made_of('    call("a < b");') == {""}


class Says:
    """Return given results, and count the calls."""

    def __init__(self, answers: dict[str, MutantResult], known: tuple[str, ...] = ()) -> None:
        self.answers, self.known, self.asked = answers, known, []

    def recall(self, each: Mutant) -> MutantResult | None:
        return self.answers[each.now] if each.now in self.known else None

    def answer(self, each: Mutant, deadline: float) -> MutantResult:
        self.asked.append(each.now)
        return self.answers[each.now]


def test_a_survivor_is_a_defect() -> None:
    """An undetected mutant is reported with its place; an accepted one is not tested."""
    answers = {
        "a": MutantResult("scenario", "story", "data: wrong"),
        "b": MutantResult("survivor"),
        "c": MutantResult("compiler", "the compiler", "no such name"),
        "d": MutantResult("same code"),
        "e": MutantResult(mutant_results.UNFINISHED),
    }
    judge = Says(answers)
    known = equivalent_mutants.EquivalentMutant("f.h", "x", "z", "It is the same.")
    made = Made(tuple(some(now) for now in (*answers, "z")), {"comment": 1})
    found = mutation_run.run(made, [known], [judge], seed=1, deadline=time.monotonic() + 60)  # type: ignore[list-item]
    assert sorted(judge.asked) == sorted(answers)
    entry = found.entry("0.3.9 p", 1)
    assert entry.defects == ("no test detects f.h:3: bound: `x` became `b`",)
    assert entry.row["caught"] == "2 of 3" and entry.row["caught most"] == "story 1"
    assert (entry.row["mutants"], entry.row["tried"], entry.row["equivalent"]) == ("6", "4", "1")


class Runs:
    """Stand in for the switched library and its workers: every trial meets the mutant."""

    def __init__(self, numbers: dict[str, int], *outcomes: Outcome) -> None:
        self.numbers, self.outcomes = numbers, list(outcomes)

    def benches(self, number: int) -> contextlib.AbstractContextManager[Runs]:
        return contextlib.nullcontext(self)

    def covered(self, each: ScenarioRun) -> frozenset[int]:
        return frozenset(self.numbers.values())

    def run(self, *_: object) -> Any:
        return self.outcomes.pop(0)


@pytest.mark.parametrize(
    ("kind", "outcome", "stock", "comes_of_it"),
    [
        ("fix", Outcome("fail", "data"), None, "scenario"),
        ("guard", Outcome("fault", message="of ours"), None, mutant_results.NOT_EVALUATED),
        ("fix", Outcome("absent"), None, "survivor"),
        ("fix", Outcome("absent"), Outcome("absent"), "survivor"),
        ("fix", Outcome("absent"), Outcome("fail", "data"), "scenario"),
        ("feature", Outcome("absent"), None, "scenario"),
        ("guard", Outcome("skip"), None, "survivor"),
        ("guard", Outcome("skip"), Outcome("fault"), "survivor"),
        ("guard", Outcome("skip"), Outcome("pass"), "scenario"),
    ],
)
def test_a_catch_is_what_check_counts(
    tmp_path: Path, monkeypatch, kind: Any, outcome: Outcome, stock: Outcome | None, comes_of_it
) -> None:
    """A fault of the harness catches nothing, nor does what stock cannot run either."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setattr(
        parallel_runs,
        "run_tasks",
        lambda tasks: {task: SimpleNamespace(outcome=stock) for task in tasks},
    )
    built = SimpleNamespace(id="v", folder=tmp_path, manifest=SimpleNamespace(library_sha256="d"))
    made = SimpleNamespace(error="", library=tmp_path)
    shop = SimpleNamespace(folder=tmp_path, build=lambda *_, **__: made)
    story = scenario.Scenario("story", kind, "It is so.", "", print, settings=scenario.CACHES[:1])
    runs = Runs({some().id: 1}, outcome)
    judge = MutantEvaluator(built, shop, [story], (), {}, runs, built if stock else None)  # type: ignore[arg-type]
    found = judge.answer(some(), time.monotonic() + 60)
    assert found.outcome == comes_of_it
    assert (judge.recall(some()) == found) is (comes_of_it != mutant_results.NOT_EVALUATED)
    # A catch is its catcher's word; that nobody minds is also what ran them.
    monkeypatch.setattr(parallel_runs, "code_digest", lambda: "another")
    assert (judge.recall(some()) == found) is (comes_of_it == "scenario")
    entry = mutation_run.MutationResult(Made((some(),), {}), 0, ((some(), found),)).entry("p", 1)
    assert entry.passed is (comes_of_it == "scenario")
    if comes_of_it == mutant_results.NOT_EVALUATED:
        assert entry.row["tried"] == "0"
        assert entry.defects[0].endswith("has no result: story [plain f16] fault: of ours")


@pytest.mark.parametrize("quick", [False, True])
def test_a_quick_evaluation_runs_what_check_quick_does(tmp_path: Path, monkeypatch, quick) -> None:
    """It runs the quick settings of each scenario, and nothing behind an RPC server."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))

    class AllRuns(Runs):
        def run(self, *given: object) -> Any:
            ran.extend(given)
            return Outcome("pass")

    ran: list[Any] = []
    built = SimpleNamespace(id="v", folder=tmp_path, manifest=SimpleNamespace(library_sha256="d"))
    made = SimpleNamespace(error="", library=tmp_path)
    shop = SimpleNamespace(folder=tmp_path, build=lambda *_, **__: made)
    story = scenario.Scenario("story", "fix", "It is so.", "", print)
    judge = MutantEvaluator(
        built,  # type: ignore[arg-type]
        shop,  # type: ignore[arg-type]
        [story],
        (story.id,),
        {},
        AllRuns({some().id: 1}),
        quick=quick,
    )
    assert judge.answer(some(), time.monotonic() + 60).outcome == "survivor"
    local = [each.setting for each in ran if each.backend == "cpu"]
    assert set(local) == set(story.few if quick else story.settings)
    assert [each.setting for each in ran if each.backend == "rpc"] == [*story.few] * (not quick)


def test_a_fault_is_tried_once_more(monkeypatch) -> None:
    """What comes twice is believed, of hangs and of the harness's own faults."""
    fault, passed = Outcome("fault"), Outcome("pass")
    answers = [SimpleNamespace(outcome=each) for each in (fault, passed, fault, fault)]
    monkeypatch.setattr(scenario_runs, "ScenarioRunner", lambda *_: Runs({}, *answers))
    story = ScenarioRun(SimpleNamespace(), scenario.CACHES[0])  # type: ignore[arg-type]
    benches = scenario_runs.MutantRunner(Path("/nowhere"))
    assert benches.run(story) == passed
    assert benches.run(story) == fault


def test_time_is_kept_and_chance_is_seeded() -> None:
    """Without time only what is known counts; a seed gives one order, another seed another."""
    answers = {str(n): MutantResult("scenario", "story") for n in range(30)}
    made = Made(tuple(some(now) for now in answers), {})
    judge = Says(answers, known=("3", "4"))
    found = mutation_run.run(made, [], [judge], seed=1, deadline=time.monotonic() - 1)  # type: ignore[list-item]
    assert judge.asked == [] and len(found.answers) == 2
    nothing = mutation_run.run(made, [], [Says(answers)], seed=1, deadline=time.monotonic() - 1)  # type: ignore[list-item]
    assert nothing.entry("0.3.9 p", 1).defects == (
        "none of 30 mutants was tested: increase --seconds",
    )
    orders = []
    for seed in (1, 1, 2):
        judge = Says(answers)
        mutation_run.run(made, [], [judge], seed=seed, deadline=time.monotonic() + 60)  # type: ignore[list-item]
        orders.append(judge.asked)
    assert orders[0] == orders[1] != orders[2]
    judge = Says(answers)
    mutation_run.run(made, [], [judge], seed=1, deadline=time.monotonic() + 60, most=3)  # type: ignore[list-item]
    assert judge.asked == orders[0][:3]


def test_an_answer_is_kept_as_long_as_its_catcher_is_the_same(tmp_path, monkeypatch) -> None:
    """A changed scenario runs again; after an undetected mutant, all scenarios do."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    name, digests = mutant_results.key("one"), {"story": "1", "other": "1", "": "11"}
    for answer, changed in (
        (MutantResult("scenario", "story", "data"), {"story": "2", "": "21"}),
        (MutantResult("survivor"), {"other": "2", "": "12"}),
    ):
        mutant_results.store_result(name, answer, digests)
        assert mutant_results.load_result(name, digests) == answer
        assert mutant_results.load_result(name, digests | changed) is None
    mutant_results.store_result(
        mutant_results.key("two"), MutantResult(mutant_results.UNFINISHED), digests
    )
    assert mutant_results.load_result(mutant_results.key("two"), digests) is None


@pytest.mark.slow
def test_every_accepted_mutant_is_one_still() -> None:
    """The shipped list matches the shipped patches; an entry of a missing line is reported."""
    known = equivalent_mutants.load()
    shipped = series.load()
    assert not equivalent_mutants.stale(known, shipped)
    gone = equivalent_mutants.EquivalentMutant("src/llama-kv-defrag.h", "no such line", "", "")
    lost = replace(gone, was="", hunk="no such hunk")
    assert equivalent_mutants.stale([*known, gone, lost], shipped) == [gone, lost]
    (entry,) = mutants.entries(StressOptions(only=(mutants.ACCEPTED,)), lambda about: None)
    assert entry.passed and entry.row["equivalent"] == str(len(known))


def test_a_patch_that_a_release_is_not_given_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names it beside another would take its silence for nothing found."""
    prepared = SimpleNamespace(patched=SimpleNamespace(patches=("compaction",)))
    monkeypatch.setattr(mutants, "prepare_release", lambda *_: contextlib.nullcontext(prepared))
    (entry,) = mutants.entries(StressOptions(only=("0.3.36 full-defrag",)), lambda about: None)
    assert not entry.ran
    assert entry.skip_reason == "skipped: the series does not have this patch on 0.3.36"


def test_an_acceptance_names_its_place() -> None:
    """The same line elsewhere is another mutant where the line above is named."""
    anywhere = equivalent_mutants.EquivalentMutant("f.h", "x", "y", "It is the same.")
    here = replace(anywhere, above="first();")
    first, second = some(above="    first();"), some(above="    second();")
    assert anywhere.covers(first) and anywhere.covers(second)
    assert here.covers(first) and not here.covers(second)
    assert not anywhere.covers(some("z"))


def test_an_acceptance_of_a_hunk_names_its_code(tmp_path: Path) -> None:
    """Another hunk of the file is another mutant, and so is one with a line more."""
    path = tmp_path / "some.toml"
    head = 'schema = 1\n[[mutant]]\nfile = "f.h"\nwhy = "why"\nhunk = """\none();\ntwo();\n"""\n'
    path.write_text(head, encoding="utf-8")
    (known,) = equivalent_mutants.load(path)
    lines = (b"-    gone();\n", b"+    // why\n", b"+    one(); // why\n", b"+    two();\n")
    lost = mutant._dropped("p", "f.h", Hunk(1, 1, 1, 1, b"@@", lines))
    assert known.covers(lost) and known.hunk in str(known)
    assert not known.covers(replace(lost, file="g.h"))
    assert not known.covers(replace(lost, operator="bound"))
    more = mutant._dropped("p", "f.h", Hunk(1, 1, 1, 1, b"@@", (*lines, b"+    three();\n")))
    assert not known.covers(more)
    path.write_text(head + 'was = "one();"\n', encoding="utf-8")
    with pytest.raises(PatchFormatError, match="excludes"):
        equivalent_mutants.load(path)


def test_judges_share_the_work() -> None:
    """Each mutant is tested once, by one of the evaluators."""
    answers = {str(n): MutantResult("scenario", "story") for n in range(30)}
    made = Made(tuple(some(now) for now in answers), {})
    judges = [Says(answers), Says(answers)]
    found = mutation_run.run(made, [], judges, seed=1, deadline=time.monotonic() + 60)  # type: ignore[arg-type]
    assert sorted(judges[0].asked + judges[1].asked) == sorted(answers)
    assert len(found.answers) == 30


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "`why`"),
        ('why = "a"\n[[mutant]]\nfile = "f"\nwas = "w"\nwhy = "b"\n', "twice"),
    ],
)
def test_an_acceptance_needs_a_reason(tmp_path: Path, text: str, says: str) -> None:
    """Nobody accepts a mutant without saying why, or twice."""
    path = tmp_path / "some.toml"
    head = 'schema = 1\n[[mutant]]\nfile = "f"\nwas = "w"\n'
    path.write_text(head + text, encoding="utf-8")
    with pytest.raises(PatchFormatError, match=says):
        equivalent_mutants.load(path)


@pytest.fixture(scope="module")
def bench(patched):
    """Prepare the objects of the test release once."""
    with mutants.prepare_release(RELEASE, series.load()) as prepared:
        yield prepared


@pytest.mark.slow
@pytest.mark.native
def test_a_mutant_from_end_to_end(bench, patched, tmp_path, monkeypatch) -> None:
    """A flag that is not cleared is detected by a scenario, and by none if there is none."""
    made = bench.made["full-defrag"]
    assert len(made.mutants) > 300 and made.left_out["assert or log"]
    assert len({each.id for each in made.mutants}) == len(made.mutants)
    kept_ranges = next(
        each
        for each in made.mutants
        if each.was.strip() == "pending.ranges.clear();" and each.operator != mutant.HUNK
    )
    others = [each for each in made.mutants if each.operator == mutant.HUNK][:1]
    broken = some("#error wrong", file=kept_ranges.file, patch="full-defrag")
    broken.files.clear()
    broken.files[kept_ranges.file] = b"#error wrong\n"
    every = discovery.discover()
    own = ("abort-after-defrag", "fail-defrag-fail", "fail-between-ubatches")
    monkeypatch.setattr(mutant_results, "_folder", lambda: tmp_path)
    (shop,) = bench.builders
    deadline = time.monotonic() + 600
    chosen = [every[name] for name in own]
    alone = MutantEvaluator(patched, shop, chosen, own, bench.header_tests).answer(
        kept_ranges, deadline
    )
    judge = MutantEvaluator(patched, shop, chosen, own, bench.header_tests, bench.switched)
    assert bench.switched is not None and kept_ranges.id in bench.switched.numbers
    shutil.rmtree(tmp_path, ignore_errors=True)
    found = judge.answer(kept_ranges, deadline)
    assert found.outcome == "scenario" and found.by in own, found
    assert judge.recall(kept_ranges) == found
    assert (alone.outcome, alone.by) == (found.outcome, found.by), "it is no other when switched"
    assert judge.answer(broken, deadline).outcome == "compiler"
    nobody = MutantEvaluator(patched, shop, [], (), bench.header_tests, bench.switched)
    tally = mutation_run.run(Made((kept_ranges,), {}), [], [nobody], seed=1, deadline=deadline)
    assert len(tally.entry("planted", 1).defects) == 1
    assert others and others[0].files
    # The tree is as it was: the next mutant starts from there.
    assert shop.build({}, tmp_path / "none", all_of_it=False).same


@pytest.mark.slow
def test_a_header_is_judged_by_its_own_tests(tmp_path, monkeypatch) -> None:
    """Where a program tests a header alone it is asked, and only what is wrong fails."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    header = next(each for each in HEADERS if each.patch == "full-defrag")
    text = series.load().definition("full-defrag").port(RELEASE)
    (hunk,) = text.patch.file(header.path).hunks
    assert header.source is not None
    driver = header_tests.HeaderTest(header, b"".join(hunk.added), header.source)
    assert driver.judge(driver.text.replace(b"src = cell_t();", b"")).group == "kv_defrag cells"
    assert driver.judge(driver.text.replace(b"src = cell_t();", b"nonsense")).error
    (wrong,) = [
        each
        for each in mutant.listed(text)
        if each.was.strip() == "src = cell_t();" and not each.now
    ]
    lines = driver.text.split(b"\n")
    place = lines.index(wrong.was.encode()) + 1
    made = replace(wrong, line=place, files={header.path: b"any"})
    switched = mutant_schemata.build_schemata([made], {header.path: driver.text})
    driver.switch(switched.files[header.path])
    said = driver.choose(switched.numbers[made.id])
    assert said is not None and said.group == "kv_defrag cells"


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ([b"+\n", b"+    // why\n", b"+    done();\n"], "done();"),
        ([b" before();\n", b"+    if (all) {\n", b"+    }\n"], "if (all) {"),
        ([b"+    done();\n", b"+    more();\n"], ""),
        ([b"+    done();\n", b"+    GGML_ASSERT(all);\n"], ""),
        ([b"-    other();\n", b"+    done();\n"], ""),
        ([b"+#include <map>\n"], ""),
    ],
)
def test_a_hunk_goes_by_a_line_that_is_all_it_changes(lines: list[bytes], line: str) -> None:
    """What is accepted of one line says nothing of the loss of several."""
    hunk = Hunk(1, 1, 1, 1, b"@@", tuple(lines))
    assert mutant._only(hunk).strip() == line
    lost = Mutant("p", "f.h", 1, mutant.HUNK, mutant._only(hunk))
    assert equivalent_mutants.EquivalentMutant("f.h", "done();", "", "why").covers(lost) is (
        line == "done();"
    )
