"""Open a build for a script or a trace, and lend what it is played on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyllamakv
from pyllamakv.record import trace, traced, variables
from pyllamakv.record.script import Line
from pyllamakv.record.stage import Stage
from pyllamakv.record.trace import Head


@dataclass(frozen=True)
class Run:
    """Hold a script or a trace that is about to be played, and the variant it is played on."""

    head: Head
    lines: list[Line]
    stage: Stage
    variant: str
    model: Path


@contextmanager
def opened(path: Path, variant: str, model: str = "") -> Iterator[Run]:
    """Open a build in a worker for a script or a trace, until the end of the block.

    A trace is played on the model, and in the environment, that it was recorded in; a script as
    it is judged, unless this process's environment says otherwise. ``model`` is played on instead
    of the one that either names. Raises ScriptError, UsageError, TraceMismatch and what
    `pyllamakv.open` raises before anything is played.
    """
    head, lines = traced.load(path)
    if not trace.is_trace(path):
        head = replace(head, environment={**head.environment, **variables.recorded()})
    file = trace.model_file(head, model)
    with (
        pyllamakv.open(variant, isolated=True, env=head.environment) as library,
        closing(Stage(library.native, file=file)) as stage,
    ):
        yield Run(head, lines, stage, library.about.variant, file)
