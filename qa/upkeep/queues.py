"""Write patch queues of our own, with the shapes of queues that others carry.

A queue is generated from a base release: its shape names files and kinds of edits, and a random
seed picks their places. An edit is a script, not a text: it names a function and a line of it, so
that it can be repeated on another release. That is the port that a maintainer would write, and what
a carried tree is compared with.
"""

from __future__ import annotations

import posixpath
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllamakv.patching import headings, hunk_locator
from pyllamakv.patching.strict_apply import DraftEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyllamakv.patching.trees import StoreTree

_NAMES = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"(?:[\w:<>]+[\s*&]+)?([a-z]\w*) = [^=].*;$")
_CONDITION = re.compile(r"if \(.*\) \{$")
_MEMBER = re.compile(r"(?:[\w:<>]+\s+)+([a-z]\w*)(?:\s*=\s*[\w.:-]+)?;$")
_DECLARATION = re.compile(r"(?:[\w:*&]+\s+)+\*?[a-z]\w*\(.*\)(?: const)?;$")
_CALL = re.compile(r"[a-z]\w*(?:(?:\.|->)\w+)*\(.*\);$")
_SOURCE = re.compile(r"[\w-]+\.c(?:pp)?$")
_SIGNS = re.compile(r"(?<!-)[<>]=?|[!=]=|!")
_SUFFIXES = (".c", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".txt")


@dataclass(frozen=True)
class Shape:
    """The base of a queue, the number of its mails, and the files and kinds of its edits."""

    base: str
    mails: int
    files: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Edit:
    """A change at one line.

    ``anchor`` is a line of ``function`` in ``file``, without the blanks around it. ``pattern`` is
    replaced in it by ``text``, or ``lines`` are inserted after it. Without an anchor, ``lines`` are
    a new file. With ``copies``, the inserted line copies each data member of the class that the
    anchor opens. ``name`` is a variable of the function that the lines use.
    """

    file: str
    function: str = ""
    anchor: str = ""
    pattern: str = ""
    text: str = ""
    lines: tuple[str, ...] = ()
    copies: bool = False
    name: str = ""

    def misplaced(self, tree: Mapping[str, DraftEntry | None]) -> bool:
        """Return whether the change is wrong.

        It is in another function, lacks the variable that it uses, or is in a condition that was
        turned around.
        """
        own_name = re.search(r"FORK_\w+", self.text)
        if self.pattern and not own_name:
            return False  # the comparison of changes decides
        mark = own_name[0] if own_name else next(filter(None, self.lines)).strip()
        found: list[set[bytes]] = []  # the lines of the functions with the change
        there = turned = False
        for entry in filter(None, tree.values()):
            lines = hunk_locator.lines_of(entry.data)
            index, bodies = headings.Headings(lines), headings.bodies(lines)
            for at in (n for n, line in enumerate(lines) if mark.encode() in line):
                there = True
                function = _function(index, at)
                # Another edit of the mail may insert the same lines.
                if function.rpartition("::")[2] == self.function.rpartition("::")[2]:
                    found.append(bodies.get(function, set()))
                    turned |= self.text.startswith(" && ") and self._turned(lines[at])
        if turned:
            return True
        if not self.function or not there:
            return False
        own = {line.strip().encode() for line in self.lines}
        used = ({*_names(body - own)} for body in found)
        return not any(not self.name or self.name in names for names in used)

    def _turned(self, line: bytes) -> bool:
        """Return whether a condition with an added term has other operators than the anchor."""
        rest = line.decode("utf-8", "replace").replace(self.text.removesuffix(") {"), "")
        return _SIGNS.findall(rest) != _SIGNS.findall(self.anchor)


