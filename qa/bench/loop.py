"""Compare the decode loop with C and with llama-cpp-python, on one library and one model.

All sides decode the same tokens with one thread, and must produce the same tokens or logits. C and
llama-cpp-python use the ordinary libraries of the variant, whose objects are those of this
package's library. The clock is the CPU time of the thread, which other programs affect least.
Upstream's batched-bench is not measured: the builds have upstream's tools off, and it measures the
same as the loop in C, several sequences at once, without sampling.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from pyllamakv.building import variant as variants
from pyllamakv.building.variant import Variant
from pyllamakv.errors import NotBuilt, Untestable
from pyllamakv.home import home
from pyllamakv.scenarios import architectures, synthetic_models
from qa.bench.decode_loops import ours, plain
from qa.bench.figure import Figure
from qa.bench.measure import Interval, Pairs, interleave, interval
from qa.bench.peer_loops import peer
from qa.bench.workload import PIECE, Runner, Workload, require_same_result

GROUP = "The decode loop"
Tick = Callable[[], None]

#: Interleaved pairs of rounds per figure.
PAIRS = 40
#: The minimum share of C's speed for a loop of eight sequences.
SHARE = 0.97

WORKLOADS = (
    Workload("greedy, 8 sequences", "greedy", 8, 48, ("llama_decode",)),
    Workload("greedy, 8 sequences, 16 steps a call", "greedy", 8, 48, ("llama_decode",), burst=16),
    Workload("logits only, 8 sequences", "logits", 8, 48, ("llama_decode",)),
    Workload("greedy, 1 sequence", "greedy", 1, 256, ("generate", "llama_decode")),
    Workload(
        "greedy, 1 sequence, 16 steps a call",
        "greedy",
        1,
        256,
        ("generate", "llama_decode"),
        burst=16,
    ),
    Workload("logits only, 1 sequence", "logits", 1, 256, ("eval", "llama_decode")),
    Workload(f"a prompt of 512 in pieces of {PIECE}", "prompt", 1, 512, ("eval",)),
)
NAMES = {
    "generate": "`Llama.generate`",
    "eval": "`Llama.eval`",
    "llama_decode": "`llama_decode` with a kept `llama_batch`",
}

#: The shape of the trained model of 260 thousand parameters, used if that model is not available.
SHAPE = architectures.Shape(
    "loop", n_layer=5, n_embd=64, n_head=8, n_head_kv=4, n_ff=172, n_vocab=512, vocab="bytes"
)


def figures(tick: Tick, spec: str = "0.3.9+patched", pairs: int = PAIRS) -> list[Figure]:
    """Measure every workload against each peer."""
    variant = built(spec)
    model = model_file()
    found = []
    for work in WORKLOADS:
        with ours(variant, model, work) as mine:
            measured = measure(plain(variant, model, work), mine, work, pairs, tick)
            found.append(beside_c(work, model, measured))
            for api in work.peers:
                try:
                    other = peer(variant, model, work, api)
                    measured = measure(other, mine, work, pairs, tick)
                except Untestable as error:
                    found.append(not_measured(work, api, str(error)))
                else:
                    found.append(beside_peer(work, api, measured))
    return found


def built(spec: str) -> Variant:
    """Return a built variant. Raises NotBuilt."""
    variant = variants.find(spec)
    if variant is None:
        msg = f"{spec} is not built here; run: pyllamakv build {spec.partition('+')[0]}"
        raise NotBuilt(msg)
    return variant


def model_file() -> Path:
    """Return the model that PYLLAMAKV_TEST_MODEL names, or one of the same shape."""
    if os.environ.get(synthetic_models.VARIABLE):
        return synthetic_models.model(synthetic_models.TEST)
    return synthetic_models.generate(SHAPE, home() / "models")


def measure(
    other: AbstractContextManager[Runner], mine: Runner, work: Workload, pairs: int, tick: Tick
) -> Pairs:
    """Run a workload on both sides, interleaved. Raise HarnessError if their results differ."""
    with other as theirs:
        require_same_result(work.name, mine(), theirs())
        return interleave(
            lambda: theirs().seconds, lambda: mine().seconds, pairs=pairs, progress=tick
        )


def per_step(work: Workload, seconds: list[float]) -> Interval:
    """Return the microseconds of a step, or of a whole prompt."""
    steps = 1 if work.kind == "prompt" else work.steps
    return interval([1e6 * each / steps for each in seconds])


def beside_c(work: Workload, model: Path, pairs: Pairs) -> Figure:
    """Return the loop's speed as a share of that of C; only eight sequences have a target."""
    speed, asked = pairs.ratio, work.sequences > 1
    return Figure(
        GROUP,
        work.name,
        f"{speed.format()} of the speed of plain C",
        f">= {SHARE}" if asked else "",
        speed.low >= SHARE if asked else None,
        f"{per_step(work, pairs.first).median:.0f} us in plain C, its sampling included",
        f"{len(pairs.first)} interleaved pairs of {_round(work)}, {model.stem}, "
        "CPU time of 1 thread",
        {"c": pairs.first, "python": pairs.second},
    )


def beside_peer(work: Workload, api: str, pairs: Pairs) -> Figure:
    """Return the ratio of llama-cpp-python's time to this package's."""
    factor = pairs.ratio
    return Figure(
        GROUP,
        f"{work.name}: llama-cpp-python, {NAMES[api]}",
        f"takes {factor.format()} times as long",
        "> 1",
        factor.low > 1,
        "1: the same decode",
        f"{len(pairs.first)} interleaved pairs, the same libraries, in a process of its own",
        {"llama-cpp-python": pairs.first, "python": pairs.second},
    )


def not_measured(work: Workload, api: str, why: str) -> Figure:
    """Return a figure with the reason why llama-cpp-python was not measured."""
    name = f"{work.name}: llama-cpp-python, {NAMES[api]}"
    return Figure(GROUP, name, "not measured", "> 1", None, "", why)


def _round(work: Workload) -> str:
    return "one prompt" if work.kind == "prompt" else f"{work.steps} steps"
