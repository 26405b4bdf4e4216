"""Test the process for chat templates: limits, end and restart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from pyllamakv.errors import ChatTemplateError, WorkerDied
from pyllamakv.runtime import template_process
from pyllamakv.runtime.template_process import TemplateProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDLESS = (
    "{% for i in range(100000) %}{% for j in range(100000) %}{% for k in range(100000) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """Return a process with a short limit of CPU time."""
    made = TemplateProcess(cpu_seconds=0.2, address_space=1 << 28)
    yield made
    made.close()


@pytest.mark.slow
def test_an_endless_template_is_ended(process: TemplateProcess) -> None:
    """Nested loops end at the limit of CPU time; the next render starts a new process."""
    assert process.render("{{ a }}", {"a": [1]}) == "[1]"
    with pytest.raises(ChatTemplateError, match=r"did not end within 0\.2 seconds of CPU time"):
        process.render(ENDLESS, {})
    assert process.render("b", {}) == "b"


def test_a_process_whose_start_is_interrupted_is_used_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it and its pipes would remain without an owner."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def interrupted(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*words, **options))
        if len(started) == 1:
            signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(template_process.subprocess, "Popen", interrupted)
    process = TemplateProcess()
    with pytest.raises(KeyboardInterrupt):
        process.render("a", {})
    assert process.render("b", {}) == "b"
    process.close()
    assert [each.poll() is not None for each in started] == [True]


@pytest.mark.slow
def test_time_limit_works_with_a_blocked_signal() -> None:
    """Processes inherit an ignored or blocked signal; the limit works anyway."""
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    process = TemplateProcess(cpu_seconds=0.2)
    try:
        with pytest.raises(ChatTemplateError, match="did not end"):
            process.render(ENDLESS, {})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.signal(signal.SIGPROF, before)
        process.close()


@pytest.mark.slow
def test_one_long_operation_is_ended(process: TemplateProcess) -> None:
    """No bytecode runs meanwhile, so a counter of loops could not end it."""
    with pytest.raises(ChatTemplateError, match="did not end"):
        process.render("{{ (7 ** 40000000) > 1 }}", {})


def test_template_memory_is_limited(process: TemplateProcess) -> None:
    """A template cannot use more than the address space allows; the process survives."""
    with pytest.raises(ChatTemplateError, match="too much memory"):
        process.render("{{ 'a' * 10 ** 10 }}", {})
    assert process.render("b", {}) == "b"


def test_an_error_names_the_line(process: TemplateProcess) -> None:
    """It does as a field and in the message."""
    with pytest.raises(ChatTemplateError, match=r"no \(line 2 of the template\)") as caught:
        process.render("\n{{ raise_exception('no') }}", {})
    assert caught.value.line == 2


@pytest.mark.slow
def test_killed_template_process_is_replaced(process: TemplateProcess) -> None:
    """The message has the cause, and the next render works."""
    process.render("a", {})
    assert process._child is not None
    process._child.kill()
    process._child.wait()
    with pytest.raises(WorkerDied, match="status -9"):
        process.render("a", {})
    assert process.render("a", {}) == "a"


def test_deeply_nested_values_raise_a_typed_error(process: TemplateProcess) -> None:
    """Near the limit of recursion, here or in the process, the error is typed."""
    value: list[Any] = []
    for depth in range(1, 1100):
        value = [value]
        if depth > 900:
            with contextlib.suppress(ChatTemplateError):
                assert process.render("a", {"x": value}) == "a"
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        process.render("a", {"x": value})


def test_truncated_answer_of_the_template_process_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is killed while it writes its response is reported as dead."""
    monkeypatch.setattr(template_process, "PROGRAM", ("-c", "print('{', end='')"))
    with pytest.raises(WorkerDied, match="status 0"):
        TemplateProcess().render("a", {})


def test_threads_get_their_own_answers() -> None:
    """Requests of several threads are processed one after another, by one process."""
    process = template_process.shared()
    assert template_process.shared() is process
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: process.render("{{ n }}", {"n": n}), range(40))
    assert list(found) == [str(n) for n in range(40)]


@pytest.mark.slow
def test_a_fork_starts_its_own_process() -> None:
    """A child does not write into its parent's pipe, nor end the parent's process."""
    code = (
        "import os; from pyllamakv.runtime.template_process import shared\n"
        "assert shared().render('a', {}) == 'a'; first = shared()._child.pid\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert shared().render('b', {}) == 'b' and shared()._child.pid != first\n"
        "else:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert shared().render('c', {}) == 'c' and shared()._child.pid == first\n"
        # Another thread may render meanwhile; it does not exist in the child.
        "with shared()._lock:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        import signal; signal.alarm(60)\n"
        "        os._exit(shared().render('d', {}) != 'd')\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_python_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the reason for a program that cannot start Python."""
    monkeypatch.setattr(sys, "executable", os.devnull)
    with pytest.raises(WorkerDied, match="cannot start"):
        TemplateProcess().render("a", {})
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(WorkerDied, match=r"sys\.executable"):
        TemplateProcess().render("a", {})
