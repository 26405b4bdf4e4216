"""The workload of `story` in memory that environment variables select: mapped, a file, or none.

A misspelled variable has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.binding.protocol import Capability
from pyllamakv.errors import Untestable
from pyllamakv.scenarios.builtin import story
from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab

#: Not a path, and no name of a memory.
WRONG = "mmpa"


def run(lab: Lab) -> None:
    """Run the workload of `story`; a decode defragments if the patches include that."""
    lab.needs(Capability.MAPPING)
    if not lab.place.host:
        _open_on_a_device(lab)
    backing = dict(lab.setting.environment)["LLAMA_KV_BACKING"]
    lab.logs()
    lab.player().close()
    _check_log(lab, backing, "\n".join(lab.logs()))
    if backing == WRONG:
        lab.expect(not Path(WRONG).exists(), f"LLAMA_KV_BACKING={WRONG} created a file")
    else:
        story.run(lab)


def _check_log(lab: Lab, backing: str, log: str) -> None:
    """Fail the claim unless the log names the memory of the cache, and a wrong value."""
    where = "upstream's memory"
    if lab.place.host and backing != WRONG:
        where = "anonymous mapped memory" if backing == "mmap" else f"a temporary file in {backing}"
    lab.expect(f" is in {where}" in log, f"the log does not name {where!r}: {log!r}")
    ignored = f"LLAMA_KV_BACKING is '{WRONG}', which is ignored; expected heap, mmap, a directory"
    lab.expect(
        (ignored in log) == (backing == WRONG),
        f"LLAMA_KV_BACKING={backing} is logged as {log!r}",
    )


def _open_on_a_device(lab: Lab) -> None:
    """Fail the claim if a device without mapped memory makes the context fail."""
    try:
        lab.player().close()
    except Untestable as error:
        lab.expect(False, f"LLAMA_KV_BACKING makes the context fail: {error}")


SCENARIO = Scenario(
    id="mmap-environment",
    kind="feature",
    claim="LLAMA_KV_BACKING alone puts the cache of any program into mapped memory.",
    issue="ggml-org/llama.cpp#11580",
    run=run,
    model="test",
    settings=tuple(
        replace(setting, environment=(("LLAMA_KV_BACKING", backing),))
        for setting in (CACHES[0], CACHES[3])
        for backing in ("mmap", "/tmp", WRONG)
    ),
)