def _names(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        yield from _NAMES.findall(line.decode("utf-8", "replace"))


@dataclass(frozen=True)
class Mail:
    """One patch of a queue: its id and its edits."""

    id: str
    edits: tuple[Edit, ...]

    def apply(self, tree: StoreTree) -> dict[str, DraftEntry] | None:
        """Return the changed files on a tree, or None if an edit has no certain place.

        A function that moved is followed to the other files of its directory.
        """
        changed: dict[str, DraftEntry] = {}
        for edit in self.edits:
            if not edit.anchor:
                if tree.entry(edit.file) is not None:
                    return None
                changed[edit.file] = DraftEntry("".join(f"{x}\n" for x in edit.lines).encode())
                continue
            places = list(_places(edit, edit.file, tree, changed))
            if not places:
                near = posixpath.dirname(edit.file) + "/" if "/" in edit.file else "?"
                paths = [path for path in tree.paths() if path.startswith(near)
                         and path.endswith(_SUFFIXES)]  # fmt: skip
                tree.fetch(paths)
                places = [each for path in paths for each in _places(edit, path, tree, changed)]
            if len(places) != 1:
                return None
            path, at, lines = places[0]
            if not _change(edit, lines, at):
                return None
            entry = tree.entry(path)
            assert entry is not None  # it has the place
            changed[path] = DraftEntry(b"".join(lines), entry.mode)
        return changed


def _places(
    edit: Edit, path: str, tree: StoreTree, changed: dict[str, DraftEntry]
) -> Iterator[tuple[str, int, list[bytes]]]:
    """Yield each place of an edit in a file, with the lines of the file."""
    entry = changed.get(path) or tree.entry(path)
    lines = hunk_locator.lines_of(entry.data) if entry else []
    anchor = edit.anchor.encode()
    index = headings.Headings(lines)
    for at, line in enumerate(lines):
        if line.strip() == anchor and _function(index, at) == edit.function:
            yield path, at, lines


def _function(index: headings.Headings, at: int) -> str:
    return headings.name(index.enclosing(at))


def _change(edit: Edit, lines: list[bytes], at: int) -> bool:
    """Make an edit at a line; return whether it changes something."""
    line = lines[at].decode("utf-8", "surrogateescape")
    added = [f"{text}\n" for text in edit.lines]
    if edit.copies:
        source = b"".join(lines).decode("utf-8", "surrogateescape")
        copied = _copies(source, edit.anchor)
        added = [f"{text}{copied} }}\n" for text in edit.lines] if copied else []
    made = re.sub(edit.pattern, edit.text, line, count=1) if edit.pattern else line
    new = ([made] if made.strip() or not edit.pattern else []) + added
    lines[at : at + 1] = [text.encode("utf-8", "surrogateescape") for text in new]
    return new != [line]


def _copies(source: str, head: str) -> str:
    """Return the assignments that copy an object of the class with this head, or nothing."""
    body = source[source.index(head) + len(head) :].partition("\n};")[0]
    # Deeper lines are of nested classes and of functions: `return false;` has this form as well.
    lines = re.findall(r"^ {4}(\S.*)$", body, re.MULTILINE)
    members = (_MEMBER.match(line) for line in lines if not line.startswith("const "))
    names = sorted(match[1] for match in members if match)
    return "".join(f" {name} = other.{name};" for name in names) if len(names) > 3 else ""


# --- kinds of edits -------------------------------------------------------------------------------


def _note(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Print a variable: the lines need its name."""
    name = _ASSIGNED.match(anchor)
    assert name is not None  # the anchor was chosen by this expression
    lines = (
        f'    if (getenv("FORK_{id_}") != NULL) {{',
        f'        fprintf(stderr, "{id_}: %p\\n", (const void *) &{name[1]});',
        "    }",
    )
    return (Edit(file, function, anchor, lines=lines, name=name[1]),)


def _guard(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Add a term to a condition."""
    return (Edit(file, function, anchor, r"\) \{$", rf' && getenv("FORK_{id_}") == NULL) {{'),)


def _wrap(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Pass an assigned value through a macro of an added header."""
    header = f"fork-{id_.lower()}.h"
    folder = posixpath.dirname(file)
    return (
        Edit(posixpath.join(folder, header), lines=("#pragma once", f"#define FORK_{id_}(x) (x)")),
        Edit(file, "", include, lines=(f'#include "{header}"',)),
        Edit(file, function, anchor, r"= (.*);$", rf"= FORK_{id_}(\1);"),
    )


def _drop(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Disable a statement."""
    return (Edit(file, function, anchor, r"^(\s*)(\S.*)$", r"\1// \2"),)


def _member(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Add a data member to a class or struct."""
    return (Edit(file, function, anchor, lines=(f"    int fork_{id_.lower()} = 0;",)),)


def _declare(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Declare a function."""
    lines = ("", f"    // see the fork's documentation of {id_}", f"    int fork_{id_}(int value);")
    return (Edit(file, function, anchor, lines=lines),)


def _copy(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Add a function that copies an object, member by member."""
    name = anchor.split()[1]
    head = (f"    void fork_{id_.lower()}(const {name} & other) {{",)
    return (Edit(file, function, anchor, lines=head, copies=True),)


def _list(id_: str, file: str, function: str, anchor: str, include: str) -> tuple[Edit, ...]:
    """Add a source file to a list of CMake."""
    name = f"fork-{id_.lower()}.cpp"
    return (
        Edit(posixpath.join(posixpath.dirname(file), name), lines=(f"int fork_{id_.lower()};",)),
        Edit(file, function, anchor, lines=(f"            {name}",)),
    )


_Kind = tuple[re.Pattern[str], tuple[str, ...], "Callable[..., tuple[Edit, ...]]"]
_CODE = (".c", ".cpp", ".cu")
_HEADERS = (".h", ".hpp", ".cuh")
#: Kind -> the lines that it edits, the suffixes of files, and the function that makes the edits.
KINDS: dict[str, _Kind] = {
    "note": (_ASSIGNED, _CODE, _note),
    "guard": (_CONDITION, _CODE, _guard),
    "wrap": (_ASSIGNED, _CODE, _wrap),
    "drop": (_CALL, _CODE, _drop),
    "member": (_MEMBER, _HEADERS, _member),
    "declare": (_DECLARATION, _HEADERS, _declare),
    "copy": (re.compile(r"(?:class|struct) \w+ \{$"), _HEADERS, _copy),
    "list": (_SOURCE, (".txt",), _list),
}

_CORE = (
    *("src/llama-model.cpp", "src/llama-vocab.cpp", "src/llama-context.cpp", "src/llama-arch.cpp"),
    *("src/llama-kv-cache.cpp", "src/llama-graph.cpp", "src/llama-sampling.cpp"),
    *("src/llama-quant.cpp", "src/llama-batch.cpp", "src/llama-model-loader.cpp"),
    *("ggml/src/ggml-backend.cpp", "ggml/src/ggml-backend-reg.cpp", "ggml/src/ggml.c"),
    *("ggml/src/ggml-cpu/ggml-cpu.c", "ggml/src/ggml-cpu/ops.cpp", "tools/mtmd/clip.cpp"),
    *("ggml/src/ggml-cuda/ggml-cuda.cu", "tools/mtmd/mtmd.cpp"),
    *("src/llama-hparams.h", "src/llama-kv-cells.h", "src/llama-kv-cache.h", "src/llama-model.h"),
    *("ggml/include/ggml-backend.h", "ggml/src/ggml-backend-impl.h", "src/llama-graph.h"),
    *("src/CMakeLists.txt", "ggml/src/CMakeLists.txt"),
)
_SERVER = (
    *("tools/server/server.cpp", "common/arg.cpp", "common/common.cpp", "common/chat.cpp"),
    *("common/sampling.cpp", "common/json-schema-to-grammar.cpp", "tools/server/utils.hpp"),
    *("common/common.h", "common/chat.h", "common/CMakeLists.txt", "tools/server/CMakeLists.txt"),
)
#: The queues by name: a runner of models with 36 mails, as ollama's; a distributed server with
#: patches of common, server and RPC, as Mesh-LLM's; and a binding with few, as java-llama.cpp's.
SHAPES: dict[str, Shape] = {
    "runner": Shape("b6845", 36, _CORE, tuple(KINDS)),
    "mesh": Shape(
        "b6845", 12, (*_SERVER, "ggml/src/ggml-rpc/ggml-rpc.cpp", "src/llama-context.cpp"),
        ("note", "guard", "wrap", "drop", "member", "declare", "list"),
    ),
    "binding": Shape("b6845", 8, _SERVER, ("guard", "note", "declare", "list", "drop")),
}  # fmt: skip


def generate(name: str, tree: StoreTree) -> tuple[Mail, ...]:
    """Return the mails of a queue, from the tree of its base; the same ones on any machine."""
    shape = SHAPES[name]
    chance = random.Random(name)
    found: list[Mail] = []
    while len(found) < shape.mails:
        id_ = f"{name.upper()}{len(found) + 1}"
        kind = shape.kinds[len(found) % len(shape.kinds)]
        edits: list[Edit] = []
        for _ in range(chance.choice((1, 1, 2, 3)) if kind not in ("wrap", "list") else 1):
            edits += _pick(kind, id_, shape.files, tree, chance)
        mail = Mail(id_.lower(), tuple(dict.fromkeys(edits)))
        if mail.apply(tree):
            found.append(mail)
    return tuple(found)


def _pick(
    kind: str, id_: str, files: Sequence[str], tree: StoreTree, chance: random.Random
) -> tuple[Edit, ...]:
    """Return edits of a kind at a random place: a line that its function has once."""
    lines_of, suffixes, make = KINDS[kind]
    while True:
        file = chance.choice([path for path in files if path.endswith(suffixes)])
        entry = tree.entry(file)
        lines = hunk_locator.lines_of(entry.data) if entry else []
        index = headings.Headings(lines)
        texts = [line.decode("utf-8", "replace").strip() for line in lines]
        at = chance.choice([n for n, text in enumerate(texts) if lines_of.match(text)] or [0])
        function = _function(index, at)
        same = [n for n, text in enumerate(texts) if text == texts[at]]
        inside = bool(function) or suffixes != _CODE
        once = sum(_function(index, n) == function for n in same) == 1
        include = next((text for text in texts if text.startswith('#include "')), "")
        if lines_of.match(texts[at] if texts else "") and inside and once:
            return make(id_, file, function, texts[at], include)
