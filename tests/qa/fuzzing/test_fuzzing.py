"""The fuzzer finds what is planted, and what it found once stays away."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

import pyllamakv as kv
from pyllamakv.errors import DecodeError, HarnessError, KVFileDamaged, StateError, Untestable
from pyllamakv.runtime.context import Context
from pyllamakv.scenarios import synthetic_models
from qa import fuzzing
from qa.fuzzing import kv_file_checksums, libfuzzer, native_targets, target_process
from qa.fuzzing.call_generator import EXCLUDED, CallGenerator, unpacked
from qa.fuzzing.fuzz_loop import FuzzFinding, FuzzLoop
from qa.fuzzing.mutate import Bytes
from qa.fuzzing.signatures import entries
from qa.fuzzing.target import Target, WrongAnswer

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.usefixtures("fuzz_targets")

NATIVE = ("restore", "kept", "entry-points")
READERS = [name for name in fuzzing.TARGETS if name not in NATIVE]


def found(target: str, folder: Path, seconds: float = 20.0, silence: float = 120.0) -> list[str]:
    """Return what is found in a target of the kit, ending with the first finding."""
    made = target_process.fuzz(
        f"fuzz_kit:{target}", seconds, folder=folder, silence=silence, most=1
    )
    return [f"{each.what} {each.where}" for each in made.findings.values()]


@pytest.mark.parametrize("name", READERS)
def test_every_seed_is_taken(name: str, tmp_path: Path) -> None:
    """What is made of one that is refused would seldom get further than it did."""
    reader = target(name, tmp_path)
    for seed in reader.seeds:
        assert list(reader.run(seed)) != ["none"]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.regression(
    "answers of a worker that are no messages, or of another shape, were bare errors of Python",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "an answer of a worker that claims a body larger than memory was a bare error of Python",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a saved sequence that counts fewer than no tokens, or more than there can be, was a bare "
    "error or got past the check",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a saved sequence whose head nests without end was a bare RecursionError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a lock, a `series.toml` or a `patch.toml` that nests without end was a bare RecursionError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a `series.toml` could name a patch outside of its folder, which was then read",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "ids, bases and names of files in a series that no file can have were bare errors of Python",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a quilt list of patches that is not a text was a bare UnicodeDecodeError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a patch with half a line where a mode or a name belongs was a bare IndexError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "a mode in a patch that is not a text was a bare UnicodeDecodeError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "an author in a patch with comments within comments was a bare RecursionError",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "an author in a patch whose encoding cannot be undone was a bare error of Python",
    by="fuzzing",
    of="Python",
)
@pytest.mark.regression(
    "`/dev/null` passed for the name of a file that a patch renames or copies",
    by="hostile input",
    of="Python",
)
def test_what_was_found_stays_away(name: str, tmp_path: Path, timer: None) -> None:
    """Seeds are taken, and kept inputs are too, or refused with errors of this package."""
    loop = FuzzLoop(target(name, tmp_path))
    loop.run(0, tuple(path.read_bytes() for path in fuzzing.kept(name)))
    assert not [(each.what, each.where) for each in loop.findings.values()]
    assert loop.inputs >= 2


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.regression(
    "a state whose cells lie at other positions than its save says was restored, so that cells "
    "and ledger differed",
    by="fuzzing",
    of="Python",
)
def test_what_was_found_in_contexts_stays_away(name: str, tmp_path: Path) -> None:
    """The same for what reaches the library: in a process of its own, which must not end."""
    made = target_process.fuzz(
        f"qa.fuzzing.{fuzzing.TARGETS[name]}", 0.1, folder=tmp_path,
        kept=fuzzing.kept(name),
    )  # fmt: skip
    assert not made.findings
    assert made.inputs >= 3 and made.accepted >= 1


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", ["restore", "kept"])
def test_a_context_that_decodes_no_more_is_found(
    name: str, tmp_path: Path, timer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not pass for the refusal of an input, and later inputs are not blamed for it."""
    made = target(name, tmp_path)
    loop, seed = FuzzLoop(made), made.seeds[1]
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise DecodeError("llama_decode gave -3", code=-3)

        patch.setattr(Context, "decode", fail)
        finding = loop.run_input(seed)
    assert finding is not None
    assert finding.what.startswith("WrongAnswer: the context no longer works: DecodeError")
    assert loop.run_input(seed) is None and not loop._refusal


