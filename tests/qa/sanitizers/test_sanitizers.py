"""Test that sanitizer reports are parsed, and a missed planted fault is a defect."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllamakv.errors import Untestable
from pyllamakv.home import data
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.verification import discovery
from pyllamakv.verification import header_tests as headers
from qa import sanitizers
from qa.entry import StressOptions
from qa.sanitizers import instrument, reports, sanitized_process, sanitizer_targets
from qa.sanitizers.reports import KnownReport, Report
from qa.sanitizers.sanitized_process import ProcessResult

ADDRESS = """\
==41==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602 at pc 0x7f bp 0x7f sp 0x7f
WRITE of size 1 at 0x602 thread T0
    #0 0x7f1 in __interceptor_memcpy ../../../../src/libsanitizer/sanitizer_common/x.inc:827
    #1 0x7f2 in llama_kv_cache_unified::defrag(int) src/llama-kv-cache.cpp:10
    #2 0x7f3 in plk_defrag shim/cache.cpp:20

0x602 is located 0 bytes to the right of 8-byte region
"""
UNDEFINED = """\
src/llama-batch.cpp:31:9: runtime error: signed integer overflow: 2147483647 + 1 cannot be int
    #0 0x7f in llama_batch::grow src/llama-batch.cpp:31
    #1 0x7f in main
src/llama-batch.cpp:31:9: runtime error: signed integer overflow: 2147483646 + 2 cannot be int
    #0 0x7f in llama_batch::grow src/llama-batch.cpp:31
"""
THREAD = """\
==================
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 4 at 0x7f by thread T2:
    #0 touch(int) shim/log.cpp:12 (libplk.so+0x1)
    #1 operator() <null> (libstdc++.so.6+0x2)

  Previous write of size 4 at 0x7f by thread T1:
    #0 other shim/log.cpp:13 (libplk.so+0x1)
"""
CHECKED = """\
/usr/include/c++/12/bits/stl_vector.h:1123: std::vector<int>::operator[](size_type): \
Assertion '__n < this->size()' failed.
"""
TINY = """\
#include "llama-kv-defrag.h"
#include <cstdio>
#include <cstring>
int main(int argc, char **argv) {
    if (argc < 2) {
        std::puts("bad good");
        return 0;
    }
    volatile char *bytes = new char[8];
    bytes[std::strcmp(argv[1], "bad") == 0 ? 8 : 0] = 1;
    delete[] const_cast<char *>(bytes);
    return 0;
}
"""


def built(folder: Path) -> SimpleNamespace:
    """Return the files that a part uses of a variant."""
    return SimpleNamespace(folder=folder, library=folder / "libplk.so")


def needs_sanitizers() -> None:
    try:
        instrument.runtimes("address")
        instrument.runtimes("thread")
    except Untestable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("text", "what", "function", "file"),
    [
        (ADDRESS, "heap-buffer-overflow", "llama_kv_cache_unified::defrag", "llama-kv-cache.cpp"),
        (UNDEFINED, "signed integer overflow", "llama_batch::grow", "llama-batch.cpp"),
        (THREAD, "data race", "touch", "log.cpp"),
        (CHECKED, "__n < this->size()", "", ""),
    ],
)
def test_reports_are_read(text: str, what: str, function: str, file: str) -> None:
    """A report has its kind and the first function outside of the runtime."""
    found = reports.parse(text)
    assert what in found[0].what
    assert (found[0].function, found[0].file.endswith(file)) == (function, True)
    assert len({report.key for report in found}) == 1


def test_no_report_names_a_folder_of_this_machine() -> None:
    """Reports are stored in a document: absolute paths are reduced to the file name."""
    text = (
        "==1==ERROR: AddressSanitizer: heap-use-after-free on address 0x1\n"
        "    #0 0x1 in f(int) const (/some/where/built-1/libplk.so+0x12)\n"
        "    #1 0x2 in g() llama.cpp/src/llama-context.cpp:7\n"
    )
    (found,) = reports.parse(text)
    assert found.text == "f(int) const (libplk.so+0x12)\ng() llama.cpp/src/llama-context.cpp:7"
    (found,) = reports.parse(text.replace("llama.cpp/src", "/some/where"))
    assert str(found) == "heap-use-after-free in g (llama-context.cpp)"


def test_the_same_report_counts_once(tmp_path: Path) -> None:
    """Reports that differ in numbers are equal, wherever they were logged."""
    for number in (1, 2):
        (tmp_path / f"undefined.log.{number}").write_text(UNDEFINED)
    (tmp_path / "address.log.1").write_text(ADDRESS)
    assert len(reports.collect(tmp_path)) == 2


def test_reports_of_upstream_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed report is counted separately; the same one in another function is a defect."""
    known = KnownReport("overflow", "llama_batch::grow", "llama-batch.cpp", "it wraps on purpose")
    monkeypatch.setattr(reports, "UPSTREAM", (known,))
    mine = Report("signed integer overflow", "plk_decode", "shim/decode.cpp")
    theirs = Report("signed integer overflow", "llama_batch::grow", "src/llama-batch.cpp")
    assert reports.split([mine, theirs]) == ([mine], [theirs])


