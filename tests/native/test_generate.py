"""The generated ffi module was written from the header that is there."""

from __future__ import annotations

import importlib.metadata

import pytest

from pyllamakv.native import generate


def test_declarations_are_the_header_s() -> None:
    """The digest in the module is that of the declarations in plk.h."""
    now = generate.digest(generate.declarations(generate.HEADER.read_text(encoding="utf-8")))
    recorded, _cffi = generate.recorded()
    assert recorded == now, "run: python -m pyllamakv.native.generate"


def test_regenerating_gives_the_same_bytes() -> None:
    """With the cffi that wrote the module, writing it again changes nothing."""
    _digest, wrote = generate.recorded()
    if importlib.metadata.version("cffi") != wrote:
        pytest.skip(f"written by cffi {wrote}")
    assert generate.generate() == generate.GENERATED.read_text(encoding="utf-8")


def test_comments_do_not_count() -> None:
    """Only declarations between the marks make the digest."""
    one = "x /* cdef begin */\nint a(void); /* why */\n\n/* cdef end */ y"
    two = "/* cdef begin */\n  int   a(void);\n/* cdef end */"
    assert generate.declarations(one) == generate.declarations(two) == "int a(void);\n"


def test_missing_marks_are_refused() -> None:
    """A header without the marks is no header of ours."""
    with pytest.raises(ValueError, match="cdef begin"):
        generate.declarations("int a(void);")
