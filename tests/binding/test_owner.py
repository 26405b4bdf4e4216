"""Test that native objects are freed once, in order, and never while they are used."""

from __future__ import annotations

import dis
import gc
import itertools
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runtime_kit as kit

from pyllamakv.binding.owner import FunctionLock, Lock, Owner, ReadLock, free_quietly
from pyllamakv.errors import Busy, Closed, NativeError, WorkerDied


class Tree:
    """Create a library with two models, contexts and a sampler; record the freed handles."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        free = self.freed.append
        self.library = Owner(0, free, "library")
        self.models = [Owner(10 * i, free, "model", self.library) for i in (1, 2)]
        self.contexts = [
            Lock(11, free, "context", self.models[0]),
            Lock(12, free, "context", self.models[0]),
            Lock(21, free, "context", self.models[1]),
        ]

    def all(self) -> list[Owner[int]]:
        """Return every owner."""
        return [self.library, *self.models, *self.contexts]


def in_thread(call: object) -> BaseException | None:
    """Call in another thread and return what it raised."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception(120)  # type: ignore[arg-type]


def before(freed: list[int], first: int, then: int) -> bool:
    """Return whether an object was freed before another one."""
    return freed.index(first) < freed.index(then)


def test_objects_are_freed_once_and_children_first() -> None:
    """In any order of closing, children are freed before their parents, and each one once."""
    for order in itertools.permutations(range(6)):
        tree = Tree()
        owners = tree.all()
        for index in order:
            owners[index].close()
        assert sorted(tree.freed) == [0, 10, 11, 12, 20, 21], order
        for first, then in ((11, 10), (12, 10), (21, 20), (10, 0), (20, 0)):
            assert before(tree.freed, first, then), order


def test_use_of_a_closed_object_is_refused() -> None:
    """Using a closed object, or one whose parent was closed, raises an error that names it."""
    tree = Tree()
    tree.models[0].close()
    for owner in (tree.models[0], *tree.contexts[:2]):
        assert owner.closed
        with pytest.raises(Closed, match="was closed"), owner:
            pass
        with pytest.raises(Closed):
            _ = owner.raw
        if isinstance(owner, Lock):
            with pytest.raises(Closed):
                owner.interrupt(lambda raw: raw)
        owner.close()
    assert not tree.contexts[2].closed
    with tree.contexts[2] as raw:
        assert raw == 21


def test_object_created_on_a_closed_parent_is_freed() -> None:
    """An object that is created on a closed parent is freed at once."""
    tree = Tree()
    tree.models[1].close()
    del tree.freed[:]
    with pytest.raises(Closed, match="model was closed"):
        Owner(22, tree.freed.append, "context", tree.models[1])
    assert tree.freed == [22]


def test_second_thread_using_a_lock_is_busy() -> None:
    """A lock belongs to one thread at a time, which may use it recursively."""
    tree = Tree()
    context = tree.contexts[0]

    def use() -> None:
        with context:
            pass

    with context as raw, context as again:
        assert raw == again == 11
        assert isinstance(in_thread(use), Busy)
        assert in_thread(lambda: context.interrupt(lambda raw: raw)) is None
    assert in_thread(use) is None


@pytest.mark.regression(
    "after a signal handler had raised as a call began or ended, its context stayed in use",
    by="hostile input",
    of="Python",
)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("reading", marks=pytest.mark.slow),
        *("enter", "nested", "function", "results", "shared"),
    ],
)
def test_an_interrupt_of_an_entry_leaves_the_lock_usable(way: str) -> None:
    """A handler raises wherever Python calls one: other threads can use and close the object."""
    number, left = 0, 0
    last: dict[object, str] = {}
    file = Owner.close.__code__.co_filename

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        called = event == "call"
        if event == "opcode":
            called = last.get(frame, "") in {"CALL", "JUMP_BACKWARD"}
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        left -= called
        if called and not left:
            raise KeyboardInterrupt
        return trace

    def use(context: Any) -> None:
        outer = context if way == "nested" else nullcontext()
        entered: Any = context.reading() if way == "reading" else context
        if way in ("function", "results"):
            entered = (FunctionLock if way == "function" else ReadLock)(context, use)
        with outer, entered:
            pass

    before = sys.gettrace()
    while left <= 0:
        number += 1
        tree, left = Tree(), number
        context: Any = tree.models[0] if way == "shared" else tree.contexts[0]
        try:
            sys.settrace(trace)
            use(context)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        with context:  # if it was not left, the next call of the thread leaves it
            pass
        assert in_thread(partial(use, context)) is None
        assert in_thread(context.close) is None
    assert number > 2