def test_every_excused_report_has_a_reason() -> None:
    """A report is not excluded by a name alone, nor in the shim or in patched code."""
    texts = [path.read_text(encoding="utf-8") for path in data("patches").glob("*/*.patch")]
    for known in reports.UPSTREAM:
        assert known.what
        assert known.file.startswith(("llama", "ggml", "unicode"))
        assert not known.file.startswith("llama-kv-")
        assert known.function
        assert not any(f"{known.function}(" in text for text in texts)
        assert len(known.why) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), [("address", "heap"), ("thread", "race")])
def test_planted_faults_are_seen(tmp_path: Path, kind: str, fault: str) -> None:
    """A fault in the library is reported by a process that preloads the runtime."""
    needs_sanitizers()
    source = tmp_path / "planted.cpp"
    source.write_text(f'#include "{instrument.native("planted.h")}"\n')
    library = tmp_path / "planted.so"
    instrument.program(source, library, kind, "-shared", "-fPIC")
    seen = sanitized_process.planted(kind, library, fault)
    assert any(sanitizers.SAYS[fault] in report.what for report in seen)
    assert sanitized_process.planted(kind, library, "nothing") == []


def test_a_blind_sanitizer_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that reports none of its planted faults proves nothing."""
    blind = built(tmp_path)
    monkeypatch.setattr(sanitizers.SanitizerBuilds, "library", lambda *_: blind)
    monkeypatch.setattr(sanitized_process, "planted", lambda *_: [])
    wanted = StressOptions(only=("planted, address and undefined",))
    (entry,) = sanitizers.entries(wanted, lambda _: None)
    assert len(entry.defects) == 3
    assert entry.row["ran"] == "0 planted faults reported"
    assert all("does not report a planted" in defect for defect in entry.defects)


def test_single_part_also_runs_its_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, a silent sanitizer could not be distinguished from a missing one."""
    parts = {name: (kind, lambda *_: None) for name, (kind, _) in sanitizers.PARTS.items()}
    monkeypatch.setattr(sanitizers, "PARTS", parts)

    def brought(name: str) -> list[str]:
        made = sanitizers.entries(StressOptions(only=(name,)), lambda _: None)
        return [entry.name for entry in made if entry.name != name]

    assert brought("C program") == ["planted, address and undefined"]
    assert brought("threads") == ["planted, threads"]
    assert brought("native drivers") == []


