"""Test that a player of timelines plays like others, and records every operation."""

from __future__ import annotations

import json

from fakes.simulated import SimulatedNative

from pyllamakv.binding.protocol import ContextParams, ModelParams
from pyllamakv.scenarios.frames import LONGEST, Timeline, TimelinePlayer, timelines
from pyllamakv.scenarios.lab import Lab
from pyllamakv.scenarios.outcome import Outcome
from pyllamakv.scenarios.runner import Run
from pyllamakv.verification import discovery, parallel_runs


def player(native: SimulatedNative, path) -> TimelinePlayer:
    model = native.model_load(str(path), ModelParams())
    return TimelinePlayer(native, model, ContextParams(n_ctx=32, n_batch=32, n_seq_max=4))


def test_every_operation_is_a_frame(tiny_model) -> None:
    """Failed decodes have a frame too, and each frame has its moves."""
    made = player(SimulatedNative(), tiny_model)
    made.fill({0: 16, 1: 16}, interleave=True)
    made.remove(1)
    made.decode({2: 8}, expect=None)
    made.defrag()
    made.copy(0, 3, 0, 4)
    ops = [(frame.op, frame.failed, frame.moved) for frame in made.timeline.frames]
    assert ops == [
        ("decode", "", 0),
        ("remove", "", 0),
        ("decode", "no-slot", 0),
        ("defrag", "", 8),
        ("copy", "", 0),
    ]
    assert made.timeline.frames[0].detail == "0: 16 tokens, 1: 16 tokens"
    assert sorted(made.timeline.frames[-1].picture.owner)[:5] == [-2, -2, -2, -2, -1]


def test_a_timeline_ends_when_it_is_long_enough(tiny_model) -> None:
    """A scenario with thousands of operations keeps only the first frames."""
    made = player(SimulatedNative(), tiny_model)
    for _ in range(LONGEST + 5):
        made.decode({0: 1})
        made.remove(0)
    assert len(made.timeline) == LONGEST


def test_one_run_of_a_scenario_is_recorded(tiny_model) -> None:
    """If the scenario requests it, the timeline is stored with the run's result."""
    native = SimulatedNative(heals=True)
    model = native.model_load(str(tiny_model), ModelParams())
    fragmented = discovery.find("fragmented")
    assert fragmented.record_frames
    lab = Lab(native, model, fragmented.settings[0], timeline=True)
    fragmented.run(lab)
    timeline = timelines(lab.players)[0]
    assert sum(frame.moved for frame in timeline.frames) > 0
    run = Run("fragmented", "x", Outcome("pass"), timelines=(timeline,))
    again = parallel_runs.from_json(json.loads(json.dumps(parallel_runs.to_json(run))))
    assert again.timelines == (Timeline("", timeline.frames),)
    plain = Lab(native, model, fragmented.settings[0])
    fragmented.run(plain)
    assert not timelines(plain.players)
