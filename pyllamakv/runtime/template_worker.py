"""Render chat templates in a process of their own: the program that `template_process` starts.

A template comes with a model file, so it is foreign code. Jinja's sandbox restricts what it can
access, but not its time and memory: nested loops, ``*`` on strings and format widths can exceed any
limit of a counter. The kernel ends this process when a render has used its CPU time.

Requests and answers are lines of JSON. The environment of the templates equals that of
transformers, for which templates are written: its options, filters and functions.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

#: Maximum length of a rendered text, in characters.
MAX_TEXT: Final = 1 << 24
#: Names that Jinja gives to the source of a template without a file.
_SOURCES: Final = frozenset({"<template>", "<unknown>"})


class GenerationTag(Extension):
    """Render the body of ``{% generation %}``, which marks the reply for training."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[Node]:
        """Return the statements up to ``{% endgeneration %}``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)  # more would fill the memory of a process that runs long
def compiled(source: str) -> Template:
    """Return a compiled template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def answer(line: str) -> dict[str, Any]:
    """Return the text of the template in a line of JSON, or its error with the line."""
    try:
        try:
            request = json.loads(line)
        except RecursionError:
            return {"error": "the values for the chat template are nested too deeply", "line": 0}
        text = compiled(request["template"]).render(**request["variables"])
    except TemplateSyntaxError as error:
        return {"error": f"the chat template does not parse: {error.message}", "line": error.lineno}
    except MemoryError:
        return {"error": "the chat template needs too much memory", "line": 0}
    except Exception as error:
        what = str(error) or type(error).__name__
        if not isinstance(error, TemplateError):
            what = f"{type(error).__name__}: {what}"
        return {"error": f"the chat template raised an error: {what[:2000]}", "line": _line(error)}
    if len(text) > MAX_TEXT:
        return {"error": f"the chat template rendered {len(text)} characters", "line": 0}
    return {"text": text}


def _line(error: Exception) -> int:
    """Return the innermost line of the template in the traceback of an error, 0 if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each.lineno or 0 for each in frames if each.filename in _SOURCES]
    return lines[-1] if lines else 0


def main(cpu_seconds: float, address_space: int) -> None:
    """Answer requests until the end of stdin, each within a limit of CPU time."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    # A program that ignores or blocks the signal passes this on to its processes.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin:
        # The default action of SIGPROF ends the process, also within one long operation of C.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        text = json.dumps(answer(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
