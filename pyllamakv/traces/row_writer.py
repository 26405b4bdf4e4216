"""Write recorded operations as rows of a trace, many at a time.

An operation is ``(kind, what, began, ended, found, more, seen)``: times in nanoseconds, the return
value of the library, more results, and samples of the cells before and after, with a flag whether
other operations happened in between. A decode of one token is usually shorter: ``(began, ended,
token, pos, sequence, code)``.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import KvError
from pyllamakv.traces import batch_encoding, trace
from pyllamakv.traces.trace import TraceFile

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pyllamakv.scenarios.cell_samples import CellSample
    from pyllamakv.traces.trace import Head

log = logging.getLogger(__name__)

#: Bytes of unwritten cell samples after which they are written at once.
HEAVY = 1 << 24

#: Samples before and after, and whether nothing happened in between.
Seen = tuple["CellSample | None", "CellSample | None", bool]
Note = tuple[str, Any, int, int, Any, "dict[str, Any] | None", Seen | None]
Step = tuple[int, int, int, int, int, int]


class RowWriter:
    """Collect ``rows`` and write them to a trace; ``error`` is the reason of an early end."""

    def __init__(
        self, path: Path, head: Head, first: list[dict[str, Any]], *, pictures: bool
    ) -> None:
        self.rows: list[Note | Step] = []
        self.written = 0
        self.error: KvError | None = None
        self._pictures = pictures
        self._used: int | None = None
        self._bytes = 0
        self._began = time.perf_counter_ns()
        self._file = TraceFile(path)
        try:
            self._file.write([json.dumps(each) for each in (head.to_json(), *first)])
        except BaseException:
            self._file.close()
            raise
        self.written = len(first)

    @property
    def heavy(self) -> bool:
        """Return whether the pending operations need much memory."""
        return self._bytes > HEAVY

    def count(self, sample: CellSample | None) -> None:
        """Count the memory of a sample, and the used cells at the start."""
        if sample is not None:
            self._bytes += sample.bytes
            if self._used is None:
                self._used = sample.counts["used"]

    def flush(self) -> None:
        """Write all operations as rows. After an error, operations are dropped."""
        waiting, self._bytes = len(self.rows), 0
        notes = self.rows[:waiting]
        # In place, because the recorder has bound the list's `append`.
        del self.rows[:waiting]
        if self.error is not None:
            return
        try:
            # `pause` has completed everything except successful decodes of one token.
            quick = self._used is not None
            self._file.write(
                [
                    self._step(*note) if quick and len(note) == 6 else self._row(long_form(note))
                    for note in notes
                ]
            )
            self.written += waiting
        except KvError as error:
            self.error = error
            log.warning("%s", error)

    def close(self) -> None:
        """Write the remaining operations and the end."""
        self.flush()
        try:
            if self.error is None:
                self._file.write([trace.end(self.written)])
        except KvError as error:
            self.error = error
        finally:
            self._file.close()

    def _step(self, began: int, ended: int, token: int, pos: int, seq: int, code: int) -> str:
        assert self._used is not None
        self._used += 1
        return (
            f'{{"op": "step", "seq": {seq}, "token": {token}, "pos": {pos}, "result": '
            f'{{"status": {code}, "used": {self._used}, "at": {(began - self._began) // 1000}, '
            f'"us": {(ended - began) // 1000}}}}}'
        )

    def _row(self, note: Note) -> str:
        kind, what, began, ended, found, more, seen = note
        at, us = (began - self._began) // 1000, (ended - began) // 1000
        plain = kind == "step" or (kind == "batch" and what[2] is None and _all(what[4]))
        if plain and seen is None and found == 0 and self._used is not None:
            return self._plain_row(kind, what, more, at, us)
        op, words, n = _WORDS[kind](what)
        more = dict(more or {})
        if op == "advance":
            _decoded(words, found, more)
        result: dict[str, Any] = {}
        if op in ("step", "batch", "advance"):
            if found is not None:
                result["status"] = int(found)
            if more.get("best"):
                more["best"] = {str(_place(op, words)): more["best"]}
            else:
                more.pop("best", None)
        elif op == "defrag" and found is not None:
            result |= {"moves": found.moves, "cells": found.cells}
        elif op == "remove" and found is not None:
            result["done"] = bool(found)
        elif op == "restore" and found is not None:
            result["done"] = found > 0
        elif op == "save" and found is not None:
            result["bytes"] = len(found)
        result |= more
        if seen is not None:
            result |= self._cells(*seen, label=op)
        elif self._used is not None and op != "note":
            self._used += n if found == 0 or op == "advance" else 0
            result["used"] = self._used
        result |= {"at": at, "us": us}
        return json.dumps({"op": op, **words, "result": result})

    def _plain_row(self, kind: str, what: Any, more: Any, at: int, us: int) -> str:
        """Write a decode with logits of every token: the fast path, because most rows are such."""
        best = ""
        if kind == "step":
            n = 1
            token, pos, seq = what
            row = f'{{"op": "step", "seq": {seq}, "token": {token}, "pos": {pos}, "result": '
        else:
            token, pos, seq = what[0], what[1], what[3]
            n = len(token)
            row = (
                f'{{"op": "batch", "tokens": {token.tolist()}, "seq": {seq.tolist()}, '
                f'"pos": {pos.tolist()}, "logits": "all", "result": '
            )
        if more and more.get("best"):
            best = f'"best": {json.dumps({str(n - 1): more["best"]})}, '
        assert self._used is not None
        self._used += n
        return f'{row}{{"status": 0, {best}"used": {self._used}, "at": {at}, "us": {us}}}}}'

    def _cells(
        self, before: CellSample | None, after: CellSample | None, alone: bool, label: str
    ) -> Any:
        if after is None:
            return {}
        words = trace.seen(label, before, after, label=label)
        self._used = after.counts["used"]
        if not alone:
            words.pop("before", None)
        if not self._pictures:
            words.pop("picture", None)
        return words


def _all(logits: NDArray[Any] | None) -> bool:
    """Return whether every token of a batch has logits."""
    return logits is not None and bool(logits.all())


def _decoded(words: dict[str, Any], code: Any, result: dict[str, Any]) -> None:
    """Return the tokens of several steps, from those sampled after the last one."""
    result["steps"] = len(words["steps"]) - 1
    if code == 0:
        sampled = words["steps"].pop()
        if min(sampled) >= 0:
            result["chosen"] = sampled


Words = tuple[str, dict[str, Any], int]


def _step(what: Any) -> Words:
    token, pos, seq = what
    return "step", {"seq": seq, "token": token, "pos": pos}, 1


def _batch(what: Any) -> Words:
    token, pos, counts, seq, logits = what
    flags = None if logits is None else logits.tolist()
    words = batch_encoding.encode(
        token.tolist(), pos.tolist(), batch_encoding.owners(seq, counts), flags
    )
    return "batch", words, len(token)


def _advance(what: Any) -> Words:
    token, pos, seq, rows = what
    steps = [_plain(each) for each in (token, *rows)]
    n = len(rows) * len(seq)
    return "advance", {"steps": steps, "seq": _plain(seq), "pos": _plain(pos)}, n


def _named(op: str, *names: str) -> Callable[[Any], Words]:
    def spell(what: Any) -> Words:
        values = (int(each) if not isinstance(each, str) else each for each in what)
        words: dict[str, Any] = dict(zip(names, values, strict=True))
        for end in ("from", "to"):
            if words.get(end, 0) < 0:
                del words[end]
        return op, words, 0

    return spell


def _restore(what: Any) -> Words:
    seq, name, foreign = what
    words = {"seq": int(seq), "as": name}
    if foreign is not None:
        words["state"] = base64.b64encode(foreign).decode("ascii")
    return "restore", words, 0


_WORDS: Mapping[str, Callable[[Any], Words]] = {
    "step": _step,
    "batch": _batch,
    "advance": _advance,
    "remove": _named("remove", "seq", "from", "to"),
    "copy": _named("copy", "seq", "into", "from", "to"),
    "keep": _named("keep", "seq"),
    "shift": _named("shift", "seq", "from", "to", "by"),
    "divide": _named("divide", "seq", "from", "to", "by"),
    "clear": _named("clear"),
    "save": _named("save", "seq", "as"),
    "restore": _restore,
    "defrag": _named("defrag"),
    "update": _named("update"),
    "cancel": _named("cancel", "polls"),
    "threads": _named("threads", "n", "batch"),
    "note": _named("note", "text"),
}


def _plain(values: Any) -> list[int]:
    return [int(each) for each in values]


def _place(op: str, words: dict[str, Any]) -> int:
    """Return the last index of a batch that has logits."""
    if op == "step":
        return 0
    if op == "advance":
        return len(words["seq"]) - 1
    logits = words.get("logits", "last")
    return int(logits[-1]) if isinstance(logits, list) else len(words["tokens"]) - 1


def long_form(note: Note | Step) -> Note:
    """Return an operation in its long form."""
    if len(note) == 6:
        began, ended, token, pos, seq, code = note
        return "step", (token, pos, seq), began, ended, code, None, None
    return note
