"""Combine what a schedule is played on: cache, mover, plan, policy, backing, device, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any

from pyllamakv.scenarios.scenario import CACHES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SETTINGS = {setting.name: setting for setting in CACHES}

#: The values of each dimension. One that stands there more often comes more often: what is behind
#: RPC, or has 26 layers, costs several times as much as what is not.
VALUES: Mapping[str, Sequence[str]] = {
    "cache": tuple(SETTINGS),
    "mover": ("auto", "host", "gather", "graph", "staged"),
    "plan": ("fewest", "ordered"),
    "policy": ("never", "on_failure", "threshold", "always"),
    "backing": ("heap", "mmap", "file", "kept"),
    "device": ("cpu",) * 23 + ("rpc",),
    "memory": ("attention",) * 9 + ("window", "full window", "recurrent", "hybrid"),
    "guard": ("on", "on", "on", "off"),
    "slots": ("contiguous", "scattered"),
}

#: The models of `synthetic.SHAPES` behind each memory.
MODELS = {
    "attention": "grouped",
    "window": "sliding",
    "full window": "sliding",
    "recurrent": "recurrent",
    "hybrid": "hybrid",
}

#: Operations of a schedule; and of one where each takes a hundred times as long, since behind RPC
#: every row of a transposed V is a message, and the models with windows have 26 layers of them.
LENGTH, SHORT = 100, 20

#: The movers that a device has; "host" copies within host memory.
REMOTE_MOVERS = ("auto", "gather", "graph", "staged")


@dataclass(frozen=True)
class Combination:
    """One value of each dimension.

    ``memory`` "window" has a small cache for a window that slides, "full window" one of full size.
    ``guard`` "off" leaves out what the shim and the runtime check and undo. ``slots`` are what
    LLAMA_SET_ROWS chooses where a release knows it.
    """

    cache: str = "flash f16"
    mover: str = "auto"
    plan: str = "fewest"
    policy: str = "never"
    backing: str = "heap"
    device: str = "cpu"
    memory: str = "attention"
    guard: str = "on"
    slots: str = "contiguous"

    @property
    def plain(self) -> Combination:
        """Return what stock has of it: the same cache, without what patches offer."""
        return Combination(
            cache=self.cache, device=self.device, memory=self.memory, slots=self.slots
        )

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return MODELS[self.memory]

    @property
    def length(self) -> int:
        """Return how many operations a schedule has."""
        return SHORT if self.device == "rpc" and self.model == "sliding" else LENGTH

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that the library reads."""
        return {"LLAMA_SET_ROWS": str(int(self.slots == "scattered"))}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `Model.context` but for the backing: several micro-batches."""
        setting = SETTINGS[self.cache]
        return {
            "n_ctx": 256,
            "n_batch": 96,
            "n_ubatch": 32,
            "n_seq_max": 5,
            "flash_attn": setting.flash_attn,
            "type_k": setting.type_k,
            "type_v": setting.type_v,
            "swa_full": self.memory == "full window",
            "defrag_mover": self.mover,
            "defrag_plan": self.plan,
            "defrag_policy": self.policy,
            "guard": self.guard,
        }

    def __str__(self) -> str:
        """Name what is not as usual."""
        usual = Combination()
        words = [
            f"{each.name} {getattr(self, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(usual, each.name)
        ]
        return ", ".join(words) or "as usual"


def normalize(drawn: Combination, *, undoes: bool = True) -> Combination:
    """Replace the values that mean nothing beside the others.

    Mapped memory lies in this process, and so does what the host mover moves; a state has neither
    cells to move nor slots. Without the guard nothing puts right what only the runtime can: a
    memory that keeps states or a window, from which a failed decode takes what it had, and all of
    a library that does not itself ``undoes`` a decode which was broken off.
    """
    if drawn.device == "rpc":
        mover = drawn.mover if drawn.mover in REMOTE_MOVERS else "auto"
        drawn = replace(drawn, backing="heap", mover=mover)
    if drawn.memory == "recurrent":
        drawn = replace(drawn, cache="plain f16", mover="auto", plan="fewest", policy="never")
        drawn = replace(drawn, slots="contiguous", backing="heap")
    if drawn.memory != "attention" or not undoes:
        drawn = replace(drawn, guard="on")
    return drawn


def walk(seed: int, *, undoes: bool = True) -> Iterator[Combination]:
    """Yield combinations without end, the same ones of a seed.

    Every dimension is a deck of cards that is shuffled anew once it is through: so all of its
    values come soon, and a run of a minute has met each.
    """
    decks = {name: _deal(values, Random(f"{seed} {name}")) for name, values in VALUES.items()}
    while True:
        drawn = Combination(**{name: next(deck) for name, deck in decks.items()})
        yield normalize(drawn, undoes=undoes)


def _deal(values: Sequence[str], chance: Random) -> Iterator[str]:
    while True:
        yield from chance.sample(values, len(values))
