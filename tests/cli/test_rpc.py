"""Test models and caches on RPC servers, whose failures are errors of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import pyllamakv as kv
from pyllamakv.home import home
from pyllamakv.scenarios import architectures, synthetic_models
from pyllamakv.scenarios.device_placement import ALL

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

pytestmark = pytest.mark.native

TOKENS = list(range(1, 30))


def logits(model: kv.Model) -> np.ndarray:
    """Decode, fragment, defragment, decode; return the last logits."""
    with model.context(n_ctx=256, n_batch=64, n_seq_max=2) as ctx:
        a, b = ctx.sequence(), ctx.sequence()
        for token in TOKENS:
            ctx.decode([a.feed([token]), b.feed([token + 1])])
        a.remove()
        before = ctx.kv.rows(0, b)
        assert ctx.kv.defrag().cells
        after = ctx.kv.rows(0, b)
        assert (before.k == after.k).all()
        assert (before.v == after.v).all()
        ctx.decode(b.feed([5]))
        return ctx.logits().copy()


@pytest.mark.slow
def test_cache_on_an_rpc_server_gives_local_logits(patched: Variant) -> None:
    """Its cells move on the device, and the logits are equal."""
    path = synthetic_models.model("grouped")
    with kv.open(patched.folder) as lib, lib.load_model(path) as model:
        expected = logits(model)
    with (
        kv.serve_rpc(patched.folder, threads=1) as server,
        kv.open(patched.folder, backend="rpc") as lib,
        lib.load_model(path, n_gpu_layers=ALL, rpc_servers=server.endpoint) as model,
    ):
        found = {device.name: device.kv for device in lib.devices()}
        assert found == {"CPU": "host", f"RPC[{server.endpoint}]": "device"}
        assert np.abs(logits(model) - expected).max() < 0.02
        with model.context(n_ctx=256) as ctx:
            assert ctx.kv.snapshot().streams[0].info.host == 0


@pytest.mark.slow
def test_a_server_that_stops_answering_ends_the_call_after_the_timeout(patched: Variant) -> None:
    """Its connection stays open, so that nothing else ends the wait."""
    with (
        kv.serve_rpc(patched.folder, threads=1) as server,
        kv.open(patched.folder, backend="rpc", timeout=60.0) as lib,
    ):
        model = lib.load_model(
            synthetic_models.model("grouped"), n_gpu_layers=ALL, rpc_servers=server.endpoint
        )
        ctx = model.context(n_ctx=256)
        lib.native.timeout = 1.0  # type: ignore[attr-defined]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(kv.WorkerTimeout):
                ctx.decode(ctx.sequence().feed(TOKENS))
            with pytest.raises(kv.WorkerTimeout):
                lib.devices()
        finally:
            os.kill(server.pid, signal.SIGCONT)


@pytest.mark.slow
def test_layers_are_distributed_over_two_servers(patched: Variant) -> None:
    """Each holds half of the model and of its cache; without either one, calls fail."""
    with (
        kv.serve_rpc(patched.folder, threads=1) as one,
        kv.serve_rpc(patched.folder, threads=1) as other,
        kv.open(patched.folder, backend="rpc") as lib,
    ):
        both = f"{one.endpoint},{other.endpoint}"
        model = lib.load_model(
            synthetic_models.model("grouped"), n_gpu_layers=ALL, rpc_servers=both
        )
        assert logits(model).shape == (64,)
        ctx = model.context(n_ctx=256)
        sequence = ctx.sequence()
        ctx.decode(sequence.feed(TOKENS))
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(kv.DeviceLost, match="open the library again"):
            for token in TOKENS:
                ctx.decode(sequence.feed([token]))
        with pytest.raises(kv.DeviceLost):
            lib.devices()
    with (
        kv.serve_rpc(patched.folder, threads=1) as server,
        kv.open(patched.folder, backend="rpc") as lib,
    ):
        again = lib.load_model(
            synthetic_models.model("grouped"), n_gpu_layers=ALL, rpc_servers=server.endpoint
        )
        assert logits(again).shape == (64,)


def test_server_killed_during_a_decode_raises_device_lost(patched: Variant) -> None:
    """The error has the cause, and this process continues."""
    import threading

    with (
        kv.serve_rpc(patched.folder, threads=1) as server,
        kv.open(patched.folder, backend="rpc") as lib,
    ):
        model = lib.load_model(
            synthetic_models.model("deep"), n_gpu_layers=ALL, rpc_servers=server.endpoint
        )
        ctx = model.context(n_ctx=512, n_batch=512, n_ubatch=16)
        sequence = ctx.sequence()
        threading.Timer(0.02, os.kill, (server.pid, signal.SIGKILL)).start()
        with pytest.raises(kv.DeviceLost):
            while True:
                ctx.decode(sequence.feed([1] * 256))
                sequence.trim(0)


def test_unreachable_endpoints_are_refused(patched: Variant) -> None:
    """An unreachable or invalid endpoint is refused, and so is one that could end this process."""
    path = synthetic_models.tiny()
    with kv.serve_rpc(patched.folder) as server:
        endpoint = server.endpoint
    with kv.open(patched.folder, backend="rpc") as lib:
        with pytest.raises(kv.ModelError, match=f"no RPC server answers at {endpoint}"):
            lib.load_model(path, n_gpu_layers=ALL, rpc_servers=endpoint)
        with pytest.raises(kv.KvError, match="host:port"):
            lib.load_model(path, n_gpu_layers=ALL, rpc_servers="nowhere")
        assert logits(lib.load_model(synthetic_models.model("grouped"))).shape == (64,)
    with kv.open(patched.folder) as lib, pytest.raises(kv.UsageError, match="isolated=True"):
        lib.load_model(path, rpc_servers=endpoint)


@pytest.mark.slow
def test_context_larger_than_the_server_memory_is_refused(patched: Variant) -> None:
    """A cache that exceeds the device's memory is refused, or the server's end is reported."""
    with (
        kv.serve_rpc(patched.folder, threads=1) as server,
        kv.open(patched.folder, backend="rpc") as lib,
    ):
        model = lib.load_model(
            synthetic_models.model("deep"), n_gpu_layers=ALL, rpc_servers=server.endpoint
        )
        with pytest.raises((kv.ContextError, kv.DeviceLost)):
            model.context(n_ctx=1 << 30, n_batch=32)


@pytest.mark.slow
def test_rpc_serve_runs_until_a_signal(patched: Variant) -> None:
    """It prints the endpoint when it listens, warns about public ones, and ends cleanly."""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pyllamakv.cli.main", "rpc", "serve", str(patched.folder)]
    hosts = ([], ["--host", "localhost"], ["--host", "0.0.0.0"])
    for more, warned in zip(hosts, (False, False, True), strict=True):
        with subprocess.Popen(
            [*command, "--port", "0", "--threads", "1", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            # A background process of a shell inherits that Ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as verb:
            try:
                assert verb.stdout is not None
                endpoint = verb.stdout.readline().strip().replace("0.0.0.0", "127.0.0.1")
                with kv.open(patched.folder, backend="rpc") as lib:
                    lib.load_model(synthetic_models.tiny(), n_gpu_layers=ALL, rpc_servers=endpoint)
                verb.send_signal(signal.SIGINT)
                _, output = verb.communicate(timeout=120)
            finally:
                verb.kill()
            assert ("no authentication" in output) is warned
            assert verb.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["gather", "graph"])
def test_ordered_moves_on_two_servers_keep_the_bytes(patched: Variant, mover: str) -> None:
    """Cells keep their bytes if a batch of ordered moves takes a graph per server."""
    shape = architectures.Shape("servers", n_layer=6, n_embd=64, n_head=2, n_head_kv=2, n_ff=32)
    with (
        kv.serve_rpc(patched.folder, threads=1) as one,
        kv.serve_rpc(patched.folder, threads=1) as other,
        kv.open(patched.folder, backend="rpc") as lib,
        lib.load_model(
            synthetic_models.generate(shape, home() / "models"),
            n_gpu_layers=ALL,
            rpc_servers=f"{one.endpoint},{other.endpoint}",
        ) as model,
        model.context(512, 128, n_seq_max=2, defrag_plan="ordered", defrag_mover=mover) as ctx,
    ):
        gone, kept = ctx.sequence(), ctx.sequence()
        for token in TOKENS:
            ctx.decode([gone.feed([token]), kept.feed([token + 1, token])])
        gone.remove()
        layers = range(model.info.n_layer)
        before = [ctx.kv.rows(layer, kept) for layer in layers]
        report = ctx.kv.defrag()
        assert report.cells == 2 * len(TOKENS)
        assert report.graphs is not None
        assert report.graphs >= 2, "one for each server"
        for old, layer in zip(before, layers, strict=True):
            new = ctx.kv.rows(layer, kept)
            assert (old.k == new.k).all()
            assert (old.v == new.v).all()
        ctx.decode(kept.feed([5]))
