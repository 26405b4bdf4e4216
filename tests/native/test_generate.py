"""Test that the generated ffi module matches plk.h."""

from __future__ import annotations

import importlib.metadata

import pytest

from pyllamakv.native import generate


def test_recorded_declarations_are_those_of_the_header() -> None:
    """The digest in the module is that of the declarations in plk.h."""
    now = generate.digest(generate.declarations(generate.HEADER.read_text(encoding="utf-8")))
    recorded, _cffi = generate.recorded()
    assert recorded == now, "run: python -m pyllamakv.native.generate"


def test_regenerating_gives_the_same_bytes() -> None:
    """The version of cffi that generated the module generates the same bytes again."""
    _digest, wrote = generate.recorded()
    if importlib.metadata.version("cffi") != wrote:
        pytest.skip(f"written by cffi {wrote}")
    assert generate.generate() == generate.GENERATED.read_text(encoding="utf-8")


def test_comments_do_not_change_the_digest() -> None:
    """The digest depends only on the declarations between the marks."""
    one = "x /* cdef begin */\nint a(void); /* why */\n\n/* cdef end */ y"
    two = "/* cdef begin */\n  int   a(void);\n/* cdef end */"
    assert generate.declarations(one) == generate.declarations(two) == "int a(void);\n"


def test_header_without_cdef_marks_is_refused() -> None:
    """A header without the marks raises ValueError."""
    with pytest.raises(ValueError, match="cdef begin"):
        generate.declarations("int a(void);")
