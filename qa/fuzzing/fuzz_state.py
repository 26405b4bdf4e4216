"""The objects of calls of plk.h: a library in this process, live handles, buffers, a ledger."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyllamakv.binding import loading
from pyllamakv.native._plk import ffi
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.cell_ledger import CellLedger, Content
from qa.fuzzing.arena import FILLED, Arena
from qa.fuzzing.signatures import Parameter, fields
from qa.fuzzing.target import WrongAnswer

#: Parameters of the context; each setting changes some.
_CONTEXT = {
    "n_ctx": 64, "n_batch": 32, "n_ubatch": 8, "n_seq_max": 3, "n_threads": 1,
    "n_threads_batch": 1, "type_k": 1, "type_v": 1, "kv_unified": 1, "guard": 1,
    "defrag_thold": -1.0,
}  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"flash_attn": 1},
    {"flash_attn": 1, "type_k": 8, "type_v": 8},
    {"kv_backing": 1},
    {"kv_backing": 3, "kv_keep": 2, "kv_path": "FILE"},
    {"defrag_plan": 1, "defrag_mover": 3},
    {"embeddings": 1},
    {"defrag_thold": 0.1, "n_seq_max": 2},
)
#: Maximum number of live handles of one kind, including the first.
_LIVE = 3
#: Functions that free handles, by their type; models come last.
_FREES = {
    f"struct plk_{name}": f"plk_{name}_free" for name in ("sampler", "context", "adapter", "model")
}


class FuzzState:
    """One library and its models; `begin` recreates the rest for every input."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.lib: Any = loading.load(library)
        self.lib.plk_init()
        self.arena = Arena()
        self._alive: deque[Any] = deque(maxlen=64)  # what structs of the last calls point at
        self.texts = {"MODEL": str(synthetic_models.tiny()), "FOLDER": str(folder),
                      "FILE": str(folder / "kept.kv")}  # fmt: skip
        out = ffi.new("plk_model **")
        params = self._struct("plk_model_params", {"use_mmap": 1})
        if self.lib.plk_model_load(self.texts["MODEL"].encode(), params, out):
            raise WrongAnswer(f"the model cannot be loaded: {self.error()}")
        self._model = out[0]
        self.handles: dict[str, list[Any]] = {}
        self.ledger = CellLedger()
        self.n_seq_max = 0

    def begin(self, setting: int) -> None:
        """Free the previous input's handles; create a context, a sampler and an empty ledger."""
        for kind in _FREES:
            for handle in self.handles.get(kind, [])[kind == "struct plk_model" :]:
                getattr(self.lib, _FREES[kind])(handle)
        self.handles = {"struct plk_model": [self._model]}
        Path(self.texts["FILE"]).unlink(missing_ok=True)
        asked = {**_CONTEXT, **SETTINGS[setting % len(SETTINGS)]}
        for kind, name, words in (
            ("plk_context", "plk_context_new", asked),
            ("plk_sampler", "plk_sampler_new", {"temperature": 1.0, "top_k": 5, "top_p": 1.0}),
        ):
            out = ffi.new(f"{kind} **")
            code = getattr(self.lib, name)(self._model, self._struct(f"{kind}_params", words), out)
            if code:
                raise WrongAnswer(f"{name} of {words} returned {code}: {self.error()}")
            self.handles[f"struct {kind}"] = [out[0]]
        self.ledger = CellLedger()
        self.n_seq_max = asked["n_seq_max"]

    @property
    def context(self) -> Any:
        """Return the context that the ledger follows."""
        return self.handles["struct plk_context"][0]

    def error(self) -> str:
        """Return the library's last error message."""
        return str(ffi.string(self.lib.plk_last_error()).decode("utf-8", "replace"))

    def picture(self) -> tuple[bytes, Counter[Content]]:
        """Return the cells, and their content independent of the place."""
        info = self._struct("plk_cells_info", {})
        if self.lib.plk_cells_info_read(self.context, 0, info):
            raise WrongAnswer(f"the cells cannot be listed: {self.error()}")
        n = info.n_cells
        pos, shift = np.full(n, -1, np.int32), np.zeros(n, np.int32)
        seqs = np.zeros(n, np.uint64)
        into = [ffi.from_buffer("int32_t *", each, require_writable=True) for each in (pos, shift)]
        words = ffi.from_buffer("uint64_t *", seqs, require_writable=True)
        if self.lib.plk_cells_read(self.context, 0, n, *into, words, 1) != n:
            raise WrongAnswer(f"the cells cannot be read: {self.error()}")
        used = np.flatnonzero(pos >= 0)
        held = ((int(pos[i]), tuple(s for s in range(64) if int(seqs[i]) >> s & 1)) for i in used)
        return pos.tobytes() + seqs.tobytes(), Counter(held)

    # arguments
    def argument(self, one: Parameter, words: Mapping[str, Any]) -> Any:
        """Return the C argument of a generated value."""
        value = words.get(one.name)
        if one.kind == "scalar":
            return _number(one, value)
        if one.kind == "handle":
            live = self.handles.get(one.type.cname, [])
            return live[value % len(live)] if live and type(value) is int else ffi.NULL
        if value is None:
            return ffi.NULL
        if one.kind == "made":
            return ffi.new(f"{one.type.cname} **")
        if one.kind == "handles":
            live = self.handles.get(one.type.cname, [])
            picks = _fill(value)
            found = [picks[i % len(picks)] for i in range(one.elements(words))] if picks else []
            # A negative number is no handle.
            chosen = [live[at % len(live)] if live and at >= 0 else ffi.NULL for at in found]
            return ffi.new(f"{one.type.cname} *[]", chosen or [ffi.NULL])
        if one.kind == "text":
            return ffi.new("char[]", self.texts.get(str(value), str(value)).encode())
        if one.kind == "struct":
            return self._struct(one.type.cname, value if isinstance(value, dict) else {})
        return self.arena.allocate(one.type, one.elements(words), _fill(value))

    def took(self, kind: str, handle: Any) -> None:
        """Keep a handle that a call created, or free it if there are enough."""
        live = self.handles.setdefault(kind, [])
        if len(live) < _LIVE:
            live.append(handle)
        else:
            getattr(self.lib, _FREES[kind])(handle)

    def _struct(self, name: str, words: Mapping[str, Any]) -> Any:
        made = ffi.new(f"{name} *")
        made.size = ffi.sizeof(name)
        drawn = {"n_tokens": 0, "n_bias": 0, **words}
        kinds = fields(ffi.typeof(name))
        for field, one in kinds.items():
            if field in words:
                ids = field == "seq_id" and words[field] is not None
                value = self._ids(kinds, drawn) if ids else self.argument(one, drawn)
                self._alive.append(value)
                setattr(made, field, value)
        return made

    def _ids(self, kinds: Mapping[str, Parameter], words: Mapping[str, Any]) -> Any:
        """Return the flat sequence ids of a batch, as many as the sum of its counts."""
        n = min(max(0, _number(kinds["n_tokens"], words["n_tokens"])), FILLED)
        counts = [1]
        if words.get("seq_count") is not None:
            counts = [_number(kinds["seq_count"], each) for each in _fill(words["seq_count"])]
        together = sum(max(0, counts[i % len(counts)]) for i in range(n))
        fill = _fill(words["seq_id"])
        return self.arena.allocate(kinds["seq_id"].type, min(together, 1 << 22), fill)


def _fill(value: Any) -> list[int]:
    """Return the content of a buffer; without numbers, it keeps its old content."""
    found = [each for each in value if type(each) is int] if isinstance(value, list) else []
    return found or [0]


def _number(one: Parameter, value: Any) -> Any:
    """Return a number that the C type can hold; texts count as 0."""
    if one.type.cname in ("float", "double"):
        return float(value) if isinstance(value, int | float) else 0.0
    if type(value) is not int:
        return 0
    bits = 8 * ffi.sizeof(one.type)
    value %= 1 << bits
    signed = not one.type.cname.startswith("uint")
    return value - (1 << bits) if signed and value >> (bits - 1) else value
