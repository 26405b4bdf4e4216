"""A cache in a file, over real builds: kept across processes, one owner, refused when damaged."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mapping_kit
import numpy as np
import pytest
from mapping_kit import TOKENS, context_options, fill, logits, three

import pyllamakv as kv
from pyllamakv.errors import (
    Closed,
    KVFileBusy,
    KVFileDamaged,
    KVFileDirty,
    KVFileForeign,
    KVFileFull,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.variant import Variant

build, model = mapping_kit.build, mapping_kit.model
pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="files and smaps need Linux"),
]


@pytest.fixture
def speaking(build: Variant) -> Iterator[kv.Model]:
    """Load another model."""
    from pyllamakv.scenarios import synthetic_models

    with kv.open(build.folder) as library:
        yield library.load_model(synthetic_models.model("bytes"))


@pytest.mark.slow
def test_kept_cache_continues_in_another_process(
    build: Variant, model: kv.Model, tmp_path: Path
) -> None:
    """Sequences, tokens and logits are equal to the last bit."""
    file = tmp_path / "cache"
    script = """
        with model.context(kv_backing=Path(sys.argv[2]), kv_keep=True, **options) as ctx:
            *_, fork = three(ctx)
            ctx.kv.flush()
            fork.prefill([9, 8, 7])
    """
    done = child(build, model, file, script)
    assert done.returncode == 0, done.stderr

    options = context_options()
    with model.context(**options) as ctx:
        first, second, fork = three(ctx)
        fork.prefill([9, 8, 7])
        expected = [(s.id, s.tokens, s.positions) for s in (first, second, fork)]
        wanted = logits(ctx, [first, second, fork])

    for generation in (2, 3):
        with model.context(kv_backing=file, kv_keep=True, **options) as ctx:
            memory = ctx.kv.memory
            assert memory.resumed and memory.kept and memory.generation == generation
            assert memory.file >= memory.reserved
            sequences = [ctx.sequence(number) for number, _tokens, _positions in expected]
            assert [(s.id, s.tokens, s.positions) for s in sequences] == expected
            assert sequences[0].ledger.marks[:10] == sequences[2].ledger.marks[:10]
            found = logits(ctx, sequences)
            assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
            for sequence, (_number, tokens, _positions) in zip(sequences, expected, strict=True):
                sequence.trim(len(tokens))


def child(
    build: Variant, model: kv.Model, file: Path, script: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in its own process, with a model, tokens, options and `three`."""
    begin = f"""
        import os, signal, sys
        from pathlib import Path
        import pyllamakv as kv
        from mapping_kit import three
        tokens = {TOKENS!r}
        options = {context_options()!r}
        library = kv.open(Path(sys.argv[1]))
        model = library.load_model(Path(sys.argv[3]))
    """
    code = textwrap.dedent(begin) + textwrap.dedent(script)
    kits = Path(__file__).resolve().parents[1] / "kits"
    paths = [str(kits.parents[1]), str(kits), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, str(build.folder), str(file), str(model.path)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.regression(
    "a reopened kept cache on 0.3.9 searched for free cells from its start instead of the last "
    "position",
    by="mutation",
    of="patches",
)
def test_reopened_kept_cache_uses_the_same_next_cell(model: kv.Model, tmp_path: Path) -> None:
    """The next token uses the same cell as in a cache that was not closed."""
    keep: dict[str, Any] = {"kv_backing": tmp_path / "cache", "kv_keep": True}

    def begun(**backing: Any) -> tuple[kv.Context, kv.Sequence]:
        ctx = model.context(**backing, **context_options())
        first, second = fill(ctx, TOKENS[:30]), fill(ctx, TOKENS[:30])
        first.remove(10, 20)
        second.prefill(TOKENS[:20])
        return ctx, second

    begun(**keep)[0].close()
    stayed, second = begun()
    with stayed, model.context(**keep, **context_options()) as kept:
        stayed.decode(second.feed([3]))
        kept.decode(kept.sequence(second.id).feed([3]))
        found, expected = (ctx.kv.snapshot() for ctx in (kept, stayed))
        # A decode that uses any free cell has filled the hole before.
        assert not expected.contiguous or (expected.streams[0].pos[10:20] == -1).all()
        assert np.array_equal(found.streams[0].pos, expected.streams[0].pos)


@pytest.mark.slow
def test_killed_process_leaves_its_last_flush(
    build: Variant, model: kv.Model, tmp_path: Path
) -> None:
    """After a kill, the content of the last flush is restored, whatever changed since.

    Without a flush, the file is dirty.
    """
    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **context_options()}
    script = """
        ctx = model.context(kv_backing=Path(sys.argv[2]), kv_keep=True, **options)
        {work}
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = child(build, model, file, script.format(work="ctx.sequence().prefill(tokens)"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    for _ in range(2):  # nothing was flushed
        with pytest.raises(KVFileDirty, match="fresh"):
            model.context(**keep)
    with model.context(**{**keep, "kv_keep": "fresh"}) as ctx:
        assert not ctx.kv.memory.resumed
        assert not any(len(ledger) for ledger in ctx.ledgers)
        fill(ctx, TOKENS)
    with model.context(**context_options()) as ctx:
        expected = logits(ctx, [fill(ctx, TOKENS)])[0]
    changes = (
        "pass",
        "ctx.decode(ctx.sequence(0).feed([1]))",
        "ctx.clear(); ctx.sequence(1).prefill(tokens[::-1])",
        "first = ctx.sequence(0); first.remove(0, 50); first.shift(50, None, -50); "
        "ctx.kv.defrag(); "
        "ctx.sequence(1).prefill(tokens[::-1])",
        "import threading; sequence = ctx.sequence(1); "
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "        while True:\n"
        "            sequence.prefill(tokens)\n"
        "            sequence.remove()",
    )
    for work in changes:
        # A process that is killed between flush and copy leaves no copy of a clean file.
        (tmp_path / "cache.flushed").unlink()
        done = child(build, model, file, script.format(work=work))
        assert done.returncode == -signal.SIGKILL, done.stderr
        with model.context(**keep) as ctx:
            assert ctx.kv.memory.resumed
            assert [len(ledger) for ledger in ctx.ledgers if len(ledger)] == [len(TOKENS)]
            sequence = ctx.sequence(0)
            assert sequence.tokens == TOKENS
            assert np.array_equal(logits(ctx, [sequence])[0], expected), work
            sequence.trim(len(TOKENS))
    work = "ctx.sequence(0).trim(20); ctx.kv.flush(); ctx.sequence(1).prefill(tokens)"
    done = child(build, model, file, script.format(work=work))
    assert done.returncode == -signal.SIGKILL, done.stderr
    with model.context(**keep) as ctx:
        assert ctx.sequence(0).tokens == TOKENS[:20]
        assert not len(ctx.sequence(1))
    with model.context(**{**keep, "kv_keep": "fresh"}):
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_full_disk_fails_flush_and_close(
    model: kv.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`flush` and `close` raise, and a file without a copy is opened with a warning."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keep: dict[str, Any] = {"kv_backing": tmp_path / "cache", "kv_keep": True, **context_options()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        ctx = model.context(**keep)
        fill(ctx, TOKENS)
        for flush in (ctx.kv.flush, ctx.close):
            with pytest.raises(KVFileFull, match="a kill before the next flush would lose it"):
                flush()
        caplog.clear()
        ctx = model.context(**keep)
        assert "No space left" in caplog.text
        assert ctx.sequence(0).tokens == TOKENS
    ctx.close()
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "cache.flushed"}


def test_killed_window_cache_returns_to_one_flush(build: Variant, tmp_path: Path) -> None:
    """Both files of a sliding-window cache return to one flush."""
    from pyllamakv.scenarios import synthetic_models

    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **context_options()}
    with kv.open(build.folder) as library:
        model = library.load_model(synthetic_models.model("sliding"))
        with model.context(**keep) as ctx:
            if ctx.info.n_caches < 2:
                pytest.skip("this release has one cache for windows")
            fill(ctx, TOKENS)
        with model.context(**keep) as ctx:
            sequence = ctx.sequence(0)
            expected = logits(ctx, [sequence])
            sequence.trim(len(TOKENS))
        done = child(
            build,
            model,
            file,
            """
            ctx = model.context(kv_backing=Path(sys.argv[2]), kv_keep=True, **options)
            ctx.sequence(0).prefill(tokens)
            os.kill(os.getpid(), signal.SIGKILL)
            """,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        with model.context(**keep) as ctx:
            sequence = ctx.sequence(0)
            assert sequence.tokens == TOKENS
            assert np.array_equal(logits(ctx, [sequence]), expected)


@pytest.mark.slow
def test_second_owner_of_a_kept_cache_is_refused(
    build: Variant, model: kv.Model, tmp_path: Path
) -> None:
    """A second owner is refused, in this process and in another, without a change."""
    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **context_options()}
    with model.context(**keep) as ctx:
        sequence = fill(ctx, TOKENS[:50])
        for again in (keep, {**keep, "kv_keep": "fresh"}, {**keep, "kv_keep": False}):
            with pytest.raises(KVFileBusy, match="in use"):
                model.context(**again)
        done = child(
            build,
            model,
            file,
            """
            try:
                model.context(kv_backing=Path(sys.argv[2]), kv_keep=True, **options)
            except kv.errors.KVFileBusy:
                sys.exit(7)
            """,
        )
        assert done.returncode == 7, done.stderr
        ctx.decode(sequence.feed([4]))
    with model.context(**keep) as ctx:
        assert ctx.sequence(0).tokens == [*TOKENS[:50], 4]


def test_other_models_and_shapes_are_refused(
    model: kv.Model, speaking: kv.Model, tmp_path: Path
) -> None:
    """A kept cache of another model, size, type or layout is refused and not changed."""
    file = tmp_path / "cache"
    options = context_options()
    with model.context(kv_backing=file, kv_keep=True, **options) as ctx:
        fill(ctx, TOKENS[:50])
    before = file.read_bytes()
    with pytest.raises(KVFileForeign, match="another model"):
        speaking.context(kv_backing=file, kv_keep=True, **options)
    for change in (
        {"n_ctx": 2048},
        {"type_k": "q8_0"},
        {"type_v": "q8_0"},
        {"flash_attn": False},
        {"n_seq_max": 100},
    ):
        with pytest.raises(KVFileForeign, match="shape"):
            model.context(kv_backing=file, kv_keep=True, **{**options, **change})
    with pytest.raises(KVFileForeign, match="kept"):
        model.context(kv_backing=file, **options)
    assert file.read_bytes() == before
    alien = tmp_path / "alien"
    alien.write_bytes(b"something else")
    for keep in (True, False, "fresh"):
        with pytest.raises(KVFileForeign, match="something else"):
            model.context(kv_backing=alien, kv_keep=keep, **options)
    assert alien.read_bytes() == b"something else"


def test_damaged_kept_cache_is_refused(model: kv.Model, tmp_path: Path) -> None:
    """A flipped bit in used cells is detected before it is used in a computation."""
    file = tmp_path / "cache"
    keep: dict[str, Any] = {"kv_backing": file, "kv_keep": True, **context_options()}
    with model.context(**keep) as ctx:
        fill(ctx, TOKENS)
    whole = bytearray(file.read_bytes())
    used = [i for i in range(len(whole) - 1, 0, -1) if whole[i]][:2000:500]
    for at in (40, 600, *used):
        changed = bytearray(whole)
        changed[at] ^= 4
        file.write_bytes(changed)
        with pytest.raises(KVFileDamaged):
            model.context(**keep)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(KVFileDamaged, match="bytes"):
        model.context(**keep)
    file.write_bytes(whole)
    with model.context(**keep) as ctx:
        assert ctx.sequence(0).tokens == TOKENS


@pytest.mark.slow
def test_a_full_disk_is_an_error(build: Variant, model: kv.Model, tmp_path: Path) -> None:
    """On a full disk nothing is created, and no signal is raised."""
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)],
        capture_output=True,
        timeout=120,
        check=False,
    )
    if not done or done.returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        options = {**context_options(), "n_ctx": 65536}
        for backing in (small, small / "cache"):
            with pytest.raises(KVFileFull, match="No space left"):
                model.context(kv_backing=backing, **options)
            assert not list(small.iterdir())
        # A cache that fits works to its last cell: its space was allocated before.
        options["n_ctx"] = 4096
        with model.context(kv_backing=small / "cache", **options) as ctx:
            room = shutil.disk_usage(small).free
            (small / "rest").write_bytes(b"x" * room)
            sequence = fill(ctx, [1] * 4095)
            sequence.trim(100)
            ctx.kv.trim()
            assert shutil.disk_usage(small).free == 0
            sequence.prefill([2] * 3000)
            ctx.clear()
            fill(ctx, [3] * 4000)
    finally:
        subprocess.run(["umount", str(small)], capture_output=True, timeout=120, check=False)


def test_a_limit_on_files_is_an_error(build: Variant, model: kv.Model, tmp_path: Path) -> None:
    """A file above the limit is refused without a signal."""
    done = child(
        build,
        model,
        tmp_path / "cache",
        """
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50000, resource.RLIM_INFINITY))
        for backing in (Path(sys.argv[2]), Path(sys.argv[2]).parent):
            try:
                model.context(kv_backing=backing, **options)
            except kv.errors.KVFileFull:
                continue
            sys.exit(1)
        sys.exit(7)
        """,
    )
    assert done.returncode == 7, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_forked_child_has_neither_lock_nor_memory(
    build: Variant, model: kv.Model, tmp_path: Path
) -> None:
    """Its context is closed, its end changes nothing, and others may open the file meanwhile."""
    file = tmp_path / "cache"
    ctx = model.context(kv_backing=file, kv_keep=True, **context_options())
    sequence = fill(ctx, TOKENS)
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with pytest.raises(Closed):
                sequence.step(1)
            with pytest.raises(Closed):
                ctx.kv.flush()
            ctx.close()
            os.write(ready[1], b"!")
            os.read(go_on[0], 1)
            status = 0
        finally:
            os._exit(status)
    assert os.read(ready[0], 1) == b"!"
    sequence.step(1)
    ctx.close()
    with model.context(kv_backing=file, kv_keep=True, **context_options()) as again:
        assert again.ledgers[0].tokens == [*TOKENS, 1]
    os.write(go_on[1], b"!")
    assert os.waitpid(pid, 0)[1] == 0
    for each in (*ready, *go_on):
        os.close(each)
