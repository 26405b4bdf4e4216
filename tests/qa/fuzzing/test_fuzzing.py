"""Test that fuzzing finds planted faults, and that inputs of earlier findings are harmless."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pyllamakv as kv
from pyllamakv.errors import (
    DecodeError,
    HarnessError,
    KvError,
    KVFileDamaged,
    Untestable,
)
from pyllamakv.runtime.context import Context
from pyllamakv.scenarios import synthetic_models
from qa import fuzzing
from qa.entry import StressOptions
from qa.fuzzing import libfuzzer, native_targets
from qa.fuzzing.libfuzzer import FuzzResult
from qa.fuzzing.target import Target, WrongAnswer

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.usefixtures("fuzz_targets")

NATIVE = ("restore", "kept")
READERS = [name for name in fuzzing.TARGETS if name not in NATIVE]


def target(name: str, folder: Path) -> Target:
    """Return a target of the section by its name."""
    module, _, function = fuzzing.TARGETS[name].partition(":")
    made = getattr(importlib.import_module(f"qa.fuzzing.{module}"), function)(folder)
    assert isinstance(made, Target)
    return made


def fuzz(name: str, folder: Path, seconds: float = 20.0, timeout: int = 60) -> FuzzResult:
    """Fuzz a target of the kit until its first finding; skip the test without Atheris."""
    try:
        program = libfuzzer.python_program(f"fuzz_kit:{name}", folder)
    except Untestable as reason:
        pytest.skip(str(reason))
    (folder / "corpus").mkdir()
    return libfuzzer.fuzz(
        program, seconds, folder, seed=1, corpora=[folder / "corpus"], most=1, timeout=timeout
    )


@pytest.mark.parametrize("name", READERS)
def test_every_reader_accepts_its_seeds(name: str, tmp_path: Path) -> None:
    """Mutations of an invalid input would rarely pass the first check."""
    reader = target(name, tmp_path)
    for seed in reader.seeds:
        assert list(reader.run(seed)) != ["none"]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.regression(
    "malformed responses of a worker raised untyped errors",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a response of a worker with a body larger than memory raised an untyped error",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a saved sequence with an invalid number of tokens raised an untyped error or passed the check",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a saved sequence with a deeply nested header raised RecursionError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a deeply nested lock, `series.toml` or `patch.toml` raised RecursionError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a patch outside of its directory could be named by a `series.toml`, and was read",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "ids, bases and file names of a series that are invalid as paths raised untyped errors",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a quilt series file that is not UTF-8 raised UnicodeDecodeError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a patch with a truncated line of a mode or a name raised IndexError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a mode in a patch that is not ASCII raised UnicodeDecodeError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "an author in a patch with deeply nested comments raised RecursionError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "an author in a patch with an invalid encoding raised an untyped error",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "`/dev/null` was accepted as the name of a renamed or copied file",
    by="hostile input",
    of="Python",
)
def test_readers_accept_or_refuse_inputs_of_earlier_findings(name: str, tmp_path: Path) -> None:
    """Inputs in `tests/data/corpora` are accepted, or refused with errors of this package."""
    folder = fuzzing.corpora(name)
    reader = target(name, tmp_path)
    for path in sorted(folder.iterdir()) if folder else ():
        try:
            list(reader.run(path.read_bytes()))
        except KvError as error:
            assert str(error)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.regression(
    "a state with other positions than its save was restored, so that cells and ledger differed",
    by="fuzzing",
    of="Python",
)
def test_contexts_accept_or_refuse_inputs_of_earlier_findings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs run in their own process, which must not end."""
    monkeypatch.setattr(fuzzing, "home", lambda: tmp_path)
    try:
        made, (accepted, _) = fuzzing.run(name, 0, 1)
    except Untestable as reason:
        pytest.skip(str(reason))
    assert not made.findings
    assert made.inputs >= 3 and accepted >= 1


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", ["restore", "kept"])
def test_a_context_that_no_longer_decodes_is_a_finding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not count as a refusal of the input, and later inputs run again."""
    made = target(name, tmp_path)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise DecodeError("llama_decode gave -3", code=-3)

        patch.setattr(Context, "decode", fail)
        with pytest.raises(WrongAnswer, match="the context no longer works: DecodeError"):
            list(made.run(made.seeds[1]))
    list(made.run(made.seeds[1]))


@pytest.mark.native
def test_only_a_full_cache_may_refuse_a_decode(patched: Variant) -> None:
    """A decode without free cells may fail; an error with free cells is a finding."""
    library = kv.open(patched.folder)
    with library, library.load_model(synthetic_models.tiny()).context(n_ctx=32) as context:
        own = context.sequence()
        own.prefill([1] * context.kv.stats.free)
        native_targets.goes_on(context, own.feed([1]))
        assert context.kv.stats.free == 0
        own.trim(20)
        with pytest.raises(WrongAnswer, match="UsageError"):
            native_targets.goes_on(context, own.feed([-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("key_error", "KeyError: "),
        ("dying", "ERROR: libFuzzer: deadly signal"),
        ("busy", "ERROR: libFuzzer: timeout after"),
        ("silent", "ERROR: libFuzzer: timeout after"),
        ("greedy", "MemoryError"),
        ("fussy", "WrongAnswer: a valid input is refused: no 7"),
    ],
)
def test_planted_faults_of_readers_are_found(name: str, what: str, tmp_path: Path) -> None:
    """They are exceptions, crashes, endless loops, a huge length and a refused seed."""
    (finding,) = fuzz(name, tmp_path, timeout=2).findings.values()
    assert finding.what.startswith(what)
    assert name == "greedy" or finding.data


@pytest.mark.slow
def test_a_correct_reader_has_no_findings(tmp_path: Path) -> None:
    """The counts are those of the run, and inputs that reach new code are stored."""
    made = fuzz("sound", tmp_path, 2)
    accepted, refused = libfuzzer.counts(tmp_path)
    assert not made.findings
    assert made.inputs > 10 and made.cpu > 0
    assert accepted and refused and abs(accepted + refused - made.inputs) <= 1
    assert list((tmp_path / "corpus").iterdir())


@pytest.mark.slow
def test_a_target_that_cannot_start_is_an_error_of_the_harness(tmp_path: Path) -> None:
    """An import error is not a finding."""
    with pytest.raises(HarnessError, match="no attribute 'nothing'"):
        fuzz("nothing", tmp_path, 5)


@pytest.mark.slow
def test_the_section_stores_the_input_of_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An entry counts inputs; the input of a defect is in the data directory."""
    monkeypatch.setattr(fuzzing, "home", lambda: tmp_path)
    monkeypatch.setattr(
        libfuzzer,
        "python_program",
        lambda _target, folder, real=libfuzzer.python_program: real("fuzz_kit:key_error", folder),
    )
    (entry,) = fuzzing.entries(StressOptions(seconds=5, seed=5, only=("lock",)), lambda _: None)
    if entry.skip_reason:
        pytest.skip(entry.skip_reason)
    assert not entry.passed and "KeyError" in entry.defects[0] and entry.seed == 5
    assert set(entry.row) == {
        "inputs", "accepted", "CPU seconds", "per CPU second", "reached", "corpus",
    }  # fmt: skip
    saved = [each.read_bytes() for each in (tmp_path / "fuzzing" / "lock").iterdir()]
    assert saved and all(each.startswith(b"PLK") for each in saved)


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A target that cannot run is neither a success nor a defect."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fuzzing, "home", lambda: tmp_path)
    (entry,) = fuzzing.entries(StressOptions(seconds=2, only=(fuzzing.HEADER,)), lambda _: None)
    assert entry.skip_reason.startswith("skipped: found no clang") and not entry.ran