@pytest.mark.regression(
    "the exception of a signal handler in close() left objects that were never freed",
    by="review",
    of="Python",
)
def test_an_interrupt_of_a_close_leaves_no_object() -> None:
    """A handler raises wherever Python calls one: each object is freed once, or by a repetition."""
    file, steps, struck = Owner.close.__code__.co_filename, 0, 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        if steps == struck:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while steps >= struck or not steps:
            tree, steps, struck = Tree(), 0, struck + 5
            sys.settrace(trace)
            with suppress(KeyboardInterrupt):
                tree.library.close()
            sys.settrace(None)
            tree.library.close()
            assert sorted(tree.freed) == [0, 10, 11, 12, 20, 21], f"after {struck} steps"
    finally:
        sys.settrace(before[0])
        signal.signal(signal.SIGINT, before[1])
    assert struck > 100


def test_a_function_lock_serves_the_parts_of_its_operation_only() -> None:
    """Code that the function calls gets Busy if it is of others, also in the same function."""
    context = Tree().contexts[0]

    def operate(call: Any) -> None:
        with lock:
            call()

    def use() -> None:
        with context:
            pass

    lock = FunctionLock(context, operate)
    for call in (use, partial(operate, use)):
        with pytest.raises(Busy):
            operate(call)
    operate(kit.ours(use))
    operate(lambda: isinstance(in_thread(use), Busy) or pytest.fail("not busy"))
    assert in_thread(use) is None
    context.close()
    with pytest.raises(Closed):
        operate(use)


@pytest.mark.parametrize("way", ["lock", "function", "results"])
def test_a_call_between_two_lines_of_an_entry_leaves_its_holder(way: str) -> None:
    """A finaliser uses the context there: later nested uses leave the lock as usual."""
    context = Tree().contexts[0]
    calls = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal calls
        if frame.f_code is not type(entered).__enter__.__code__:
            return None
        if event == "line":
            calls += 1
            sys.settrace(None)
            with suppress(Busy), context:
                pass
            sys.settrace(trace)
        return trace

    def use() -> None:
        with context:
            pass

    def operate() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            entered.__enter__()
        finally:
            sys.settrace(before)
        for _ in range(2):
            kit.ours(use)()
        assert isinstance(in_thread(use), Busy)
        entered.__exit__(None, None, None)

    kinds = {"function": FunctionLock, "results": ReadLock}
    entered: Any = kinds[way](context, operate) if way in kinds else context
    operate()
    assert in_thread(use) is None
    assert calls > 5


def test_a_reader_waits_for_the_running_call() -> None:
    """A reader neither gets nor causes Busy, also in a loop of calls, and may nest."""
    context = Tree().contexts[0]
    entered, read = threading.Event(), threading.Event()
    busy: list[BaseException] = []

    def loop() -> None:
        while not read.is_set():
            try:
                with context, context:
                    entered.set()
            except Busy as error:
                busy.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    assert entered.wait(60)
    for _ in range(200):
        with context.reading() as raw, context, context.reading():
            assert raw == 11
    read.set()
    thread.join(60)
    assert busy == []