@pytest.mark.native
def test_only_a_full_cache_may_refuse(patched: Variant) -> None:
    """Without free cells there is nothing to expect, with some there is."""
    library = kv.open(patched.folder)
    with library, library.load_model(synthetic_models.tiny()).context(n_ctx=32) as context:
        own = context.sequence()
        context.prefill(own, [1] * context.kv.stats.free)
        native_targets.goes_on(context, own.feed([1]))
        assert context.kv.stats.free == 0
        own.trim(20)
        with pytest.raises(WrongAnswer, match="UsageError"):
            native_targets.goes_on(context, own.feed([-1]))


def target(name: str, folder: Path) -> Target:
    """Return a target by its name in the section."""
    module, _, function = fuzzing.TARGETS[name].partition(":")
    made = getattr(importlib.import_module(f"qa.fuzzing.{module}"), function)(folder)
    assert isinstance(made, Target)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("key_error", "KeyError: "),
        ("dying", "died: status -6"),
        ("busy", "Hung: "),
        ("greedy", "MemoryError: "),
    ],
)
def test_planted_faults_are_found(name: str, what: str, tmp_path: Path) -> None:
    """A bare exception, an end, a loop without end, and a length that is believed."""
    (said,) = found(name, tmp_path)
    assert said.startswith(what)


@pytest.mark.slow
def test_silence_in_c_is_found(tmp_path: Path) -> None:
    """What no signal of Python can interrupt is ended from outside, and its input kept."""
    made = target_process.fuzz("fuzz_kit:silent", 20, folder=tmp_path, silence=1.0, most=1)
    (finding,) = made.findings.values()
    assert finding.what.startswith("hung") and len(finding.data) > 3
    assert made.accepted == made.inputs - 1


@pytest.mark.slow
def test_a_sound_reader_has_no_findings(tmp_path: Path) -> None:
    """Nothing is made up, and the numbers are those of the run."""
    made = target_process.fuzz("fuzz_kit:sound", 0.5, folder=tmp_path)
    assert not made.findings
    assert made.inputs > 10 and made.coverage > 0 and made.cpu > 0
    assert made.accepted and made.refused and made.accepted + made.refused == made.inputs


@pytest.mark.slow
def test_a_target_that_cannot_begin_is_no_finding(tmp_path: Path) -> None:
    """A fault of the harness is reported as such."""
    with pytest.raises(HarnessError, match="cannot start"):
        target_process.fuzz("fuzz_kit:nothing", 5, folder=tmp_path)


@pytest.mark.slow
def test_chance_starts_where_it_is_told(tmp_path: Path, timer: None) -> None:
    """The same seed tries the same inputs."""

    def tried(seed: int) -> list[bytes]:
        data: list[bytes] = []
        loop = FuzzLoop(target("lock", tmp_path), seed, data.append)
        mutate = loop._mutate
        for _ in range(50):
            loop.attempt(mutate(loop._chance, loop.target.seeds[0], loop.target.seeds[1]))
        return data

    assert tried(1) == tried(1) != tried(2)


def test_a_valid_input_must_be_taken(timer: None) -> None:
    """A seed that is refused is a finding; other inputs may be refused, and are counted."""

    def run(data: bytes) -> list[int]:
        if data == b"not":
            raise StateError("no 7")
        return [1]

    loop = FuzzLoop(Target(run, (b"seed", b"not")))
    loop.run(0, (b"not", b"kept"))
    (finding,) = loop.findings.values()
    what = "WrongAnswer: a valid input is refused: StateError: no 7"
    assert finding == FuzzFinding(what, "seed 1", b"not")
    assert (loop.inputs, loop.accepted, loop.refused) == (4, 2, 1)


def test_findings_become_smaller(tmp_path: Path, timer: None) -> None:
    """What does not belong to a fault is left out of its input."""
    import fuzz_kit

    loop = FuzzLoop(fuzz_kit.key_error(tmp_path))
    loop.attempt(b"PLK\x07" + b"words" * 100)
    loop.run(0)
    (finding,) = loop.findings.values()
    assert finding.data.startswith(b"PLK") and len(finding.data) < 60


def test_every_way_of_mutating_ends(timer: None) -> None:
    """Each mutation takes the empty input, and none makes one that is too long."""
    mutate = Bytes([b"word"], 500)
    for seed in range(3000):
        made = mutate(Random(seed), b"" if seed % 2 else b"a 12\nb", b"" if seed % 3 else b"other")
        assert len(made) <= 500


def test_damage_in_place_moves_nothing() -> None:
    """The length stays, and the bytes do not."""
    mutate, chance, data = Bytes([b"word"], 500), Random(5), bytes(range(100))
    made = [mutate.in_place(chance, data) for _ in range(200)]
    assert {len(each) for each in made} == {100}
    assert len(set(made)) > 150
    assert mutate.in_place(chance, b"") == b"" and len(mutate.in_place(chance, b"a")) == 1


