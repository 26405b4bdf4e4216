"""Measure build times of backends: RPC as part of a CPU build, CUDA after a change of patches."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from pyllamakv.building import build, cuda, variant
from pyllamakv.errors import KvError
from pyllamakv.source.releases import TEST_RELEASE
from qa.bench.figure import Figure

GROUP = "Backends"
Tick = Callable[[], None]

#: A series of few patches that no other benchmark builds: it represents a changed patch.
CHANGED = "kv-counters"


def figures(tick: Tick, release: str = TEST_RELEASE) -> list[Figure]:
    """Return the figures of RPC, and those of CUDA if a toolkit and an architecture are available.

    Raises the exceptions of a build. A first CUDA build takes 30 minutes of CPU time.
    """
    found = [_rpc(tick, release)]
    try:
        toolkit = cuda.find()
    except KvError:
        return found
    return [*found, *_cuda(tick, release, toolkit)]


def _rpc(tick: Tick, release: str) -> Figure:
    wanted = variant.request(release)
    build.build(release, progress=lambda *_: tick())
    sources = [each for each in commands(wanted.objects) if "ggml-rpc" in Path(each["file"]).parts]
    spent = sum(compiled(each) for each in sources)
    return Figure(
        GROUP,
        f"RPC in a CPU build of {release}",
        f"{spent:.1f} s of CPU",
        "<= 15 s",
        bool(sources) and spent <= 15,
        f"{len(sources)} source file",
        "compiled again with the build's own command, no compiler cache",
        {"seconds": spent},
    )


def _cuda(tick: Tick, release: str, toolkit: cuda.Toolkit) -> list[Figure]:
    def made(spec: str) -> variant.Variant:
        return build.build(spec, backend="cuda", progress=lambda *_: tick())

    sides = [made(f"{release}+{side}") for side in ("stock", "patched")]
    changed = f"{release}+{CHANGED}"
    old = variant.find(changed, backend="cuda")
    if old is not None:
        shutil.rmtree(old.folder)
    objects = variant.request(changed, backend="cuda").objects
    before = stamps(objects)
    again = made(changed)
    after, spent = stamps(objects), again.manifest.cpu_seconds
    shutil.rmtree(again.folder)
    files = [path for path in after if path.name.endswith(".cu.o")]
    anew = [path for path in files if after[path] != before.get(path)]
    stock, patched = (side.manifest.cpu_seconds for side in sides)
    tools = f"nvcc {toolkit.version} for {toolkit.architecture}"
    return [
        Figure(
            GROUP,
            f"CUDA build of {release}",
            f"stock {stock:.0f} s of CPU, patched {patched:.0f} s after it",
            limit=f"{len(files)} CUDA sources",
            how=f"{tools}; linked on this machine",
            data={"stock": stock, "patched": patched},
        ),
        Figure(
            GROUP,
            "CUDA sources compiled again after a change of patches",
            f"{len(anew)} of {len(files)}, {spent:.0f} s of CPU in all",
            "0",
            bool(files) and not anew,
            "the files that include a patched header, and the link",
            f"{tools}; from the whole series to {CHANGED} alone",
            {"anew": len(anew), "files": len(files), "seconds": spent},
        ),
    ]


def commands(objects: Path) -> list[dict[str, str]]:
    """Return the compile commands of a build directory, as CMake writes them."""
    text = (objects / "compile_commands.json").read_text(encoding="utf-8")
    found: list[dict[str, str]] = json.loads(text)
    return found


def compiled(entry: dict[str, str]) -> float:
    """Compile one source again, discard the object, and return the CPU seconds.

    Raises CalledProcessError.
    """
    words = shlex.split(entry["command"])
    words[words.index("-o") + 1] = os.devnull
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = dict(os.environ, CCACHE_DISABLE="1")
    subprocess.run(words, cwd=entry["directory"], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def stamps(folder: Path) -> dict[Path, int]:
    """Return the modification time of each object of a build directory in nanoseconds."""
    files: Iterable[Path] = folder.rglob("*.o")
    return {path: path.stat().st_mtime_ns for path in files}
