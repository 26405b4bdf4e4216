"""The process that a target runs in: ``python -m qa.fuzzing.job JOB``.

JOB is JSON: target, seconds, seed, folder, kept (paths), most, and the paths of the report and the
last input.
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

#: Header of the last input's file: number of inputs, how many of those before it were accepted and
#: refused, length.
HEAD = struct.Struct("<4Q")
#: Maximum size of an input in bytes.
ROOM = 1 << 20
#: Directory of inputs that reached lines that neither the seeds nor the stored inputs did.
FOUND = "found"


def main(text: str) -> None:
    """Run a job, and write its report."""
    job = json.loads(text)
    # A crash is a result: a core file would only fill the disk.
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
            # Immediately: the next input may end this process.
            (found / hashlib.sha256(data).hexdigest()).write_bytes(data)

        loop = FuzzLoop(target, job["seed"], note, keep)
        limit_memory(target.headroom)
        kept = tuple(Path(each).read_bytes() for each in job["kept"])
        # At least one input runs, however long the start took.
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
    # Without the library's destructors, because threads may be running.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
