"""Test that all systems get the same requests, at the rate and lengths of the workload."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pyllamakv.errors import UsageError
from pyllamakv.server.server_lab import SLOT
from qa.load.request_schedule import cells, schedule

if TYPE_CHECKING:
    from pathlib import Path


def rows(path: Path, *lengths: tuple[int, list[int]]) -> Path:
    """Write a trace with one request per second."""
    lines = [
        {"timestamp": 1000 * n, "input_length": size, "output_length": 80, "hash_ids": blocks}
        for n, (size, blocks) in enumerate(lengths)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize("workload", ["fits", "shift"])
def test_poisson_arrivals_are_ordered_at_the_mean_rate(workload: str) -> None:
    """In `shift`, about half of the responses exceed their slots."""
    found = schedule(workload, 1000, 10.0)
    assert found == schedule(workload, 1000, 10.0)
    times = [each.at for each in found if each.at is not None]
    assert len(times) == 1000
    assert times == sorted(times)
    # The sum of a thousand gaps deviates by 3 % (one standard deviation).
    assert 85 < times[-1] < 115
    outgrown = sum(len(each.prompt) + each.n_predict > SLOT for each in found)
    assert 400 < outgrown < 600 if workload == "shift" else outgrown == 0
    assert all(SLOT // 10 <= len(each.prompt) < SLOT and each.n_predict > 0 for each in found)
    starts = [each.prompt[: SLOT // 10] for each in found]
    assert 400 < max(map(starts.count, starts)) < 600


def test_a_trace_is_scaled_down(tmp_path: Path) -> None:
    """Times and lengths are scaled; equal blocks are equal tokens, and all fit into a slot."""
    path = rows(tmp_path / "trace", (1024, [1, 2]), (2048, [1, 2, 3, 4]), (10**6, [5]))
    one, two, three = schedule("trace", 3, 1.0, trace=path)
    assert [each.at for each in (one, two, three)] == [0.0, 1.5, 3.0]
    assert [len(each.prompt) for each in (one, two)] == [16, 32]
    assert two.prompt[:16] == one.prompt
    assert two.prompt[16:32] != one.prompt
    assert one.n_predict == 10
    assert len(three.prompt) + three.n_predict < SLOT


def test_closed_loop_schedule_overcommits_the_cells() -> None:
    """A request arrives when a client is free; each fits alone, but not all together."""
    found = schedule("overcommit-4", 1000, 10.0)
    assert found == schedule("overcommit-8", 1000, 1.0)
    assert {each.at for each in found} == {None}
    sizes = [len(each.prompt) + each.n_predict for each in found]
    assert max(sizes) <= SLOT
    mean = sum(sizes) / len(sizes)
    assert cells("overcommit-1", 16) == 16 * SLOT
    for times in (2, 4, 8):
        shared = cells(f"overcommit-{times}", 32)
        assert shared is not None
        assert 0.9 < 32 * mean / shared / times < 1.1
    assert cells("fits", 4) is None
    with pytest.raises(UsageError, match=r"overcommit-8 needs more than 4 clients: .* 256 cells"):
        cells("overcommit-8", 4)


def test_chats_are_those_of_the_readme() -> None:
    """Four of them do not fit into their cache together, and each does alone."""
    found = schedule("chats", 4, 10.0)
    assert [(each.at, len(each.prompt), each.n_predict) for each in found] == [(None, 200, 150)] * 4
    assert len({each.prompt for each in found}) == 4
    assert cells("chats", 4) == 1024


def test_impossible_schedule_names_the_option(tmp_path: Path) -> None:
    """The error names the option to change."""
    short = rows(tmp_path / "short", (1024, [1]))
    other = tmp_path / "other"
    other.write_text("[]", encoding="utf-8")
    for workload, trace, message in (
        ("bursts", None, "choose from fits, shift, trace"),
        ("trace", None, "needs --trace FILE"),
        ("trace", short, "has 1 requests, not 2"),
        ("trace", other, "is not a trace with timestamp"),
        ("trace", tmp_path / "missing", "is not a trace"),
    ):
        with pytest.raises(UsageError, match=message):
            schedule(workload, 2, 1.0, trace=trace)
