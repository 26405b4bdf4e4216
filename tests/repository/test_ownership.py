"""One owner per state: a module assigns only to attributes of the classes that it defines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllamakv.binding import loading
from pyllamakv.native._plk import ffi

ROOT = Path(__file__).resolve().parents[2] / "pyllamakv"
MODULES = sorted(ROOT.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Attributes of objects of other packages, with the reason for the assignment.
FOREIGN = {
    "propagate": "a logger of the standard library, restored afterwards",
    "read": "a response of httpx, whose body is limited",
    "iter_bytes": "a response of httpx, whose body is limited",
    "writeable": "the flags of an array of NumPy",
    "text": "an element of ElementTree",
    "stdout": "a module of the standard library, restored afterwards",
    "help": "a command of Click",
    "redirect_slashes": "the router that Starlette creates without an option for it",
    "hint": "the next step of a caught error, in the words of the command line",
    "timeout": "the public setting of a worker's proxy",
    "runner": "a thread-local object of the standard library",
    "__qualname__": "a method that `binding.forwarding` has compiled",
    "__doc__": "a method that `binding.forwarding` has compiled",
    "__annotations__": "a method that `binding.forwarding` has compiled",
}
#: Fields of the structs of ``plk.h``, which no Python class owns.
FIELDS = {
    field for name in loading.struct_names() for field, _type in ffi.typeof(name).fields or ()
}


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that an assignment, loop, with block or deletion writes."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [each.optional_vars for each in node.items if each.optional_vars is not None]
    while found:
        target = found.pop()
        if isinstance(target, ast.Attribute):
            yield target
        elif isinstance(target, ast.Tuple | ast.List):
            found += target.elts
        elif isinstance(target, ast.Starred):
            found.append(target.value)


def declared(tree: ast.AST) -> set[str]:
    """Return the attributes that the classes of a module have: of the class body, and of self."""
    found = set()
    for one in ast.walk(tree):
        if not isinstance(one, ast.ClassDef):
            continue
        found |= {
            each.target.id
            for each in one.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        found |= {
            target.attr
            for each in ast.walk(one)
            for target in targets(each)
            if isinstance(target.value, ast.Name) and target.value.id == "self"
        }
    return found


def made(function: ast.AST) -> set[str]:
    """Return the names to which a function assigns a new object: a class's call, or __new__."""
    found = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in {"cls", "__new__"} or name.lstrip("_")[:1].isupper():
            places = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in places if isinstance(each, ast.Name)}
    return found


def structs(tree: ast.AST) -> set[str]:
    """Return the variables and attributes to which a module assigns a new struct of C."""
    return {
        ast.unparse(target).rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in {"struct", "ffi.new"}
        for target in node.targets
    }


def foreign_writes(text: str) -> list[str]:
    """Return assignments to attributes of objects that the module neither owns nor created.

    A field of a C struct belongs to the module that created the struct.
    """
    tree = ast.parse(text)
    own, filled, found = declared(tree), structs(tree), []

    def visit(node: ast.AST, fresh: set[str]) -> None:
        if isinstance(node, Function):
            fresh = made(node)
        for target in targets(node):
            base = target.value.id if isinstance(target.value, ast.Name) else ""
            if target.attr in FIELDS and ast.unparse(target.value).rpartition(".")[2] in filled:
                continue
            if base not in {"self", "cls", *fresh} and target.attr not in own:
                found.append(f"line {target.lineno}: {ast.unparse(target)}")
        for child in ast.iter_child_nodes(node):
            visit(child, fresh)

    visit(tree, set())
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_module_writes_the_fields_of_others(path: Path) -> None:
    """If another module needs a change, the owner has a method or a function for it."""
    relative = path.relative_to(ROOT)
    found = foreign_writes(path.read_text(encoding="utf-8"))
    wrong = [each for each in found if each.rpartition(".")[2] not in FOREIGN]
    assert not wrong, f"{relative} assigns to attributes that it does not own: {wrong}"


@pytest.mark.slow
def test_no_module_reads_private_attributes_of_others() -> None:
    """An attribute with an underscore is read only in the module of its class."""
    wrong = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = declared(tree) | {
            each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            base = ast.unparse(node.value)
            if base not in {"self", "cls", "super()", "os"} and not node.attr.endswith("__"):
                found = f"{path.relative_to(ROOT)}, line {node.lineno}: {base}.{node.attr}"
                wrong += [] if node.attr in own else [found]
    assert not wrong


def test_planted_foreign_write_is_found() -> None:
    """Each form is found; attributes of new objects and of the module's classes are allowed."""
    text = """
class Own:
    size: int
    def __init__(self):
        self.count = 0
        self.raw = struct("plk_batch")

def change(other, own, maker):
    other.epoch += 1
    other.a, (other.b, own.count) = 1, (2, 3)
    del other.c
    for other.d in (): pass
    with maker as other.e: pass
    other.inner.f = 1
    own.size = 2
    new = maker.Class()
    new.g = 1
    other.again: int = 1
    own.raw.n_tokens = 1
    own.raw.no_field = 1
    other.n_tokens = 1
"""
    found = [each.rpartition(": ")[2] for each in foreign_writes(text)]
    expected = ["epoch", "a", "b", "c", "d", "e", "inner.f", "again", "n_tokens"]
    assert sorted(found) == sorted(["own.raw.no_field", *(f"other.{each}" for each in expected)])
