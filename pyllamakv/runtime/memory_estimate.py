"""Estimate the memory of a context, and refuse it before any allocation if it cannot fit.

The kernel overcommits memory and kills processes later, and a limit of the address space ends the
process inside C. Therefore, both limits are checked first. The estimate is a lower bound: an
accepted context may still be refused by the library, but a refused one could not have worked.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import NotEnoughMemory
from pyllamakv.runtime.ggml_types import number_type

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import ContextParams, ModelInfo
    from pyllamakv.runtime.parts import ModelParts

#: Address space that llama.cpp maps for its graphs, and without which it aborts: some releases
#: reserve 65536 nodes (406 MiB), and threads have arenas.
GRAPHS = 640 << 20

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def context_bytes(info: ModelInfo, params: ContextParams, *, uneven: bool = False) -> int:
    """Return a lower bound for the bytes of a context: K, V, the mask and the logits.

    ``uneven`` says that some layers keep less than every token (a sliding window, recurrent
    layers among the others); of such models at least one layer in eight keeps all.
    """
    n_ctx = params.n_ctx or info.n_ctx_train
    if info.is_recurrent:
        return 4 * info.n_vocab
    # With one stream per sequence llama.cpp divides the cells among them: the sum is the same.
    per_head = info.n_embd // max(info.n_head, 1)
    width_k = info.n_embd_k_gqa or per_head * info.n_head_kv
    width_v = info.n_embd_v_gqa or per_head * info.n_head_kv
    rows = _row(params.type_k, width_k) + _row(params.type_v, width_v)
    cache = n_ctx * (-(-info.n_layer // 8) if uneven else info.n_layer) * rows
    n_ubatch = min(params.n_ubatch, params.n_batch, n_ctx)
    seen = n_ctx if params.kv_unified else n_ctx // params.n_seq_max
    return cache + 4 * seen * n_ubatch + 4 * info.n_vocab


def available_bytes(pid: int | None = None) -> int | None:
    """Return the bytes that this process, or its worker, may still allocate; None if unknown."""
    known = [n for n in (address_space_left(pid), _cgroup(), _machine()) if n is not None]
    return max(0, min(known)) if known else None


def check_memory(
    info: ModelInfo, params: ContextParams, *, uneven: bool = False, pid: int | None = None
) -> None:
    """Raise NotEnoughMemory when a context of these parameters cannot fit.

    ``pid`` is the process that makes the context; None: this one. With a limit of the address
    space, llama.cpp would abort where it maps its graphs.
    """
    needed, available = context_bytes(info, params, uneven=uneven), available_bytes(pid)
    if not params.kv_backing and available is not None and needed > available:
        msg = (
            f"a context of n_ctx {params.n_ctx} needs at least {_readable(needed)} and "
            f"{_readable(available)} are available; lower n_ctx, or use a smaller type_k and "
            "type_v (q8_0 halves f16)"
        )
        raise NotEnoughMemory(msg, needed=needed, available=available)
    room = address_space_left(pid)
    if room is None:
        return
    n_ctx = params.n_ctx or info.n_ctx_train
    n_ubatch = min(params.n_ubatch, params.n_batch, n_ctx)
    needed += GRAPHS + 4 * n_ctx * n_ubatch * (1 if params.flash_attn else info.n_head)
    if room < needed:
        msg = (
            f"a context of {n_ctx} cells may map {_readable(needed)}, {_readable(GRAPHS)} of them "
            f"for graphs, and {_readable(room)} of address space are available; raise the limit "
            "(ulimit -v)"
        )
        raise NotEnoughMemory(msg, needed=needed, available=room)


def worker_pid(model: ModelParts) -> int | None:
    """Return the process that has the memory of a model; None: this one."""
    pid = getattr(model.native, "pid", None)
    return pid if model.isolated and isinstance(pid, int) else None


def _row(kind: int, width: int) -> int:
    number = number_type(kind)
    return -(-width // number.block) * number.bytes


def address_space_left(pid: int | None = None) -> int | None:
    """Return how many bytes this process, or another, may still map; None: without limit."""
    try:
        if pid is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        else:
            limit, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    except (AttributeError, OSError):
        return None
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return limit - mapped_bytes(pid)
    except (OSError, ValueError, IndexError):
        return limit


def mapped_bytes(pid: int | None = None) -> int:
    """Return the bytes of address space of this process, or of another one.

    Raises OSError if the system does not report it.
    """
    statm = _PROC / str(pid or "self") / "statm"
    return int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _machine() -> int | None:
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" not in kilobytes:
        return None
    return 1024 * (int(kilobytes["MemAvailable"]) + int(kilobytes.get("SwapFree", 0)))


def _cgroup() -> int | None:
    """Return the smallest memory limit of this process's control groups (v1 or v2)."""
    try:
        lines = (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.strip("/")
        # Any parent group may have a limit; in a container, the path may be invisible.
        for each in {folder, *folder.parents, root}:
            if each == root or root in each.parents:
                room = _room(each, *names)
                rooms.extend([] if room is None else [room])
    return min(rooms, default=None)


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit = int((folder / limit_name).read_text(encoding="ascii"))
        used = int((folder / used_name).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    if limit >= 1 << 60:
        return None
    # The kernel releases cached file pages under memory pressure.
    freeable = sum(
        int(line.split()[1])
        for line in stat.splitlines()
        if line.startswith(("inactive_file ", "active_file ", "slab_reclaimable "))
    )
    return limit - used + freeable


def _readable(n: int) -> str:
    value = float(n)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