@pytest.mark.slow
def test_report_in_an_instrumented_driver_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry has the report of the driver, and none of the correct drivers."""
    needs_sanitizers()
    source = tmp_path / "tests" / "native" / "tiny.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(TINY)
    monkeypatch.setattr(headers, "checkout", lambda: tmp_path)
    tiny = headers.Header("full-defrag", "src/llama-kv-defrag.h", "tiny")
    monkeypatch.setattr(sanitizer_targets, "HEADERS", (tiny,))
    wanted = StressOptions(only=("native drivers",))
    (entry,) = sanitizers.entries(wanted, lambda _: None)
    assert (entry.row["ran"], entry.row["scope"]) == ("2 test groups", "headers")
    assert any("heap-buffer-overflow in main" in defect for defect in entry.defects)
    source.write_text(TINY.replace("? 8 : 0", "? 7 : 0"))
    (entry,) = sanitizers.entries(wanted, lambda _: None)
    assert entry.passed


def test_program_that_crashes_at_its_start_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no groups, and its report counts."""
    bad = Report("heap-use-after-free", "main", "tiny.cpp")
    tiny = headers.Header("full-defrag", "src/llama-kv-defrag.h", "tiny")
    monkeypatch.setattr(sanitizer_targets, "HEADERS", (tiny,))
    monkeypatch.setattr(sanitizer_targets, "native", Path)
    monkeypatch.setattr(instrument, "program", lambda *_: None)
    listed = ProcessResult(0, "\n".join(f"group-of-tests-{n}" for n in range(100)))
    for ended, wrong in (
        (
            ProcessResult(-11, "", "segmentation fault"),
            "tiny ended with status -11: segmentation fault",
        ),
        (ProcessResult(0), "tiny lists no test groups"),
        (ProcessResult(0, "good", found=[bad]), "heap-use-after-free in main"),
        (listed, ""),
    ):
        answers = iter([ended])
        monkeypatch.setattr(
            sanitized_process, "run", lambda *_, answers=answers: next(answers, ProcessResult(0))
        )
        (entry,) = sanitizers.entries(StressOptions(only=("native drivers",)), lambda _: None)
        assert entry.passed if not wrong else any(wrong in each for each in entry.defects)
    assert entry.row["ran"] == "100 test groups"


def test_a_row_names_the_instrumented_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run instruments the shim and libllama, a long run everything."""
    monkeypatch.setattr(sanitizers.SanitizerBuilds, "library", lambda *_: built(tmp_path))
    monkeypatch.setattr(sanitized_process, "planted", lambda *_: [])
    names = ("planted, address and undefined", "planted, threads")
    for seconds, scopes in ((60.0, ["core", "core"]), (sanitizers.LONG, ["whole", "whole"])):
        found = sanitizers.entries(StressOptions(seconds, only=names), lambda _: None)
        assert [entry.row["scope"] for entry in found] == scopes
        assert [entry.data["scope"] for entry in found] == scopes


def test_part_without_its_tools_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tools, the section reports that and does not pass."""
    monkeypatch.setattr(shutil, "which", lambda *_args, **_more: None)
    planted, entry = sanitizers.entries(StressOptions(only=("threads",)), lambda _: None)
    assert "could not run" in planted.defects[0]
    assert "could not run" in entry.defects[0]
    assert "g++" in entry.defects[0]


@pytest.mark.slow
def test_a_hang_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that does not end is killed and reported; the other parts still run."""
    monkeypatch.setattr(sanitized_process, "PATIENCE", 0.5)
    ended = sanitized_process.run(["sleep", "60"], "address", tmp_path)
    assert (ended.code, ended.found) == (sanitized_process.HUNG, [])
    assert "no end within 0.5 seconds" in ended.output


def test_a_run_of_a_scenario_that_reports_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports, crashes and errors on patched count; runs that a setting lacks do not."""
    library = built(tmp_path)
    monkeypatch.setattr(sanitizers.SanitizerBuilds, "library", lambda *_: library)
    bad = Report("heap-use-after-free", "plk_decode", "shim/decode.cpp")
    played = [
        ("one", "plain f16", Outcome("pass"), [bad]),
        ("two", "plain f16", Outcome("skip", "", "no streams here"), [bad]),
        ("three", "plain f16", Outcome("fail", "crash", CHECKED), [bad]),
        ("four", "plain f16", Outcome("absent", "", "no windows here"), []),
    ]
    monkeypatch.setattr(sanitizer_targets, "scenarios", lambda *_args, **_more: iter(played))
    *_, entry = sanitizers.entries(StressOptions(only=("scenarios, patched",)), lambda _: None)
    assert (entry.row["ran"], entry.row["scope"]) == ("2 runs of scenarios", "core")
    assert entry.row["reports"] == "2"
    assert len(entry.defects) == 3
    assert set(sanitizers.FIRST) <= set(discovery.discover())
