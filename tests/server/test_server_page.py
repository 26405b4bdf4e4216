"""Test what docs/server.md states and no scenario shows, on servers of the newest release."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import gguf
import pytest
import readme

from pyllamakv.errors import NotBuilt, RequestFailed
from pyllamakv.home import home
from pyllamakv.scenarios import synthetic_models
from pyllamakv.server import server_scenarios
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_client import ServerClient
from pyllamakv.server.server_lab import MODELS, SLOT, ServerLab, complete
from pyllamakv.server.server_process import ServerProcess
from pyllamakv.source import verified

if TYPE_CHECKING:
    from pathlib import Path

#: Pages and programs of reports to upstream.
REPORTS = readme.ROOT / "docs" / "upstream"

pytestmark = [pytest.mark.native, pytest.mark.slow]


def lab(side: str = "patched") -> ServerLab:
    """Return the lab of a built server of the newest release, or skip."""
    pytest.importorskip("httpx")
    try:
        return ServerLab(find_server(f"{verified.newest().name}+{side}"))
    except NotBuilt as error:
        pytest.skip(str(error))


def test_short_prefix_of_a_long_prompt_is_not_copied() -> None:
    """At least one token of 16 copied ones must be useful."""
    used = lab()
    with used.server() as server, ServerClient(server.url) as client:
        first, other = (used.prompt(client, SLOT - 32) for _ in range(2))
        complete(client, first, 1, id_slot=0)
        few, enough = len(first) // 20, len(first) // 14
        assert complete(client, first[:few] + other[:99], 1, id_slot=1).reused < 8
        assert complete(client, first[:enough] + other[:99], 1, id_slot=2).reused >= enough


def test_least_recently_used_prompt_leaves_the_cache_first() -> None:
    """Three prompts fit into the cache; the first one is used again, so the second one is lost."""
    used = lab()
    with (
        used.server("--cache-ram", "3", model="sliding", slots=1) as server,
        ServerClient(server.url) as client,
    ):
        prompts = [used.prompt(client, SLOT - 16) for _ in range(5)]
        a, b, c, d, e = prompts

        def reused(prompt: tuple[int, ...]) -> int:
            return complete(client, prompt, 1, id_slot=0).reused

        assert max(map(reused, (a, b, c))) < 8
        assert reused(a) > len(a) - 8
        assert max(map(reused, (d, e))) < 8
        assert reused(a) > len(a) - 8
        assert reused(b) < 8


@pytest.mark.parametrize(
    ("model", "words", "length", "expected"),
    [
        ("hybrid", ("-ub", "64"), 900, (256, 512, 768)),
        ("recurrent", ("-ub", "64"), 900, (256, 512, 768)),
        ("hybrid", ("-ub", "512"), 1800, (512, 1024)),
        ("hybrid", ("-ub", "64", "--ctx-checkpoints", "8"), 1900, (512, 1024, 1536)),
        ("hybrid", ("-ub", "64", "--checkpoint-min-step", "128"), 600, (128, 256, 384, 512)),
        ("hybrid", ("-ub", "64", "--checkpoint-min-step", "9"), 340, (64, 128, 192, 256)),
        ("sliding", ("-ub", "64"), 900, ()),
    ],
    ids=["hybrid", "recurrent", "micro-batch", "half", "128", "64", "sliding"],
)
def test_checkpoints_are_made_within_a_prompt(
    model: str, words: tuple[str, ...], length: int, expected: tuple[int, ...]
) -> None:
    """The last ones, a micro-batch and 4 tokens before its end, are made by stock too."""
    used = lab()
    log: list[str] = []
    with (
        used.server("-v", *words, model=model, slots=1, cells=2048, sink=log.append) as server,
        ServerClient(server.url) as client,
    ):
        complete(client, used.prompt(client, length), 1, id_slot=0)
        until = time.monotonic() + 10
        while not any("stop processing" in line for line in log) and time.monotonic() < until:
            time.sleep(0.05)
    made = re.findall(r"created context checkpoint .* n_tokens = (\d+)", "\n".join(log))
    near = length - 4 - int(words[1])
    assert tuple(at for at in map(int, made) if at < near) == expected


def test_stock_server_restores_files_with_a_checksum(tmp_path: Path) -> None:
    """It ignores what follows the state and its checkpoints, also those of a hybrid model."""
    options = ("--slot-save-path", f"{tmp_path}/", "-ub", "64")
    for model in ("full", "hybrid"):
        used = lab()
        with (
            used.server(*options, model=model, cells=1024) as server,
            ServerClient(server.url) as client,
        ):
            prompt = used.prompt(client, 400)
            complete(client, prompt, 1, id_slot=0)
            client.post("/slots/0?action=save", {"filename": model})
        with (
            lab("stock").server(*options, model=model, cells=1024) as server,
            ServerClient(server.url) as client,
        ):
            client.post("/slots/1?action=restore", {"filename": model})
            assert complete(client, (*prompt, 70), 1, id_slot=1).reused >= len(prompt) - 70


def test_slot_file_that_ends_after_its_state_has_no_checkpoints(tmp_path: Path) -> None:
    """A longer prompt continues it; one with another end is evaluated again."""
    used = lab()
    with (
        used.server(
            "--slot-save-path", f"{tmp_path}/", "-ub", "64", model="hybrid", cells=1024
        ) as server,
        ServerClient(server.url) as client,
    ):
        prompt = used.prompt(client, 600)
        complete(client, prompt, 1, id_slot=0)
        client.post("/slots/0?action=save", {"filename": "whole"})
        data = (tmp_path / "whole").read_bytes()
        (tmp_path / "state").write_bytes(data[: data.index(b"SCKP\x01\0\0\0")])
        changed = (*prompt[:550], *[70] * 9)
        for name, least in (("whole", 512), ("state", 0)):
            # Another slot or the prompt cache would have the prompt as well.
            for slot in range(used.slots):
                client.post(f"/slots/{slot}?action=erase", {})
            client.post("/slots/1?action=restore", {"filename": name})
            found = complete(client, (*prompt, 70), 1, id_slot=1)
            assert found.reused >= len(prompt) - 1
            client.post("/slots/1?action=erase", {})
            client.post("/slots/1?action=restore", {"filename": name})
            found = complete(client, changed, 1, id_slot=1)
            assert (found.reused >= 512) if least else (found.reused == 0)


def split_model(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write a model into files of six tensors each, and return their paths."""
    folder.mkdir()
    with monkeypatch.context() as patch:
        writer = functools.partial(gguf.GGUFWriter, split_max_tensors=6)
        patch.setattr(synthetic_models.gguf, "GGUFWriter", writer)
        synthetic_models.write(MODELS[model], folder / "model.gguf")
    return sorted(folder.iterdir())


