"""Write metrics as Prometheus reads them: its text format 0.0.4."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pyllamakv.binding import arguments
from pyllamakv.errors import UsageError

#: The content type under which an HTTP server hands the exposition out.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Labels that samples have of their own, whatever is exposed.
OURS = ("sequence", "manager")

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Metric:
    """Hold one metric: name, kind, help, and (labels, value) of each sample."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]


def expose(found: Iterable[Metric], labels: Mapping[str, str] | None = None) -> str:
    """Return any metrics as Prometheus reads them; raises UsageError as `prometheus` does."""
    found = tuple(arguments.items("found", found, "metrics"))
    for metric in found:
        arguments.instance("an item of found", metric, Metric, "a Metric")
    if labels is not None:
        expected = "a mapping of labels to text, or None"
        arguments.instance("labels", labels, Mapping, expected)  # type: ignore[type-abstract]
        for label, said in labels.items():
            arguments.text("a label", label)
            arguments.text(f"labels[{arguments.shown(label)}]", said)
    check(labels or {}, [key for one in found for own, _ in one.samples for key in own])
    lines = []
    for metric in found:
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for own, value in metric.samples:
            said = ",".join(
                f'{key}="{_escape(str(each), quote=True)}"'
                for key, each in {**(labels or {}), **own}.items()
            )
            lines.append(f"{metric.name}{f'{{{said}}}' if said else ''} {spell(value)}")
    return "".join(line + "\n" for line in lines)


def check(labels: Iterable[str], own: Iterable[str] = ()) -> None:
    """Raise UsageError for what cannot be a label beside those that samples have of their own."""
    ours = {*OURS, *own}
    for label in labels:
        if not _LABEL.fullmatch(label) or label.startswith("__") or label in ours:
            msg = (
                f"{label!r} cannot be a label: expected letters, digits and _, not beginning with "
                f"a digit or __, and none of {', '.join(sorted(ours))}"
            )
            raise UsageError(msg)


def spell(value: float) -> str:
    """Return a number as Prometheus reads it, whole ones without a point."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) else repr(value)


def _escape(said: str, *, quote: bool = False) -> str:
    said = said.replace("\\", "\\\\").replace("\n", "\\n")
    return said.replace('"', '\\"') if quote else said
