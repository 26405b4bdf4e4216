"""Find the builds that a trace is played on, and open them in its environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyllamakv
from pyllamakv import open_variant
from pyllamakv.building.variant import newest_verified
from pyllamakv.errors import UsageError
from pyllamakv.source import releases
from pyllamakv.traces import trace, trace_scenario
from pyllamakv.traces.script import Line
from pyllamakv.traces.script_session import ScriptSession
from pyllamakv.traces.trace import Head

if TYPE_CHECKING:
    from pyllamakv.traces.trace import Head


@dataclass(frozen=True)
class ScriptRun:
    """A script or a trace to play, and the variant to play it on."""

    head: Head
    lines: list[Line]
    session: ScriptSession
    variant: str
    model: Path


@contextmanager
def open_run(path: Path, variant: str, model: str = "") -> Iterator[ScriptRun]:
    """Open a build in a worker for a script or a trace, until the end of the block.

    An empty ``variant`` is the newest verified release that is built; others are those of `specs`.
    A trace is played with the model and environment of its recording. A script is played as in a
    verification, unless this process's environment differs. ``model`` replaces the model of both.
    Raises ScriptError, UsageError, TraceMismatch and the errors of `pyllamakv.open` before anything
    is played.
    """
    head, lines = trace_scenario.load(path)
    where: str | Path | None = None
    if variant:
        where = _one(head, variant, recorded=trace.is_trace(path))
    if not trace.is_trace(path):
        head = replace(head, environment={**head.environment, **trace.recorded()})
    file = trace.model_file(head, model)
    with (
        pyllamakv.open(where, isolated=True, env=head.environment) as library,
        closing(ScriptSession(library.native, file=file)) as session,
    ):
        yield ScriptRun(head, lines, session, library.about.variant, file)


def _one(head: Head, text: str, *, recorded: bool) -> str | Path:
    """Return the variant that a text selects for a trace, or for a script, which has no release."""
    if not recorded and text in ("stock", "patched"):
        head = Head(spec=f"{newest_verified().manifest.release}+patched")
    spec, *others = specs(head, [text])
    if others:
        raise UsageError(f"expected one build in --variant, not {len(others) + 1}: {text}")
    return variant_folder(spec, head) if spec == RECORDED else spec


#: A patch's name, which extends a spec, as in 0.3.9+full-defrag,kv-counters.
_PATCH = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
#: Value for the build that recorded the trace.
RECORDED = "recorded"

_NAMELESS = "this trace does not contain the build that recorded it: pass --variant"


def specs(head: Head, texts: list[str]) -> list[str]:
    """Return the variants in a list of texts; ``stock`` and ``patched`` mean the recorded release.

    Others are specs, ids or directories as in `pyllamakv.open`; the default is the recorded build.
    """
    found: list[str] = []
    for text in texts:
        for part in filter(None, (part.strip() for part in text.split(","))):
            if _PATCH.fullmatch(part) and found and "+" in found[-1]:
                found[-1] += f",{part}"
            elif part in ("stock", "patched"):
                found.append(f"{_release(head, part)}+{part}")
            else:
                found.append(part)
    return found or [RECORDED]


def opened(spec: str, head: Head) -> pyllamakv.OpenLibrary:
    """Open a variant in a worker, in the environment of the recording."""
    where = variant_folder(spec, head) if spec == RECORDED else spec
    return pyllamakv.open(where, isolated=True, env=head.environment)


def variant_folder(spec: str, head: Head) -> Path:
    """Return the path of a variant's library. Raises NotBuilt."""
    if spec != RECORDED:
        return open_variant.variant_path(spec)
    if not head.variant and not head.spec:
        raise UsageError(_NAMELESS)
    return open_variant.find_recorded(head.variant, head.spec)


def _release(head: Head, word: str) -> str:
    release = head.spec.partition("+")[0] or re.sub(r"-(stock|patched)-.*", "", head.variant)
    if not release:
        msg = f"this trace does not contain the release that recorded it: pass 0.3.9+{word}"
        raise UsageError(msg)
    if not releases.is_safe_name(release):
        # A lookup would read or fetch a path or URL that the trace contains.
        msg = (
            f"this trace was recorded on {release!r}, which is not pinned: pass a complete variant"
        )
        raise UsageError(msg)
    return release