@pytest.mark.slow
def test_an_object_that_is_read_cannot_be_closed() -> None:
    """A reader of a closed object gets Closed."""
    tree = Tree()
    context = tree.contexts[0]
    with context.reading():
        assert isinstance(in_thread(context.close), Busy)
    context.close()
    with pytest.raises(Closed), context.reading():
        pass


def test_calls_and_close_wait_for_a_short_read() -> None:
    """Neither raises Busy, and close does not wait for a call that is in progress."""
    for use in (lambda lock: lock.close(), lambda lock: lock.__enter__()):
        tree = Tree()
        context = tree.contexts[0]
        entered, leave = threading.Event(), threading.Event()

        def read(context: Lock[int] = context, entered=entered, leave=leave) -> None:
            with context.reading():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=read)
        thread.start()
        assert entered.wait(60)
        threading.Timer(0.1, leave.set).start()
        use(context)
        thread.join(60)
    with tree.contexts[1]:
        assert isinstance(in_thread(tree.contexts[1].close), Busy)


def test_closing_the_parent_of_an_object_in_use_closes_nothing() -> None:
    """Closing the parent of an object in use closes nothing."""
    tree = Tree()
    for used in (tree.contexts[1], tree.models[0], tree.library):
        with used:
            for owner in (tree.library, used):
                with pytest.raises(Busy, match="in use"):
                    owner.close()
                assert isinstance(in_thread(owner.close), Busy)
    assert tree.freed == []
    tree.library.close()
    assert tree.freed[-1] == 0


def test_owner_is_used_by_several_threads() -> None:
    """Several threads may use a model at the same time."""
    model = Tree().models[0]
    barrier = threading.Barrier(4)

    def use() -> int:
        with model as raw:
            barrier.wait(120)
            return raw

    with ThreadPoolExecutor(4) as pool:
        assert [job.result(120) for job in [pool.submit(use) for _ in range(4)]] == [10] * 4


@pytest.mark.slow
def test_dropped_objects_are_freed_before_their_parents() -> None:
    """Without close, a dropped child is freed, and its parent only afterwards."""
    tree = Tree()
    freed = tree.freed
    del tree.contexts[0]
    gc.collect()
    assert freed == [11]
    del tree
    gc.collect()
    assert sorted(freed) == [0, 10, 11, 12, 20, 21]
    assert before(freed, 12, 10)
    assert before(freed, 10, 0)


def test_objects_in_a_cycle_are_freed_before_their_parents() -> None:
    """The order of the garbage collector does not matter."""
    tree = Tree()
    freed = tree.freed
    for owner in tree.all():
        owner.cycle = tree  # type: ignore[attr-defined]
    del tree, owner
    gc.collect()
    assert sorted(freed) == [0, 10, 11, 12, 20, 21]
    assert before(freed, 11, 10)
    assert before(freed, 20, 0)


EXIT = """
import threading
from pyllamakv.binding.owner import Lock, Owner
say = lambda raw: print(raw, flush=True)
library = Owner(0, say, "library")
model = Owner(1, say, "model", library)
context = Lock(2, say, "context", model)
other = Owner(5, say, "library")
used = Lock(6, say, "context", other)
entered = threading.Event()
def work():
    with used:
        entered.set()
        threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
entered.wait()
"""


def test_objects_are_freed_in_order_at_exit(tmp_path: Path) -> None:
    """Remaining objects are freed in order, except one that a thread uses, and its parent."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{EXIT}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["2", "1", "0"]


@pytest.mark.parametrize("error", [WorkerDied("gone"), Closed("gone"), None])
def test_objects_of_a_dead_worker_are_released(error: Exception | None) -> None:
    """Check a dead worker and a closed library."""

    def free(raw: int) -> None:
        assert raw == 7
        if error is not None:
            raise error

    free_quietly(free, 7)


def test_free_quietly_raises_other_errors() -> None:
    """Check that other errors are not hidden."""

    def free(raw: int) -> None:
        raise NativeError("broken")

    with pytest.raises(NativeError):
        free_quietly(free, 7)
