"""`pyllamakv model`, and names of models in other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_kit import EXAMPLE, cli
from model_kit import CONTENT, NAME, Offer, offer_wheel
from source_kit import isolate

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Return an index that offers the wheel of the small model, and an empty data directory."""
    isolate(tmp_path, monkeypatch)
    yield from offer_wheel(tmp_path, monkeypatch)


def test_model_get_prints_the_path_and_list_the_state(offer: Offer, capsys) -> None:
    """`get` prints the path; `list` reports whether the model is fetched."""
    code, out, _ = cli(capsys, "model", "list")
    assert code == 0
    heads, row = out.splitlines()
    assert heads.split() == ["model", "size", "licence", "from", "fetched"]
    assert row.split() == [NAME, "0", "MB", "MIT", "llm-little", "1.0", "no"]
    code, out, err = cli(capsys, "model", "get", NAME)
    assert (code, out) == (0, f"{offer.model.path}\n")
    assert "download" in err
    assert Path(out.strip()).read_bytes() == CONTENT
    listed = json.loads(cli(capsys, "model", "list", "--json")[1])
    assert [(row["name"], row["fetched"]) for row in listed] == [(NAME, True)]
    assert json.loads(cli(capsys, "model", "get", NAME, "--json")[1]) == listed[0]


def test_model_get_exits_with_2_or_4_on_errors(offer: Offer, capsys) -> None:
    """An unknown name exits with 2, a failed download with 4."""
    code, out, err = cli(capsys, "model", "get", "little-2m")
    assert (code, out) == (2, "")
    assert (
        f"UnknownModel: there is no model 'little-2m' in the lock file; did you mean {NAME}" in err
    )
    offer.server.fail = [503] * 10
    code, out, _ = cli(capsys, "model", "get", NAME, "--json")
    assert code == 4
    assert json.loads(out)["error"]["type"] == "FetchError"


@pytest.mark.parametrize(
    "words",
    [("run", EXAMPLE), *(("trace", each, EXAMPLE) for each in ("view", "stats", "minimize"))],
)
def test_unfetched_model_error_names_the_get_command(
    offer: Offer, capsys, words: tuple[object, ...]
) -> None:
    """The error of --model names the command that fetches it."""
    code, out, err = cli(capsys, *words, "--model", NAME)
    assert (code, out) == (2, "")
    assert f"pyllamakv model get {NAME}" in err
