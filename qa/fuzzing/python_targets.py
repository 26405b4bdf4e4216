"""Targets written in Python: readers of files and messages."""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Hashable, Iterable
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np

from pyllamakv.binding import protocol, wire
from pyllamakv.cache import prefix_store
from pyllamakv.errors import StateError
from pyllamakv.home import data as shipped
from pyllamakv.patching import foreign_series, hunks, mail_header
from pyllamakv.runtime import gguf_file, state, state_parser, state_slices
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source import lockfile
from pyllamakv.traces import trace
from qa.fuzzing.target import Target, WrongAnswer, lines


def gguf(folder: Path) -> Target:
    """Return the target for model files."""
    path = folder / "model.gguf"

    def run(data: bytes) -> Iterable[Hashable]:
        path.write_bytes(data)
        found = gguf_file.check_file(path)
        return [("uneven", found.has_partial_layers)]

    seeds = tuple(_small(synthetic_models.model(name)) for name in ("tiny", "bytes"))
    return Target(run, (*seeds, _header()))


def _small(path: Path) -> bytes:
    """Return a model file without its tensors, which are most of its size."""
    data = path.read_bytes()[: 1 << 14]
    return data[:8] + struct.pack("<Q", 0) + data[16:]


def _header() -> bytes:
    """Return a model file with a value of every type and two tensors."""

    def text(word: bytes) -> bytes:
        return struct.pack("<Q", len(word)) + word

    values = [
        (b"general.architecture", 8, text(b"llama")),
        (b"general.alignment", 4, struct.pack("<I", 64)),
        (b"numbers", 9, struct.pack("<IQ2i", 5, 2, 3, 4)),
        (b"texts", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"")),
        *((b"v%d" % kind, kind, bytes(size)) for kind, size in ((0, 1), (6, 4), (7, 1), (12, 8))),
    ]
    tensors = [(b"t", (32, 2), 0, 0), (b"u", (64,), 8, 256)]
    made = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, kind, value in values:
        made += text(key) + struct.pack("<I", kind) + value
    for name, shape, kind, offset in tensors:
        made += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return made + bytes(-len(made) % 64 + 256 + 68)


def states(_folder: Path) -> Target:
    """Return the target for saved sequences."""

    def run(data: bytes) -> Iterable[Hashable]:
        found = state.unpack(data)
        if len(found.tokens) != len(found.positions):
            raise WrongAnswer("a saved sequence has different numbers of positions and tokens")
        return [len(found.tokens) > 0, found.first_moved is None]

    return Target(
        run,
        (_saved(b"raw"), _saved(b"")),
        lambda chance, data, mutate: summed(chance, mutate(data)),
    )


def _saved(raw: bytes) -> bytes:
    head = json.dumps({"fits": {"n_vocab": 3}, "tokens": 2, "exact": 1}).encode()
    body = head + struct.pack("<4i", 5, 6, 0, 1) + raw
    return struct.pack("<8sII", b"PLKSEQ1\n", len(head), zlib.crc32(body)) + body


def summed(chance: Random, data: bytes) -> bytes:
    """Return a saved sequence, usually with a correct checksum."""
    if len(data) < 16 or chance.random() < 0.1:
        return data
    return data[:12] + struct.pack("<I", zlib.crc32(data[16:])) + data[16:]


def rows(_folder: Path) -> Target:
    """Return the target for states of the library."""

    def run(data: bytes) -> Iterable[Hashable]:
        found = state_parser.parse(data)
        for section in found.sections:
            for layer in section.layers:
                if len(layer.k) != len(section.pos):
                    raise WrongAnswer("a layer has different numbers of rows and cells")
        with suppress(StateError):
            cut = state_slices.read(data)
            if len(cut.positions) != found.cells or len(cut.to_bytes()) != len(data):
                raise WrongAnswer("the parts of a state join to another state")
        return [(found.layout, len(found.sections), found.cells > 0)]

    seeds = tuple(_state(layout, magic) for layout in state_parser.LAYOUTS for magic in (0, 1))
    return Target(run, (*seeds, _state(state_parser.LAYOUTS[0], 0, more=True)))


def _state(layout: state_parser.Layout, magic: int, *, more: bool = False) -> bytes:
    """Return a state of two cells and one layer; ``more``: followed by a recurrent layer."""
    made = struct.pack("<II", state_parser.MAGIC, 0) if magic else b""
    made += struct.pack("<I", 1) if layout.streams else b""
    made += struct.pack("<I", 2)
    for pos in range(2):
        made += struct.pack("<iI", pos, 1) + bytes(layout.extra) + struct.pack("<i", 0)
    row = struct.pack("<iQ", 1, 4)
    made += struct.pack("<II", 0, 1) + row + bytes(8)
    made += row + bytes(8) if layout.values else b""
    if more:
        made += struct.pack("<IiIiII", 1, 1, 1, 0, 0, 1) + (struct.pack("<iQ", 0, 4) + bytes(4)) * 2
    return made


