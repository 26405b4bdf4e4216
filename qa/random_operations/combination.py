"""Combine the dimensions of a case: cache, mover, plan, policy, backing, device, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any

from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.scenario import CACHES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SETTINGS = {setting.name: setting for setting in CACHES}

#: Memories with states; "hybrid window" also has a sliding window.
STATES = ("recurrent", "hybrid", "hybrid window")

#: The values of each dimension. A value that is listed more often is chosen more often: RPC and
#: models with 26 layers cost several times as much as others.
VALUES: Mapping[str, Sequence[str]] = {
    "cache": tuple(SETTINGS),
    "mover": ("auto", "host", "gather", "graph", "staged"),
    "plan": ("fewest", "ordered"),
    "policy": ("never", "on_failure", "threshold", "always"),
    "backing": ("heap", "mmap", "file", "kept"),
    "device": ("cpu",) * 23 + ("rpc",),
    "memory": ("attention",) * 9 + ("window", "full window", *STATES),
    "guard": ("on", "on", "on", "off"),
    "slots": ("contiguous", "scattered"),
    "streams": ("shared", "shared", "separate"),
    "manager": (
        *("none",) * 8,
        *("prefix cache", "paged prefix cache", "prefix store", "slot cache"),
    ),
}

#: The models of `synthetic_models.SHAPES` with each memory.
MODELS = {
    "attention": "grouped",
    "window": "sliding",
    "full window": "sliding",
    "recurrent": "recurrent",
    "hybrid": "hybrid",
    "hybrid window": "hybrid-sliding",
}

#: Memories of cache managers, with a model of few layers: an operation takes a tenth of the time.
SHORT_WINDOWS = {"window": "short window", "full window": "short full window"}
_SHORT_MODEL = "sliding, short"
MODELS_OF_MANAGERS = {**MODELS, **dict.fromkeys(SHORT_WINDOWS.values(), _SHORT_MODEL)}

#: Operations of a case; and of a case in which each takes a hundred times as long: behind RPC,
#: every row of a transposed V is a message, and the models with windows have 26 layers.
LENGTH, SHORT = 100, 20
#: Operations of a case with a cache manager, most of which evaluate a prompt twice.
MANAGED = 40

#: The movers of a device; "host" copies within host memory.
REMOTE_MOVERS = ("auto", "gather", "graph", "staged")


@dataclass(frozen=True)
class Combination:
    """One value of each dimension.

    ``memory`` "window" has a small sliding-window cache, "full window" one of full size, and those
    of `SHORT_WINDOWS` a model of two layers. ``guard``
    "off" disables the checks and rollbacks of shim and runtime. ``slots`` is the value of
    LLAMA_SET_ROWS, on releases that read it. ``streams`` "separate" gives each sequence a stream of
    cells. ``manager`` is the cache manager that operates the context, or "none".
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
    streams: str = "shared"
    manager: str = "none"

    @property
    def plain(self) -> Combination:
        """Return the combination for stock: the same cache, without the patches' features."""
        return Combination(
            cache=self.cache,
            device=self.device,
            memory=self.memory,
            slots=self.slots,
            streams=self.streams,
        )

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return MODELS_OF_MANAGERS[self.memory]

    @property
    def model_file(self) -> Path:
        """Return the path of the model, which is generated if it does not exist."""
        if self.model != _SHORT_MODEL:
            return synthetic_models.model(self.model)
        shape = replace(synthetic_models.SHAPES["sliding"], name="short-sliding", n_layer=2)
        return synthetic_models.generate(shape, home() / "models")

    @property
    def length(self) -> int:
        """Return the number of operations of a case."""
        if self.manager != "none":
            return MANAGED
        return SHORT if self.device == "rpc" and self.model == "sliding" else LENGTH

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that the library reads."""
        return {"LLAMA_SET_ROWS": str(int(self.slots == "scattered"))}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `Model.context` except the backing: several micro-batches."""
        setting = SETTINGS[self.cache]
        return {
            "n_ctx": 256,
            "n_batch": 96,
            "n_ubatch": 32,
            "n_seq_max": 5,
            # The models are tiny: more threads wait for each other.
            "n_threads": 1,
            "kv_unified": self.streams == "shared",
            "flash_attn": setting.flash_attn,
            "type_k": setting.type_k,
            "type_v": setting.type_v,
            "swa_full": self.memory.endswith("full window"),
            "defrag_mover": self.mover,
            "defrag_plan": self.plan,
            "defrag_policy": self.policy,
            "guard": self.guard,
        }

    def __str__(self) -> str:
        """List the values that differ from the usual ones."""
        usual = Combination()
        words = [
            f"{each.name} {getattr(self, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(usual, each.name)
        ]
        return ", ".join(words) or "as usual"


def normalize(
    drawn: Combination, *, undoes: bool = True, separate: bool = True, windows: bool = False
) -> Combination:
    """Replace values that have no effect in combination with the others.

    Mapped memory and the host mover need memory of this process; a state has neither cells to move
    nor slots. Without the guard, some failed decodes cannot be rolled back: those in memories with
    states or a window, and all of a library that does not itself ``undoes`` a failed decode.
    llama.cpp itself keeps a sequence only within its stream. ``separate``: the build has streams.
    Managers run in host memory, with the guard. ``windows``: the build has caches for windows;
    without one, the memory of a manager is attention, whatever the model masks.
    """
    if drawn.manager != "none":
        drawn = replace(drawn, backing="heap", device="cpu", guard="on")
        if drawn.memory in SHORT_WINDOWS:
            memory = SHORT_WINDOWS[drawn.memory] if windows else "attention"
            drawn = replace(drawn, memory=memory)
    elif drawn.memory == "hybrid window":
        drawn = replace(drawn, memory="hybrid")
    if not separate or drawn.memory == "recurrent":
        drawn = replace(drawn, streams="shared")
    if drawn.device == "rpc":
        mover = drawn.mover if drawn.mover in REMOTE_MOVERS else "auto"
        drawn = replace(drawn, backing="heap", mover=mover)
    if drawn.memory == "recurrent":
        drawn = replace(drawn, cache="plain f16", mover="auto", plan="fewest", policy="never")
        drawn = replace(drawn, slots="contiguous", backing="heap")
    if drawn.memory != "attention" or drawn.streams == "separate" or not undoes:
        drawn = replace(drawn, guard="on")
    return drawn


def walk(
    seed: int, *, undoes: bool = True, separate: bool = True, windows: bool = False,
    managers: bool = False,
) -> Iterator[Combination]:  # fmt: skip
    """Yield combinations endlessly, equal for equal seeds; with ``managers`` none without one.

    Every dimension is a shuffled list of its values, reshuffled at its end: all values come soon,
    also in a run of a minute.
    """
    values = dict(VALUES)
    if managers:
        values["manager"] = [each for each in VALUES["manager"] if each != "none"]
    decks = {name: _deal(dealt, Random(f"{seed} {name}")) for name, dealt in values.items()}
    while True:
        drawn = Combination(**{name: next(deck) for name, deck in decks.items()})
        yield normalize(drawn, undoes=undoes, separate=separate, windows=windows)


def _deal(values: Sequence[str], chance: Random) -> Iterator[str]:
    while True:
        yield from chance.sample(values, len(values))
