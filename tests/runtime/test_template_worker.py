"""Test the program that renders templates: its environment, and the lines of errors."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from pyllamakv.runtime import template_worker


def answer(template: str, **variables: Any) -> dict[str, Any]:
    """Return the response to a request."""
    return template_worker.answer(json.dumps({"template": template, "variables": variables}))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ none }}{{ missing }}", "None"),
    ],
)
def test_templates_are_rendered(template: str, text: str) -> None:
    """Filters, loop controls, tags and white space work like in transformers."""
    assert answer(template) == {"text": text}


def test_template_can_format_the_date() -> None:
    """A template may print the date."""
    assert answer("{{ strftime_now('%Y') }}")["text"] in map(
        str, range(2020, datetime.now().year + 2)
    )


@pytest.mark.parametrize(
    ("template", "message", "line"),
    [
        ("a\n{% if %}", "does not parse", 2),
        ("a\n\n{{ raise_exception('No <b>!') }}", "raised an error: No <b>!", 3),
        ("\n{{ x.y.z }}", "'x' is undefined", 2),
        ("{{ 1 / 0 }}", "ZeroDivisionError", 1),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", "RecursionError", 1),
        ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe", 1),
        ("{{ messages.append(1) }}", "unsafe", 1),
        ("{% include 'other' %}", "no loader", 1),
        ("{{ range(10 ** 9) }}", "OverflowError", 1),
        ("{{ 'a' * 20000000 }}", "rendered 20000000 characters", 0),
    ],
)
def test_errors_have_a_line(template: str, message: str, line: int) -> None:
    """An error has the innermost line of the template."""
    found = answer(template, messages=[])
    assert message in found["error"]
    assert found["line"] == line


def test_memory_error_of_a_template_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MemoryError names the cause."""
    monkeypatch.setitem(template_worker.__dict__, "compiled", lambda source: 1 / 0)
    assert "ZeroDivisionError" in answer("x")["error"]

    def fail(_source: str) -> None:
        raise MemoryError

    monkeypatch.setitem(template_worker.__dict__, "compiled", fail)
    assert "too much memory" in answer("x")["error"]


def test_deeply_nested_request_is_answered_with_an_error() -> None:
    """The process responds, although it cannot parse the request."""
    assert "nested too deeply" in template_worker.answer("[" * 100000)["error"]


def test_few_templates_are_kept() -> None:
    """Memory is limited to the last templates."""
    for i in range(40):
        assert answer(f"{{{{ {i} }}}}") == {"text": str(i)}
    assert template_worker.compiled.cache_info().currsize < 40
