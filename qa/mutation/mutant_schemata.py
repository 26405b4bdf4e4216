"""Combine many mutants in one text, in which a number selects the active one.

Compiling takes far longer than most scenarios. Therefore each mutated line is written once with all
its variants, selected by a function that reads ``PLK_MUTANT`` from the environment: 0 is the
original. The function also records which mutants a run reaches, so that a mutant is only tested by
runs that reach it. Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qa.mutation import operators
from qa.mutation.mutant import HUNK, Mutant

#: Variables: the number of the active mutant, and the file that records the reached ones.
CHOSEN, MET = "PLK_MUTANT", "PLK_MUTANT_MET"

#: Included before everything else. It must not change errno, which the surrounding lines read.
PRELUDE = f"""
#pragma once
#include <cerrno>
#include <cstdio>
#include <cstdlib>
inline bool plk_mutant(int n) {{
    static const char * const word = std::getenv("{CHOSEN}");
    static const int chosen = word ? std::atoi(word) : 0;
    static bool met[1 << 14];
    if (!met[n]) {{
        met[n] = true;
        const int code = errno;
        const char * path = std::getenv("{MET}");
        std::FILE * file = path ? std::fopen(path, "a") : nullptr;
        if (file) {{
            std::fprintf(file, "%d\\n", n);
            std::fclose(file);
        }}
        errno = code;
    }}
    return n == chosen;
}}
"""

#: Directories of C++ sources that the patches change; the rest of the trees is C.
CPP = re.compile(r"^src/.*\.(?:cpp|h)$")

#: The code around the part of a line that a number can select.
_CHOICES = (
    re.compile(r"^(\s*(?:\} else )?(?:if|while) \()(.*)(\) \{)$"),
    re.compile(r"^(\s*\} while \()(.*)(\);)$"),
    re.compile(r"^(\s*for \([^;]*; )([^;]*)(;.*\) \{)$"),
)
_DECLARED = re.compile(r"^(\s*(?:static )?(?:const )?[\w:<>]+(?: [*&]+)? ?[*&]*\w+ += )(.*)(;)$")
_ASSIGNED = re.compile(r"^\s*[\w.()\[\]*:>+-]+\s+[-+*/|&^]?= ")


@dataclass(frozen=True)
class MutantSchemata:
    """Files with all their mutants, and the number of each by its id."""

    files: dict[str, bytes]
    numbers: dict[str, int]


def build_schemata(
    mutants: Iterable[Mutant], files: Mapping[str, bytes], without: Iterable[tuple[str, int]] = ()
) -> MutantSchemata:
    """Return the files with every mutant that a number can select, except those on some lines.

    ``files`` have the original texts. Mutants that are left out need a build of their own.
    """
    numbers: dict[str, int] = {}
    left_out = set(without)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for each in mutants:
        if each.operator != HUNK and CPP.match(each.file):
            by_line.setdefault((each.file, each.line), []).append(each)
    lines = {path: data.decode().split("\n") for path, data in files.items()}
    first = 1
    for (path, line), here in by_line.items():
        numbered = list(enumerate((each.now for each in here), first))
        # Numbers do not depend on the lines that are left out.
        first += len(here)
        if (path, line) in left_out:
            continue
        text = merged(here[0].was, numbered, here[0].above)
        if text is not None:
            lines[path][line - 1] = text
            numbers |= {each.id: n for (n, _), each in zip(numbered, here, strict=True)}
    return MutantSchemata({path: "\n".join(text).encode() for path, text in lines.items()}, numbers)


def merged(was: str, wrong: list[tuple[int, str]], above: str = "") -> str | None:
    """Return one line with ``was`` and its mutants; None if that is impossible."""
    code, others = operators.code_of(was), [(n, operators.code_of(now)) for n, now in wrong]
    for form in _CHOICES:
        if match := form.match(code):
            chosen = _chosen(match, others, form, "bool")
            if chosen is not None:
                return chosen
    if not operators.whole(was, above) or not code.endswith(";"):
        return None
    if _DECLARED.match(code) and not _ASSIGNED.match(code) and " = {" not in code:
        declared = _DECLARED.match(code)
        assert declared is not None
        return _chosen(declared, others, _DECLARED, "")
    if not code.strip().startswith(("return", "throw")) and not operators.removable(code):
        return None
    text = "".join(f"if (plk_mutant({n})) {{ {now.strip()} }} else " for n, now in others)
    return f"{text}{{ {code.strip()} }}"


def _chosen(
    match: re.Match[str], others: list[tuple[int, str]], form: re.Pattern[str], cast: str
) -> str | None:
    before, middle, after = match.groups()
    text = f"{cast}({middle})"
    for number, now in others:
        other = form.match(now)
        if other is None or (other[1], other[3]) != (before, after):
            return None
        text = f"(plk_mutant({number}) ? {cast}({other[2]}) : {text})"
    return before + text + after


def read_covered(file: Path) -> frozenset[int]:
    """Return the mutants that a run reached."""
    if not file.is_file():
        return frozenset()
    return frozenset(int(word) for word in file.read_text("ascii").split())
