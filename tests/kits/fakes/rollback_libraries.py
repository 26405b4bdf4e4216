"""Libraries that do one thing wrong, over the simulated cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fakes.simulated import SimulatedNative


class Rolling(SimulatedNative):
    """Roll failed decodes back; one that ``heals`` defragments first, also for a restore."""

    def decode(self, context, token, pos, seq_count, seq_id, logits):
        cache = self._get(context).cache
        if self.heals:
            if len(token) > (cache.pos < 0).sum():
                return 1
            cache.compact()
        before = cache.seqs.copy()
        status = super().decode(context, token, pos, seq_count, seq_id, logits)
        if status:
            cache.drop((cache.seqs != before).any(axis=1), -1)
        return status

    def state_load(self, context, seq, state):
        if self.heals:
            # What the sequence has is given up for what comes.
            self.seq_rm(context, seq, -1, -1)
            self._get(context).cache.compact()
        return super().state_load(context, seq, state)

    def seq_add(self, context, seq, p0, p1, delta):
        super().seq_add(context, seq, p0, p1, delta)
        cache = self._get(context).cache
        cache.seqs[cache.pos < 0] = 0
        cache.free_unused()


@dataclass
class Held:
    """Stand in for an opened library."""

    native: object
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Opener:
    """Hand out one simulated library per call, and count them."""

    make: object
    opened: list[Held] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, path: Path, environment: dict[str, str]) -> Held:
        self.environments.append(environment)
        made = self.make(path) if getattr(self.make, "by_path", False) else self.make()
        self.opened.append(Held(made))
        return self.opened[-1]
