"""Build the API reference from docstrings: ``make docs`` writes HTML to build/reference.

A missing name, and a reference without a target, is a warning; ``make docs`` fails on warnings. The
build needs no network, so names of other packages are no links. They must exist.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import pydoc
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.addnodes import pending_xref

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyllamakv
from pyllamakv import errors

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "pyllamakv"
version = release = pyllamakv.__version__
extensions = ["sphinx.ext.autodoc"]
html_theme = "alabaster"
html_show_copyright = html_show_sphinx = html_copy_source = False

nitpicky = True
default_role = "py:obj"
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}

#: Classes whose constructors are not for users: other calls create the objects.
CREATED = {
    "Adapter", "AsyncGeneration", "Context", "Embedding", "Generation", "KV", "LibraryInfo",
    "Logits", "LogitsRows", "Model", "OpenLibrary", "PerSequence", "PrefixLease", "Recording",
    "Screen", "Sequence", "SlotLease", "TextStream", "Usage",
}  # fmt: skip
#: Errors are words of a docstring's text ("Raises Closed"), which become links.
ERRORS = re.compile(
    r"(?<=[Rr]aises )[A-Z]\w+|(?<![\w.`])("
    + "|".join(name for name in vars(errors) if inspect.isclass(getattr(errors, name)))
    + r")(?![\w`])"
)


def import_annotated_names() -> None:
    """Run the imports for type checkers, so that every annotation can be evaluated.

    All modules are loaded before, so an import cannot meet a module that is loaded in part.
    """
    names = [each.name for each in pkgutil.walk_packages(pyllamakv.__path__, "pyllamakv.")]
    modules = [importlib.import_module(name) for name in names if "__main__" not in name]
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        for node in tree.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                code = compile(ast.Module(node.body, []), module.__file__ or "", "exec")
                with suppress(ImportError):  # of an optional extra
                    exec(code, vars(module))


def link_errors(_app: Sphinx, _what: str, _name: str, _obj: Any, _o: Any, lines: list[str]) -> None:
    """Make links of the errors that a docstring names."""
    lines[:] = [ERRORS.sub(r":py:exc:`\g<0>`", line) for line in lines]


def hide_constructor(
    _app: Sphinx, what: str, _name: str, obj: Any, *_signature: Any
) -> tuple[str, str] | None:
    """Omit the parameters of protocols, and of classes that users do not call."""
    hidden = what == "class" and (obj.__name__ in CREATED or getattr(obj, "_is_protocol", False))
    return ("", "") if hidden else None


def unlink_builtins(_app: Sphinx, document: Element) -> None:
    """Make text of the names of builtin types: some attributes have the same names."""
    for node in list(document.findall(pending_xref)):
        if node["reftarget"] in vars(builtins):
            node.replace_self(node.children)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element
) -> Element | None:
    """Find a name of another module, which must be unique, or accept one of another package."""
    target, python = node["reftarget"], env.domains.python_domain
    names = [
        name
        for name, found in python.objects.items()
        if name.endswith(f".{target}") and not found.aliased
    ]
    if len(names) == 1:
        doc = node["refdoc"]
        return python.resolve_xref(env, doc, app.builder, "obj", names[0], node, content)
    external = not target.startswith("pyllamakv") and pydoc.locate(target) is not None
    return content if external else None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    import_annotated_names()
    app.connect("autodoc-process-docstring", link_errors)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("doctree-read", unlink_builtins)
    app.connect("missing-reference", resolve)
