"""Many mutants in one text: a number chooses the one that lives, 0 is the text as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qa.mutation import mutant_schemata, operators
from qa.mutation.mutant import HUNK, Mutant

FILE = "src/some.h"
TEXT = """\
#include <algorithm>
inline int count(const int * p, int n) {
    int res = 0;

    for (int i = 0; i < n; ++i) {
        if (p[i] > 2 && p[i] != 5) {
            res += p[i];
        }
    }

    const int most = std::max(res, 4);

    return most > 9 || n == 3 ? most : res;
}
"""
PROGRAM = """\
#include "some.h"
#include <cstdio>
int main() {
    const int p[] = { 1, 3, 5, 4, 100 };
    std::printf("%d", count(p, 4));
}
"""


def mutants() -> list[Mutant]:
    """Return the mutants of the text, each with the whole file that it makes."""
    found, above = [], ""
    lines = TEXT.split("\n")
    for number, line in enumerate(lines, 1):
        for change in operators.changes(line, above):
            text = "\n".join([*lines[: number - 1], change.now, *lines[number:]])
            files: dict[str, bytes | None] = {FILE: text.encode()}
            found.append(Mutant("p", FILE, number, change.operator, line, change.now, above, files))
        above = line if line.strip() else above
    return found


def compiled(folder: Path, text: bytes) -> Path:
    """Compile the program with a version of the text, or skip without a compiler."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder.mkdir()
    (folder / "some.h").write_bytes(text)
    (folder / "main.cpp").write_text(PROGRAM, encoding="utf-8")
    (folder / "prelude.h").write_text(mutant_schemata.PRELUDE, encoding="utf-8")
    words = [compiler, "-std=c++11", "-w", "-include", str(folder / "prelude.h")]
    words += [str(folder / "main.cpp"), "-o", str(folder / "main")]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    return folder / "main"


def said(program: Path, **environment: str) -> str:
    """Return what the program prints."""
    env = {**os.environ, **environment}
    return subprocess.run([program], env=env, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_a_number_is_its_mutant(tmp_path: Path) -> None:
    """Each switched mutant behaves like its own text, and lines keep their numbers."""
    every = mutants()
    found = mutant_schemata.build_schemata(every, {FILE: TEXT.encode()})
    assert len(found.numbers) == len(every) == len(set(found.numbers.values())) > 8
    assert found.files[FILE].count(b"\n") == TEXT.count("\n")
    switched = compiled(tmp_path / "switched", found.files[FILE])
    met = tmp_path / "met"
    assert said(switched, **{mutant_schemata.MET: str(met)}) == "7"
    assert mutant_schemata.read_covered(met) == set(found.numbers.values())
    answers = {}
    for each in every:
        text = each.files[FILE]
        assert text is not None
        if each.operator == "statement removed":
            continue  # a function without its return may do anything
        own = said(compiled(tmp_path / each.id, text))
        answers[each.id] = said(switched, **{mutant_schemata.CHOSEN: str(found.numbers[each.id])})
        assert answers[each.id] == own, each
    assert len(set(answers.values())) > 3


def test_lines_can_be_left_out() -> None:
    """A line that no compiler took keeps its text, and the others their numbers."""
    every = mutants()
    whole = mutant_schemata.build_schemata(every, {FILE: TEXT.encode()})
    part = mutant_schemata.build_schemata(every, {FILE: TEXT.encode()}, {(FILE, 6)})
    assert part.files[FILE].split(b"\n")[5] == TEXT.encode().split(b"\n")[5]
    assert set(part.numbers.items()) < set(whole.numbers.items())
    dropped = Mutant("p", FILE, 1, HUNK, files={FILE: b""})
    assert not mutant_schemata.build_schemata([dropped], {FILE: TEXT.encode()}).numbers


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("    foo(a,", "    foo(b,"),
        ("int size() const { return n; }", "int size() const { return n + 1; }"),
        ("    for (auto * k : k_l) {", "    for (auto * k : v_l) {"),
        ("    x = a +", "    x = b +"),
    ],
)
def test_what_cannot_be_chosen(was: str, now: str) -> None:
    """Parts of statements that cannot be switched are built separately."""
    assert mutant_schemata.merged(was, [(1, now)]) is None