@pytest.mark.native
@pytest.mark.usefixtures("patched")
def test_corrected_checksums_are_those_of_the_header(tmp_path: Path) -> None:
    """Correcting the checksums of an intact file changes nothing."""
    seeds = target("kept", tmp_path).seeds
    assert [native_targets.with_file_checksums(each) for each in seeds] == list(seeds)
    torn = bytearray(seeds[1])
    torn[native_targets.SIZE + 8] ^= 2  # a sequence of the first cell
    assert native_targets.with_file_checksums(bytes(torn)) != bytes(torn)


@pytest.mark.native
@pytest.mark.usefixtures("patched")
def test_a_kept_file_with_an_unknown_sequence_is_refused(tmp_path: Path) -> None:
    """Cells of unknown sequences are damage, even with correct checksums."""
    made = target("kept", tmp_path)
    strange = bytearray(made.seeds[1])
    strange[native_targets.SIZE + 8] = 1 << 5  # the first cell is that of sequence 5, of three
    with pytest.raises(KVFileDamaged, match="without a sequence"):
        list(made.run(native_targets.with_file_checksums(bytes(strange))))


@pytest.mark.slow
def test_planted_faults_of_the_header_are_found(tmp_path: Path) -> None:
    """A crash in place of an error is found, with its input."""
    right = 'throw error(FAILURE_DAMAGED, path + " is damaged: the sum of its content is wrong");'
    text = libfuzzer.header_text()
    assert text.count(right) == 1
    try:
        program = libfuzzer.header_program(tmp_path, text.replace(right, "std::abort();"))
    except Untestable as reason:
        pytest.skip(str(reason))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    made = libfuzzer.fuzz(program, 30, tmp_path, seed=1, corpora=[corpus], most=1)
    (finding,) = made.findings.values()
    assert "deadly signal" in finding.what and libfuzzer.HEADER in finding.where
    assert made.coverage > 100 and finding.data
    assert list(corpus.iterdir())
