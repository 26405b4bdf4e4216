"""Be the process that a target runs in: ``python -m qa.fuzzing.job JOB``.

JOB is JSON: target, seconds, seed, folder, kept (paths), most, and where the report and the last
input go.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import mmap
import os
import resource
import struct
import sys
import time
from dataclasses import asdict
from pathlib import Path

from qa.fuzzing.fuzz_loop import FuzzLoop, limit_memory
from qa.fuzzing.target import Target

#: What the file of the last input begins with: how many there were, how many of those before it
#: were accepted and refused, how long this one is.
HEAD = struct.Struct("<4Q")
#: Bytes of an input that it has room for.
ROOM = 1 << 20
#: The folder of the inputs that reached what neither the seeds nor what was kept did.
FOUND = "found"


def main(text: str) -> None:
    """Do a job, and write its report."""
    job = json.loads(text)
    # A crash is looked for: a core file would only fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    module, _, name = job["target"].partition(":")
    folder = Path(job["folder"]) / "files"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    target: Target = getattr(importlib.import_module(module), name)(folder)
    with Path(job["place"]).open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        count = 0

        def note(data: bytes) -> None:
            nonlocal count
            count += 1
            shared[HEAD.size : HEAD.size + len(data[:ROOM])] = data[:ROOM]
            HEAD.pack_into(shared, 0, count, loop.accepted, loop.refused, len(data))

        found = Path(job["folder"]) / FOUND
        found.mkdir(exist_ok=True)

        def keep(data: bytes) -> None:
            # At once: the next input may end this process.
            (found / hashlib.sha256(data).hexdigest()).write_bytes(data)

        loop = FuzzLoop(target, job["seed"], note, keep)
        limit_memory(target.headroom)
        kept = tuple(Path(each).read_bytes() for each in job["kept"])
        # However long it took to begin, something is tried.
        until = max(began + job["seconds"], time.monotonic() + 0.5)
        loop.run(until, kept, job["most"])
    report = {
        "inputs": loop.inputs, "accepted": loop.accepted, "refused": loop.refused,
        "coverage": loop.coverage, "total": loop.lines.total,
        "corpus": len(loop.corpus), "corpus_bytes": sum(map(len, loop.corpus)),
        "findings": [
            {**asdict(each), "data": base64.b64encode(each.data).decode()}
            for each in loop.findings.values()
        ],
    }  # fmt: skip
    part = Path(job["report"] + ".part")
    part.write_text(json.dumps(report), encoding="utf-8")
    part.replace(job["report"])
    # Not the library's destructors: threads may be at work.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