def stored_pages(folder: Path) -> Target:
    """Return the target for pages of a prefix store."""
    store = prefix_store.PrefixStore(folder / "store", {"model": "m"})
    first = store.add("cells", b"", None, 0, struct.pack("<2i", 1, 2), b"content")
    pages = (first, store.add("state", b"", None, 0, struct.pack("<i", 3), b""))
    store.close()
    seeds = tuple(store.path(page).read_bytes() for page in pages)
    store.path(pages[1]).unlink()

    def run(data: bytes) -> Iterable[Hashable]:
        store.path(first).write_bytes(data)
        found = prefix_store.scan(store.folder, contents=True)
        if any(page.tokens != first.tokens for page in found.pages.values()):
            raise WrongAnswer("a page has other tokens than its name")
        # Reasons with numbers would make each input a new one.
        return [bool(found.pages), *(why.split()[1] for why in found.unusable.values())]

    return Target(
        run, seeds, lambda chance, data, mutate: with_page_checksums(chance, mutate(data))
    )


def with_page_checksums(chance: Random, data: bytes) -> bytes:
    """Return a page of a prefix store, usually with correct sizes and checksums."""
    head, sizes = struct.Struct("<8sIIQI"), struct.Struct("<IQI")
    if len(data) < head.size or chance.random() < 0.1:
        return data
    n = min(int.from_bytes(data[8:12], "little"), len(data) - head.size)
    header, content = data[head.size :][:n], data[head.size + n :]
    checked = sizes.pack(n, len(content), zlib.crc32(content))
    checksum = zlib.crc32(header, zlib.crc32(checked))
    made = head.pack(data[:8], n, checksum, len(content), zlib.crc32(content))
    return made + data[head.size :]


def traces(folder: Path) -> Target:
    """Return the target for traces."""
    path = folder / "run.trace"

    def run(data: bytes) -> Iterable[Hashable]:
        path.write_bytes(data)
        if not trace.is_trace(path):
            return ["none"]
        head, found = trace.read(path)
        json.dumps(head.to_json())
        json.dumps([row.to_json() for row in found])
        return [head.complete]

    return Target(run, _traces())


def _traces() -> tuple[bytes, ...]:
    head = {"trace": trace.SCHEMA, "variant": "v", "model": "tiny", "spec": "0.3.9+stock"}
    steps = [
        {"op": "context", "n_ctx": 64, "type_k": "f16", "flash_attn": True},
        {"op": "decode", "feed": {"0": 4, "1": [1, 2], "2": "text"}, "interleave": True},
        {"op": "batch", "tokens": [1, 2, 3], "seq": [0, [0, 1], 1], "pos": [0, 1, 2],
         "logits": "all", "expect": "ok", "result": {"status": 0, "used": 3, "at": 1}},
        {"op": "advance", "steps": [[1, 2], [3, 4]], "seq": [0, 1], "pos": [5, 6]},
        {"op": "step", "seq": 0, "token": 3, "pos": 9, "result": {"status": 1, "us": 4}},
        {"op": "remove", "seq": 1, "from": 1, "to": None},
        {"op": "copy", "seq": 0, "into": 2}, {"op": "keep", "seq": 0},
        {"op": "shift", "seq": 0, "by": -1, "from": 2}, {"op": "divide", "seq": 0, "by": 2},
        {"op": "save", "seq": 0, "as": "a"}, {"op": "restore", "seq": 1, "as": "a"},
        {"op": "defrag", "result": {
         "picture": {"label": "l", "runs": [[0, 3], [-1, 2]], "streams": [3, 2]},
         "moved": [[0, 4, 2]], "before": {"used": 3}, "error": "X", "best": {"0": [1, 0.5, 2]}}},
        {"op": "expect", "used": 3, "free": 4}, {"op": "note", "text": "words"}, {"op": "clear"},
    ]  # fmt: skip
    return lines([head, *steps, {"end": len(steps)}]), lines([head, *steps[:3]])


def locks(folder: Path) -> Target:
    """Return the target for the lock of releases."""
    path = folder / "lock.toml"

    def run(data: bytes) -> Iterable[Hashable]:
        path.write_bytes(data)
        return [len(lockfile.load(path)) > 0]

    entry = (
        '[[release]]\nname = "{0}"\nkind = "sdist"\ncommit = "{1}"\ntree = "{1}"\nera = "unified"\n'
        'date = "2025-05-0{2}"\nsha256 = "{3}"\narchive = "a-{0}.tar.gz"\n'
    )
    seed = "# words\nversion = 1\n\n" + "\n".join(
        entry.format(f"0.3.{n}", "ab" * 20, n, "0f" * 32) for n in (8, 9)
    )
    return Target(run, (seed.encode(), b"version = 1\n"))


def patches(_folder: Path) -> Target:
    """Return the target for patches and mails."""
    from pyllamakv.patching.definition import Port

    def run(data: bytes) -> Iterable[Hashable]:
        for piece in hunks.split(data):
            mail_header.parse(piece)
            found = hunks.parse(piece)
            author, message = mail_header.author_and_message(Port.of(found, Path("a.patch")))
            text = "".join((*author.values(), message)).encode("utf-8", "surrogateescape")
            if b"\0" in text:
                raise WrongAnswer("a zero byte would be passed to git")
            for file in found.files:
                for number, hunk in enumerate(file.hunks, 1):
                    _ = (hunk.old, hunk.new, hunk.added, hunk.removed, hunk.context)
                    hunks_left = found.without(file.path, number)
                    _ = (hunks_left.data, found.only(file.path).paths)
        return [len(found.files), found.files[0].copied]

    return Target(run, _patches())


