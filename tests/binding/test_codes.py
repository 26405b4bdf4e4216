"""Test that status codes become exceptions in one place, and match the header."""

from __future__ import annotations

import pytest

from pyllamakv import errors
from pyllamakv.binding import codes
from pyllamakv.binding.codes import Code
from pyllamakv.binding.protocol import Capability, DecodeStatus, MemoryType
from pyllamakv.native._plk import ffi


@pytest.mark.parametrize("code", Code)
def test_codes_have_the_numbers_of_the_header(code: Code) -> None:
    """Each code has the number of its name in plk.h."""
    assert ffi.integer_const(f"PLK_{code.name}") == code


def test_enumerations_have_the_numbers_of_the_header() -> None:
    """Statuses, capabilities and kinds of memory have the numbers of plk.h."""
    for status in DecodeStatus:
        assert ffi.integer_const(f"PLK_{status.name}") == status
    for capability in Capability:
        assert ffi.integer_const(f"PLK_CAP_{capability.name}") == capability
    for memory in MemoryType:
        assert ffi.integer_const(f"PLK_MEMORY_{memory.name}") == memory


@pytest.mark.parametrize(
    ("code", "doing", "kind"),
    [
        (Code.EMODEL, "model", errors.ModelError),
        (Code.EEXCEPTION, "model", errors.ModelError),
        (Code.ECONTEXT, "context", errors.ContextError),
        (Code.EMEMORY, "context", errors.NotEnoughMemory),
        (Code.EMEMORY, "state", errors.StateError),
        (Code.ESTATE, "state", errors.StateError),
        (Code.EREFUSED, "sequence", errors.PartialRemovalRefused),
        (Code.EUNSUPPORTED, "cache", errors.Unsupported),
        (Code.EEXCEPTION, "decode", errors.NativeError),
        (-3, "decode", errors.NativeError),
    ],
)
def test_code_and_object_select_the_error_class(
    code: int, doing: codes.Doing, kind: type[errors.KvError]
) -> None:
    """The same code has another meaning for a model, a context and a state."""
    made = codes.error(code, "try", "the text", doing=doing, log=["a", "b"])
    assert type(made) is kind
    assert "try" in str(made)
    assert "the text" in str(made)
    if isinstance(made, errors.NativeError):
        assert made.code == code
        assert made.log == ("a", "b")


@pytest.mark.parametrize(
    "line",
    ["failed to allocate buffer of size 6", "ggml_aligned_malloc: insufficient memory"],
)
def test_a_failed_allocation_of_a_context_is_named(line: str) -> None:
    """llama.cpp returns no context, and only its log has the reason."""
    made = codes.error(Code.ECONTEXT, "make a context", "none", doing="context", log=["x", line])
    assert type(made) is errors.NotEnoughMemory
    assert made.log == ("x", line)
    other = codes.error(Code.ESTATE, "save", "none", doing="state", log=[line])
    assert type(other) is errors.StateError


def test_unsupported_names_the_capability() -> None:
    """The missing capability is a field of the error."""
    made = codes.error(Code.EUNSUPPORTED, "defragment", capability=Capability.DEFRAG)
    assert isinstance(made, errors.Unsupported)
    assert made.capability == "defrag"
    assert made.reason == ""


def test_unsupported_error_has_the_reason_of_the_library() -> None:
    """They are the same for each operation that is refused for this reason."""
    made = codes.error(Code.EUNSUPPORTED, "decode 8 tokens", "clear the context before")
    assert isinstance(made, errors.Unsupported)
    assert made.reason == "clear the context before"


def test_each_cache_file_code_has_its_exception() -> None:
    """Each error code of a cache file has an exception class whose message has a remedy."""
    for code, kind in (
        (Code.ESPACE, errors.KVFileFull),
        (Code.EBUSY, errors.KVFileBusy),
        (Code.EDIRTY, errors.KVFileDirty),
        (Code.EFOREIGN, errors.KVFileForeign),
        (Code.EDAMAGED, errors.KVFileDamaged),
    ):
        found = codes.error(code, "make a context", "message of the library", doing="context")
        assert type(found) is kind
        assert isinstance(found, errors.ContextError)
        assert "message of the library; " in str(found)


def test_grammar_error_has_line_and_column() -> None:
    """Line and column are fields, which are 0 without a place."""
    made = codes.error(Code.EGRAMMAR, "make a sampler", "line 3, column 14: expecting ::=")
    assert isinstance(made, errors.GrammarError)
    assert isinstance(made, errors.UsageError)
    assert (made.line, made.column) == (3, 14)
    assert "line 3, column 14: expecting ::=" in str(made)
    made = codes.error(Code.EGRAMMAR, "make a sampler", "the grammar has no rule 'root'")
    assert isinstance(made, errors.GrammarError)
    assert (made.line, made.column) == (0, 0)
    assert isinstance(codes.error(Code.ENOTOKEN, "sample"), errors.NoTokenAllowed)
