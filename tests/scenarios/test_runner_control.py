"""Test the control run, which finds devices that compute wrong results on stock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.simulated import SimulatedNative
from runtime_kit import Opener

from pyllamakv.errors import WorkerDied, WorkerTimeout
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.scenarios.runner import TOKENS, ScenarioRunner
from pyllamakv.scenarios.scenario import CACHES
from pyllamakv.verification import discovery
from pyllamakv.verification.verdict import Pair, is_harmful


class Device(SimulatedNative):
    """Allocate the cache outside of host memory."""

    def cells(self, context, cache):
        raw = super().cells(context, cache)
        return replace(raw, info=replace(raw.info, host=0))


class Crooked(Device):
    """Return other logits for single tokens than for batches, in any cells."""

    def decode(self, context, token, pos, seq_count, seq_id, logits):
        status = super().decode(context, token, pos, seq_count, seq_id, logits)
        if len(token) == 1:
            held = self._get(context)
            held.logits = [each + 1 for each in held.logits]
        return status


class Ending(Device):
    """End the worker at the first single token."""

    def decode(self, context, token, pos, seq_count, seq_id, logits):
        if len(token) == 1:
            raise WorkerDied("ended by SIGABRT", signal=6)
        return super().decode(context, token, pos, seq_count, seq_id, logits)


class NoContext(Device):
    """End the worker at the first context."""

    def context_new(self, *args, **options):
        raise WorkerDied("ended by SIGSEGV", signal=11)


class NoModel(Device):
    """End the worker while a model is loaded."""

    def model_load(self, *args):
        raise WorkerDied("ended by SIGSEGV during model_load", signal=11)


class Slow(Device):
    """Hang at the first single token."""

    def decode(self, context, token, pos, seq_count, seq_id, logits):
        if len(token) == 1:
            raise WorkerTimeout("no answer")
        return super().decode(context, token, pos, seq_count, seq_id, logits)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))


def run(make, backend: str, times: int = 1):
    """Run a scenario on a backend; return the outcome, and the calls of the last worker."""
    opener = Opener(make)
    with ScenarioRunner(opener, DevicePlacement(backend)) as bench:
        for _ in range(times):
            found = bench.run(Path("lib"), discovery.find("fragmented"), CACHES[0])
        return found.outcome, opener.opened[-1].native.calls, len(opener.opened)


def test_a_setting_that_the_device_computes_wrongly_is_skipped() -> None:
    """The reason has the difference; the scenario itself does not run."""
    outcome, calls, _ = run(lambda: Crooked(heals=True), "vulkan")
    assert outcome.status == "skip"
    assert "before cells are moved: logits of the same tokens differ by 1" in outcome.message
    assert calls.count(f"decode {TOKENS}") == 1
    assert calls[1:] == ["decode 1"] * TOKENS


def test_correct_device_is_tried_once_per_setting() -> None:
    """The second run in the same setting uses the result of the first."""
    outcome, calls, _ = run(lambda: Device(heals=True), "cuda", times=2)
    assert outcome.status == "pass", outcome.message
    assert calls.count(f"decode {TOKENS}") == 1


def test_device_without_the_cache_is_tried_once() -> None:
    """The control's context is freed, and the second run uses its result."""
    made: list[SimulatedNative] = []

    def make() -> SimulatedNative:
        made.append(SimulatedNative(heals=True))
        return made[-1]

    outcome, _, opened = run(make, "vulkan", times=2)
    assert (outcome.status, opened) == ("skip", 1)
    assert "host memory" in outcome.message
    assert made[0].freed.count("context") == 1


@pytest.mark.parametrize("backend", ["cpu", "rpc"])
def test_cpu_backends_run_no_control(backend: str) -> None:
    """On a CPU every failure counts."""
    place = DevicePlacement(backend)
    assert not place.off_cpu
    assert place.model("tiny") == "tiny"
    if backend == "cpu":
        outcome, calls, _ = run(lambda: SimulatedNative(heals=True), backend)
        assert outcome.status == "pass"
        assert f"decode {TOKENS}" not in calls


def test_a_worker_that_the_control_ends_is_replaced() -> None:
    """A setting that the device cannot run on stock is skipped; the next run has a new worker."""
    outcome, _, opened = run(Ending, "vulkan", times=2)
    assert (outcome.status, outcome.failure, opened) == ("skip", "crash", 2)
    assert "ends the process before cells are moved: ended by SIGABRT" in outcome.message


def test_crash_while_creating_the_context_skips_the_run() -> None:
    """Without a first token, a patch cannot be verified."""
    outcome, calls, _ = run(NoContext, "vulkan")
    assert (outcome.status, outcome.failure) == ("skip", "crash")
    assert not any(call.startswith("decode") for call in calls)


def test_crash_while_loading_the_model_skips_the_run() -> None:
    """It says nothing about a patch if stock cannot load the architecture either."""
    stock, _, opened = run(NoModel, "cpu", times=2)
    assert (stock.status, stock.failure, opened) == ("skip", "crash", 2)
    assert "cannot be loaded here: ended by SIGSEGV" in stock.message
    assert not Pair("memory-recurrent", "guard", "plain f16", stock, stock).broken
    good, _, _ = run(lambda: Device(heals=True), "cpu")
    pair = Pair("memory-recurrent", "guard", "plain f16", good, stock)
    assert is_harmful(pair)


def test_a_device_that_is_slow_is_tried_again() -> None:
    """A hang is reported as a hang, because a busy machine may cause it."""
    outcome, _, opened = run(Slow, "vulkan", times=2)
    assert (outcome.status, outcome.failure, opened) == ("fail", "hang", 2)


def test_wrong_results_of_patched_on_a_device_are_failures() -> None:
    """A result that is right on stock and wrong on patched is a failure of patched."""
    stock, _, _ = run(lambda: Device(heals=True), "vulkan")
    patched, _, _ = run(lambda: Crooked(heals=True), "vulkan")
    pair = Pair("fragmented", "guard", "plain f16", stock, patched)
    assert pair.patched is not None
    assert pair.patched.failed


def test_patched_crash_is_harmful_if_stock_fails_the_claim() -> None:
    """It is, if patched crashes where stock does not."""
    stock, _, _ = run(Device, "vulkan")
    patched, _, _ = run(Ending, "vulkan")
    pair = Pair("fragmented", "fix", "plain f16", stock, patched)
    assert pair.stock.failure == "claim"
    assert pair.patched is not None
    assert pair.patched.failure == "crash"
    assert is_harmful(pair)