def test_slot_file_of_another_split_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only its second file differs."""
    files = split_model(tmp_path / "full", "full", monkeypatch)
    others = split_model(tmp_path / "other", "other", monkeypatch)
    assert len(files) > 1
    options = ("--slot-save-path", f"{tmp_path}/")
    used = lab()
    with used.server(*options, model=files[0]) as server, ServerClient(server.url) as client:
        complete(client, used.prompt(client, 100), 1, id_slot=0)
        client.post("/slots/0?action=save", {"filename": "slot"})
    for changed, refused in (((), False), (files[1:], True), (files[:1], True)):
        content = {path: path.read_bytes() for path in files}
        for path in changed:
            path.write_bytes(others[files.index(path)].read_bytes())
        with (
            used.server(*options, model=files[0]) as server,
            ServerClient(server.url) as client,
            pytest.raises(RequestFailed, match="another model") if refused else nullcontext(),
        ):
            client.post("/slots/0?action=restore", {"filename": "slot"})
        for path, data in content.items():
            path.write_bytes(data)


@pytest.mark.parametrize("side", ["stock", "patched"])
def test_stock_ignores_schemas_in_other_places(side: str) -> None:
    """Of the places that `server-schema` tests, two have an effect there."""
    with lab(side).server() as server, ServerClient(server.url) as client:
        for number, (path, body) in enumerate(server_scenarios._requests({"type": "boolean"})):
            text = server_scenarios._text_of(client.post(path, body)).strip()
            enforced = side == "patched" or number in (0, 5)
            # Blanks can precede the value.
            assert (text in ("", "true", "false")) == enforced, (path, body, text)


#: Cases of docs/upstream/server-defects.py by the model that shows them. swa-full needs one that
#: generates whole characters: the scenario of this name has the case.
_CASES = {
    "full": "id-slot shared-entry other-slot busy-slot slot-file pattern tools format",
    "hybrid": "other-end",
}


@pytest.mark.parametrize("side", ["stock", "patched"])
def test_reproducer_of_defects_fails_on_stock_alone(side: str) -> None:
    """Every case has its own line."""
    program = str(lab(side).built.program)
    for model, cases in _CASES.items():
        path = synthetic_models.generate(MODELS[model], home() / "models")
        words = [sys.executable, REPORTS / "server-defects.py", program, path, *cases.split()]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        lines = done.stdout.splitlines()
        assert len(lines) == len(cases.split())
        assert [line.endswith(": as expected") for line in lines] == [side == "patched"] * len(
            lines
        )
        assert done.returncode == (side == "stock")


@pytest.mark.parametrize(
    ("side", "first"),
    [
        ("stock", "0 chats were answered, 4 failed"),
        ("patched", "4 chats were answered, 0 failed"),
    ],
)
def test_reproducer_of_parking_prints_what_the_page_shows(side: str, first: str) -> None:
    """The page has the output of both servers."""
    page = (REPORTS / "server-park.md").read_text("utf-8")
    assert first in page
    path = synthetic_models.generate(MODELS["full"], home() / "models")
    words = [sys.executable, REPORTS / "server-park.py", str(lab(side).built.program), path]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.splitlines()[0] == first
    assert done.stdout in page or side == "patched"


def test_settings_file_selects_neither_host_nor_port(tmp_path: Path) -> None:
    """Its other settings apply; the program alone would use its host and port."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "config.ini").write_text("[*]\nhost = 127.0.0.2\nport = 1\nparallel = 3\n", "utf-8")
    path = synthetic_models.generate(MODELS["full"], home() / "models")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    env = {**kept, "XDG_CONFIG_HOME": str(tmp_path)}
    words = ["-m", str(path), "--port", "0", "-c", "768"]
    with (
        ServerProcess(lab().built.program, words, env=env) as server,
        ServerClient(server.url) as client,
    ):
        assert (server.host, len(client.slots())) == ("127.0.0.1", 3)
