"""The benchmark of the first token installs wheels from a folder, and uses nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyllamakv.errors import UsageError
from qa.bench import first_token


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of wheels of a checkout, with one wheel."""
    monkeypatch.setattr(first_token, "checkout", lambda: tmp_path)
    monkeypatch.setattr(first_token.models, "get", Path)
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "pyllamakv_prebuilt-1-py3-none-any.whl").write_bytes(b"x" * (1 << 20))
    return folder


def test_both_steps_are_timed(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has its own environment; the download is not timed."""
    times = iter([10.0, 1.0, 80.0, 1.0, 20.0, 5.0, 30.0, 1.0, 20.0, 2.0])
    asked: list[tuple[str, ...]] = []
    places = []

    def pip(*words: str) -> None:
        asked.append(words)
        if words[0] == "download":
            shutil.copytree(dist, words[words.index("--dest") + 1])

    def clock(call: object) -> float:
        call()  # type: ignore[operator]
        return next(times)

    monkeypatch.setattr(first_token, "_pip", pip)
    monkeypatch.setattr(first_token, "_chat", lambda outside, model: places.append(outside))
    monkeypatch.setattr(first_token, "clock", clock)
    monkeypatch.setattr(first_token.subprocess, "run", lambda *_words, **_more: None)
    (figure,) = first_token.figures(lambda: None)
    assert figure.value == "25.0 s (install 20.0, first token 1.0)"
    assert figure.met and figure.limit.startswith("1 MiB")
    assert figure.how.endswith("median of 5, 11.0 to 81.0 s")
    download, *installs = asked
    assert download[1:3] == ("--find-links", str(dist))
    assert len(set(places)) == len(installs) == first_token.ROUNDS
    for outside, words in zip(places, installs, strict=True):
        assert words[:2] == ("--python", str(outside / "bin" / "python"))
        assert {"--no-index", "--no-cache-dir", "pyllamakv[prebuilt]"} <= set(words)


def test_missing_wheels_name_the_command(dist: Path) -> None:
    """Before anything is installed."""
    shutil.rmtree(dist)
    with pytest.raises(UsageError, match="make prebuilt"):
        first_token.figures(lambda: None)


@pytest.mark.slow
def test_another_library_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat runs without PATH and home directory, on a library in the environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    shown = "import os; print({}); print(os.environ['PATH'], *os.listdir(os.environ['HOME']))"
    monkeypatch.setattr(first_token, "_CHAT", shown.format(repr(str(tmp_path / "lib.so"))))
    first_token._chat(tmp_path, Path("model"))
    (tmp_path / "home").rmdir()
    monkeypatch.setattr(first_token, "_CHAT", shown.format("'/elsewhere/lib.so'"))
    with pytest.raises(UsageError, match=rf"got '{tmp_path}/bin\\n' from /elsewhere"):
        first_token._chat(tmp_path, Path("model"))
    (tmp_path / "home").rmdir()
    monkeypatch.setattr(first_token, "_CHAT", "raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        first_token._chat(tmp_path, Path("model"))