def _patches() -> tuple[bytes, ...]:
    mail = (
        b"From %s Mon Sep 17 00:00:00 2001\nFrom: =?utf-8?q?A=C3=A9?= <a@b.c>\n"
        b"Date: Fri, 20 Nov 2026 00:00:00 +0000\nSubject: [PATCH 1/2] Do\n it\n\nWhy.\n\n"
        b"Patch: full-defrag\nBase: 0.3.9\nRequires: other\n---\n a.c | 2 +-\n\n" % (b"0" * 40)
    )
    change = (
        b"diff --git a/a.c b/a.c\nindex 012..345 100644\n--- a/a.c\n+++ b/a.c\n"
        b"@@ -1,3 +1,3 @@ int f()\n one\n-two\n+TWO\n three\n@@ -9 +9,2 @@\n nine\n+ten\n"
        b"\\ No newline at end of file\n"
    )
    made = (
        b"diff --git a/n.c b/n.c\nnew file mode 100644\nindex 000..345\n--- /dev/null\n+++ b/n.c\n"
        b"@@ -0,0 +1 @@\n+new\n"
        b"diff --git a/o.c b/o.c\ndeleted file mode 100644\n--- a/o.c\n+++ /dev/null\n"
        b"@@ -1 +0,0 @@\n-old\n"
        b'diff --git "a/q\\303\\251 \\t.c" "b/r.c"\nsimilarity index 90%\n'
        b'rename from "q\\303\\251 \\t.c"\nrename to r.c\nold mode 100644\nnew mode 100755\n'
        b"diff --git a/m m b/m m\nold mode 100644\nnew mode 100755\n"
        b"diff --git a/c b/d\ncopy from c\ncopy to d\n"
    )
    end = b"-- \n2.40.0\n\n"
    return change, made, mail + change + end, mail + change + end + mail + made + end


def tables(folder: Path) -> Target:
    """Return the target for series: `series.toml`, `patch.toml`, quilt's list and the ports."""
    text = folder / "own" / "0.3.9.patch"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_bytes(_patches()[0])
    shared = folder / "shared" / "src" / "s.h"
    shared.parent.mkdir(parents=True, exist_ok=True)
    shared.write_bytes(b"// shared\n")
    order, about, listing = folder / "series.toml", folder / "own" / "patch.toml", folder / "series"

    def run(data: bytes) -> Iterable[Hashable]:
        first, _, second = data.partition(b"\0")
        for path in (order, listing):
            path.unlink(missing_ok=True)
        # The first byte marks a listing of quilt; no table starts with it.
        (listing if data[:1] == b"#" else order).write_bytes(first)
        about.write_bytes(second)
        found = foreign_series.load(folder)
        return [len(found), *(len(each.ports) for each in found)]

    series = b'schema = 1\norder = [\n  "own",\n]\n\0'
    shown = (shipped("patches") / "mmap-kv" / "patch.toml").read_bytes().partition(b"shared =")[0]
    own = shown.replace(b'id = "mmap-kv"', b'id = "own"')
    own += b'shared = ["src/s.h"]\n\n[[port]]\nbase = "0.3.9"\nera = "unified"\nrequires = []\n'
    own += b'[[port.markers]]\nfile = "a.c"\nhas = ["x"]\nlacks = "y"\nexists = true\n'
    small = (
        b'schema = 1\nid = "own"\ntitle = "T"\nwhy = "W"\norigin = "o"\nupstream = "u"\n'
        b'releases = "<=0.3.9"\nscenarios = ["s"]\nshared = []\n' + own[own.index(b"[[port]]") :]
    )
    return Target(run, (series + own, series + small, b"# quilt\nown/0.3.9.patch -p1\n"))


def messages(_folder: Path) -> Target:
    """Return the target for messages of a worker."""

    def run(data: bytes) -> Iterable[Hashable]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.settimeout(1)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.sendall(data)
            theirs.close()
            channel = wire.Channel(ours)
            try:
                while True:
                    _number, failed, value, _log = channel.answer()
                    yield failed, type(value).__name__
            except EOFError:
                return

    def frame(header: list[object], *values: object) -> bytes:
        body: list[object] = []
        packed = [wire.pack(value, body) for value in values]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            wire.Channel(ours).send(7, [*header, *packed], body)
            return theirs.recv(1 << 16)

    error: list[object] = []
    failed = wire.pack_error(StateError("no", code=-3, log=("a", "b")), error)
    more = [[2, "a line of the log"]]
    seeds = (
        frame([0], None),
        frame([0], [1, 2.5, "x", b"bytes", {"k": 1}, np.arange(6, dtype=np.int32).reshape(2, 3)]),
        frame([0], protocol.SamplerParams()),
        frame([0], protocol.Capability.CELLS),
        frame([1, failed, more]),
    )
    return Target(run, seeds)
