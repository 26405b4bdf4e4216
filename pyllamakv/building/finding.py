"""Hold what the doctor found of one tool or resource."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "optional"]


@dataclass(frozen=True)
class Finding:
    """Say what was looked for, what was found, and what to do if that is not enough.

    ``state`` is "optional" for what lacks without hurting the main job.
    """

    name: str
    state: State
    found: str
    cure: str = ""
