"""The benchmark of building servers: what it runs, never a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllamakv.source import verified
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench import server_build_times

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from qa.bench.figure import Figure


def test_the_test_release_and_the_newest_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each."""
    built: list[str] = []

    def release_figures(_tick: object, release: str) -> list[Figure]:
        built.append(release)
        return []

    monkeypatch.setattr(server_build_times, "release_figures", release_figures)
    server_build_times.figures(lambda: None)
    assert built == [TEST_RELEASE, verified.newest().name]


def test_the_servers_are_built_after_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one data directory; the libraries are not part of their time."""
    ran: list[tuple[str, ...]] = []
    homes: set[Path] = set()
    seconds = iter((1.0, 60.0, 40.0, 80.0, 20.0))

    def command(home: Path, *words: str) -> tuple[float, float]:
        assert home.is_dir()
        homes.add(home)
        ran.append(words)
        return 7.0, next(seconds)

    monkeypatch.setattr(server_build_times, "command", command)
    whole, after = server_build_times.release_figures(lambda: None, "0.3.9")
    assert [words[-1] for words in ran] == ["0.3.9", "--stock", "0.3.9", "--server", "--server"]
    assert len(homes) == 1
    assert (whole.value, whole.met) == ("1.00 x, 100 s and 100 s", True)
    assert (after.value, after.met) == ("0.25 x, 20 s and 80 s", True)