def test_entry_points_come_from_the_header() -> None:
    """All of plk.h is drawn, and what is added to it is drawn at once."""
    drawer = CallGenerator(entries())
    assert {name for name, _ in unpacked(drawer.each())[1]} == set(entries()) - set(EXCLUDED)
    text = "/* cdef begin */ int plk_new(plk_context *context, int64_t room, int32_t *out); " \
           "/* cdef end */"  # fmt: skip
    more = CallGenerator(entries(text))
    name, words = more.call(Random(1))
    assert name == "plk_new" and set(words) == {"context", "room", "out"}
    assert more.entries["plk_new"].parameters[2].elements({"room": 7}) == 7


@pytest.mark.slow
def test_buffers_end_where_nothing_may_be_written() -> None:
    """One element behind a buffer ends the process."""
    for at, status in ((4, 0), (5, -signal.SIGSEGV)):
        code = (
            "from qa.fuzzing.arena import Arena\n"
            "from pyllamakv.native._plk import ffi\n"
            "arena = Arena(1)\n"
            f"arena.allocate(ffi.typeof('int32_t'), 5, [1, -2])[{at}] = 1\n"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == status


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("entry_dies", "died: status -6"),
        ("entry_lies", "WrongAnswer: after plk_seq_cp gave -1001"),
        ("entry_unknown", "WrongAnswer: plk_update returned -7"),
    ],
)
def test_planted_faults_of_entry_points_are_found(name: str, what: str, tmp_path: Path) -> None:
    """An end, a refusal that changed something, and a code that plk.h does not name."""
    (said,) = found(name, tmp_path, 60)
    assert said.startswith(what)


@pytest.mark.native
@pytest.mark.usefixtures("patched")
def test_sums_are_those_of_the_header(tmp_path: Path) -> None:
    """A file whose sums are made again is the same file; one of them alone is not enough."""
    seeds = target("kept", tmp_path).seeds
    mend = kv_file_checksums.ChecksumFixer(len(seeds[1]))
    assert [mend(Random(2), each) for each in seeds] == list(seeds)
    torn = bytearray(seeds[1])
    torn[kv_file_checksums.SIZE + 8] ^= 2  # a sequence of the first cell
    assert mend(Random(2), bytes(torn)) != bytes(torn)


@pytest.mark.native
@pytest.mark.usefixtures("patched")
def test_a_kept_cache_of_nobody_is_refused(tmp_path: Path) -> None:
    """Cells of sequences that the context has not, under right sums, are damage, and stay."""
    made = target("kept", tmp_path)
    mend = kv_file_checksums.ChecksumFixer(len(made.seeds[1]))
    strange = bytearray(made.seeds[1])
    strange[kv_file_checksums.SIZE + 8] = 1 << 5  # the first cell is that of sequence 5, of three
    with pytest.raises(KVFileDamaged, match="without a sequence"):
        list(made.run(mend(Random(2), bytes(strange))))


def program(folder: Path, text: str | None = None) -> Path:
    """Compile the fuzzer of the header, or skip."""
    try:
        return libfuzzer.build(folder, text)
    except Untestable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_faults_of_the_header_are_found(tmp_path: Path) -> None:
    """An end of the process where an error belongs is found, and the input that led to it."""
    right = 'throw error(FAILURE_DAMAGED, path + " is damaged: the sum of its content is wrong");'
    text = libfuzzer.header_text()
    assert text.count(right) == 1
    made = libfuzzer.fuzz(
        program(tmp_path, text.replace(right, "std::abort();")), 30, tmp_path, seed=1, kept=(),
        tick=lambda _: None, most=1,
    )  # fmt: skip
    (finding,) = made.findings.values()
    assert "deadly signal" in finding.what and libfuzzer.HEADER in finding.where
    assert made.coverage > 100 and finding.data
    assert list((tmp_path / "found").iterdir())


def test_a_slow_input_gets_more_time(tmp_path: Path, timer: None) -> None:
    """Threads that spin on a loaded machine are no hang."""
    import fuzz_kit

    loop = FuzzLoop(fuzz_kit.sound(tmp_path))
    given: list[float] = []

    def judge(data: bytes, patience: float = 2.0) -> FuzzFinding | None:
        given.append(patience)
        return FuzzFinding("Hung: more than 2 s", "", data) if patience < 5 else None

    loop.run_input = judge  # type: ignore[method-assign]
    assert loop.attempt(b"slow") and given == [2.0, 10.0] and not loop.findings
