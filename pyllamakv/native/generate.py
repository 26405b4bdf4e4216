"""Write ``_plk.py``, cffi's out-of-line form of ``plk.h``, so that no import parses C.

Run ``python -m pyllamakv.native.generate`` after a change of ``plk.h``; a test compares the digest
of the declarations, which does not depend on cffi's version or on comments.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tempfile
from pathlib import Path

from pyllamakv.home import shim

HEADER = shim() / "plk.h"
GENERATED = Path(__file__).with_name("_plk.py")

_BEGIN = "/* cdef begin */"
_END = "/* cdef end */"
_DIGEST = "# declarations sha256: "
_CFFI = "# written by cffi "


def declarations(text: str) -> str:
    """Return the text between the cdef marks of a header, without comments.

    Raises ValueError if the marks are missing.
    """
    before, begin, rest = text.partition(_BEGIN)
    body, end, _after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"expected {_BEGIN} and {_END} in the header of {len(before)} characters")
    plain = re.sub(r"/\*.*?\*/", " ", body, flags=re.DOTALL)
    lines = (re.sub(r"\s+", " ", line).strip() for line in plain.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def digest(cdef: str) -> str:
    """Return the sha256 of declarations, in hexadecimal."""
    return hashlib.sha256(cdef.encode()).hexdigest()


def generate(header: Path = HEADER) -> str:
    """Return the source of the module for a header."""
    import cffi

    cdef = declarations(header.read_text(encoding="utf-8"))
    builder = cffi.FFI()
    builder.set_source("pyllamakv.native._plk", None)
    builder.cdef(cdef)
    with tempfile.TemporaryDirectory(prefix="plk-") as folder:
        target = Path(folder, "_plk.py")
        with contextlib.redirect_stdout(io.StringIO()):
            builder.emit_python_code(str(target))
        body = target.read_text(encoding="utf-8")
    body = body.removeprefix("# auto-generated file\n")
    return (
        "# Generated from plk.h by pyllamakv.native.generate; change plk.h and run that.\n"
        f"{_DIGEST}{digest(cdef)}\n{_CFFI}{cffi.__version__}\n{body}"
    )


def recorded(generated: Path = GENERATED) -> tuple[str, str]:
    """Return the digest of the declarations and the cffi version that a module was written from."""
    head = generated.read_text(encoding="utf-8").splitlines()[:4]
    found = {
        mark: line.removeprefix(mark) for line in head for mark in (_DIGEST, _CFFI) if mark in line
    }
    return found.get(_DIGEST, ""), found.get(_CFFI, "")


def main() -> None:
    """Write the module beside the header."""
    GENERATED.write_text(generate(), encoding="utf-8")


if __name__ == "__main__":
    main()
