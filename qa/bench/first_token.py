"""Measure the time from `pip install` to the first token where nothing can be compiled."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyllamakv import models
from pyllamakv.errors import UsageError
from pyllamakv.home import checkout
from qa.bench.figure import Figure
from qa.bench.measure import clock

GROUP = "Without a compiler"
Tick = Callable[[], None]
ROUNDS = 5
MODEL = "smollm2-135m"
_WANTED = "pyllamakv[prebuilt]"
_MIB = 1 << 20
#: Prints the directory of the library, then the first text of the reply.
_CHAT = """
import sys
import pyllamakv as kv
with kv.open() as lib, lib.load_model(sys.argv[1]) as model, model.context(n_ctx=512) as ctx:
    print(lib.path)
    print(next(ctx.chat([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=1)))
"""


def figures(tick: Tick) -> list[Figure]:
    """Install the wheels of `make prebuilt` into new environments, and chat.

    All packages are downloaded before. Raises UsageError without these wheels.
    """
    wheels = _wheels()
    model = models.get(MODEL)
    with tempfile.TemporaryDirectory(prefix="pyllamakv-bench-") as folder:
        place = Path(folder)
        packages = place / "packages"
        _pip("download", "--find-links", str(wheels), "--dest", str(packages), _WANTED)
        downloaded = sum(file.stat().st_size for file in packages.iterdir())
        tick()
        installs, tokens = [], []
        for turn in range(ROUNDS):
            outside = place / f"{turn}"
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", outside], check=True)
            installs.append(clock(partial(_install, outside, packages)))
            tokens.append(clock(partial(_chat, outside, model)))
            tick()
    return [_figure(installs, tokens, downloaded)]


def _figure(installs: list[float], tokens: list[float], downloaded: int) -> Figure:
    whole = [first + second for first, second in zip(installs, tokens, strict=True)]
    median = statistics.median(whole)
    return Figure(
        GROUP,
        "from `pip install` to the first token",
        f"{median:.1f} s (install {statistics.median(installs):.1f}, "
        f"first token {statistics.median(tokens):.1f})",
        "<= 60 s",
        median <= 60,
        f"{downloaded / _MIB:.0f} MiB of packages, downloaded before",
        f"{MODEL}, no compiler, make and git, an empty home directory; median of {len(whole)}, "
        f"{min(whole):.1f} to {max(whole):.1f} s",
        {"install": installs, "first_token": tokens, "bytes": downloaded},
    )


def _wheels() -> Path:
    root = checkout()
    if root is None or not list((root / "dist").glob("pyllamakv_prebuilt-*.whl")):
        raise UsageError("this benchmark installs wheels in dist/; build them: make prebuilt")
    return root / "dist"


def _install(outside: Path, packages: Path) -> None:
    python = str(outside / "bin" / "python")
    offline = ("--no-index", "--no-cache-dir", "--find-links", str(packages))
    _pip("--python", python, "install", *offline, _WANTED)


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL)


def _chat(outside: Path, model: Path) -> None:
    """Generate a token. Raises UsageError if the library is not that of the environment."""
    home = outside / "home"
    home.mkdir()
    done = subprocess.run(
        [str(outside / "bin" / "python"), "-c", _CHAT, str(model)],
        env={"HOME": str(home), "PATH": str(outside / "bin"), "LANG": "C.UTF-8"},
        cwd=home,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    path, _, text = done.stdout.partition("\n")
    if not Path(path).is_relative_to(outside.resolve()) or not text.strip():
        raise UsageError(f"expected a token of a library in {outside}, got {text!r} from {path}")
