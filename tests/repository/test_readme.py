"""Test the documents: their commands run, and print the shown output."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import readme

import pyllamakv
from pyllamakv import errors
from pyllamakv.building import variant
from pyllamakv.source import lockfile, verified
from pyllamakv.source.store import open_store
from pyllamakv.verification import expected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.building.variant import Variant

EXAMPLES = [example for document in readme.DOCUMENTS for example in readme.examples(document)]
#: Blocks that fetch a real model run only if it was fetched.
_REAL = "kv.models.get("
_MARKS = (pytest.mark.real_model, pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=_MARKS if _REAL in each.code else ()) for each in EXAMPLES],
    ids=lambda e: f"{e.document}:{e.line}",
)
def test_examples_print_what_the_document_shows(
    example: readme.Example, stock: Variant, patched: Variant, request: pytest.FixtureRequest
) -> None:
    """Each block prints the output that follows it; numbers may differ on another release."""
    if _REAL in example.code:
        request.getfixturevalue("real_model")
    output = readme.run(example)
    if example.output is not None:
        numbers = variant.find(f"{verified.newest().name}+patched") is not None
        shown = readme.shape(example.output, numbers=numbers)
        assert readme.shape(output, numbers=numbers) == shown


def test_readme_names_the_commands_that_set_themselves_up() -> None:
    """The README's make targets exist."""
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE))
    assert {"check", "test"} <= targets
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=readme.ROOT, check=True, capture_output=True)


def test_relative_links_name_existing_files() -> None:
    """Relative links name files that exist."""
    for document in ("README.md", *(f"docs/{p.name}" for p in (readme.ROOT / "docs").glob("*.md"))):
        path = readme.ROOT / document
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{document}: {target}"


def test_links_have_existing_headings() -> None:
    """A link into a document names one of its headings, as GitHub spells them."""
    for path in [readme.ROOT / "README.md", *(readme.ROOT / "docs").glob("*.md")]:
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text("utf-8")):
            target = path.parent / file if file else path
            titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            spelled = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in spelled, f"{path.name}: {file}#{anchor}"


def test_commands_of_the_documents_have_these_verbs_and_options() -> None:
    """Every `pyllamakv VERB --option`, in a block or in a sentence, exists."""
    options = command_options()
    shared = options[""] | {"--help", "--json"}
    checked = 0
    for path in [readme.ROOT / "README.md", *(readme.ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found = re.findall(r"`(pyllamakv [a-z][^`]*)`", prose)
        for fence in readme.FENCE.finditer(text):
            found += re.findall(r"^(?:\$ )?(pyllamakv [a-z].*)$", fence[2], re.MULTILINE)
        for line in found:
            words = re.split(r"\s[#|]\s|\s{2,}", line.replace("\n", " "))[0].split()
            verb = next((v for n in (3, 2) if (v := " ".join(words[1:n])) in options), None)
            assert verb, f"{path.name}: {line}"
            own = words[: words.index("--")] if "--" in words else words
            used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(own)))
            checked += len(used)
            assert used <= options[verb] | shared, f"{path.name}: {line}"
    assert checked > 50


@functools.cache
def command_options() -> dict[str, set[str]]:
    """Return the options of each verb of the command line, such as ``patch apply``."""
    import typer

    from pyllamakv.cli import main
    from pyllamakv.cli.lazy_group import load

    def walk(name: str, command: Any) -> Iterator[tuple[str, set[str]]]:
        yield (
            name,
            {option for each in command.params for option in each.opts + each.secondary_opts},
        )
        modules = getattr(command, "modules", {})
        for part in {*modules, *getattr(command, "commands", {})}:
            below = load(modules[part][0]) if part in modules else command.commands[part]
            yield from walk(f"{name} {part}".strip(), below)

    return dict(walk("", typer.main.get_command(main.app)))


def read_page(name: str) -> str:
    """Return the text of a page of ``docs``."""
    return (readme.ROOT / "docs" / name).read_text(encoding="utf-8")


def test_verbs_that_accept_other_patches_are_listed() -> None:
    """The page of the patches lists every group of verbs with `--patches`, and the exceptions."""
    options = command_options()
    accept = {verb for verb, known in options.items() if "--patches" in known}
    sentence = " ".join(read_page("patches.md").split()).partition(
        "`--patches SERIES` is an option of"
    )[2]
    named, _, rest = sentence.partition(";")
    alone, _, groups = named.partition(", the commands of ")
    listed = set(re.findall(r"`(\w+)`", alone))
    included, _, excepted = groups.partition(" except ")
    without = re.search(r"`([a-z]+)`", excepted)
    assert without and rest
    for group in re.findall(r"`(\w+)`", included):
        listed |= {verb for verb in options if verb.startswith(f"{group} ")}
    assert accept == listed - {f"patch {without[1]}"}


def test_verbs_in_tables_of_the_documents_exist() -> None:
    """Verbs that need a compiler, and verbs without a release, exist."""
    verbs = set(command_options())
    checked = 0
    for name in ("prebuilt.md", "releases.md"):
        for row in re.findall(r"^\| .* \|$", read_page(name), re.MULTILINE):
            if "`check`" in row or "`run`" in row:
                cell = row if name == "prebuilt.md" else row.split(" | ")[0]
                words = re.findall(r"`([a-z]+(?: [a-z]+)?)`", cell)
                checked += len(words)
                assert set(words) <= verbs, f"{name}: {set(words) - verbs}"
    assert checked > 15
    opening = {"run", *(verb for verb in verbs if re.fullmatch(r"trace (record|stats|view)", verb))}
    assert all(f"`{verb}`" in read_page("releases.md") for verb in opening)


def test_exit_statuses_have_their_exceptions() -> None:
    """Exceptions with another status than 2 are in the row of their status."""
    expected: dict[int, set[str]] = {}
    for name in errors.__all__:
        expected.setdefault(getattr(errors, name).exit_code, set()).add(name)
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", read_page("cli.md"), re.MULTILINE)
    listed = {int(status): set(re.findall(r"`(\w+)`", cell)) for status, cell in rows}
    del expected[2]
    assert expected == {status: names for status, names in listed.items() if names}


def test_workloads_of_the_load_test_are_listed() -> None:
    """The page for operators has a row for each workload of `python -m qa load`."""
    from qa.load.request_schedule import WORKLOADS

    table = read_page("server.md").partition("| workload | requests |")[2].partition("\n\n")[0]
    cells = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)} == set(WORKLOADS)


def test_documented_module_names_exist() -> None:
    """Functions of the module and methods of a context have the right prefix."""
    names = ("README.md", "CHANGELOG.md", *readme.DOCUMENTS, "docs/mmap-kv.md")
    for document in names:
        text = (readme.ROOT / document).read_text(encoding="utf-8")
        for name in re.findall(r"`kv\.(\w+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            assert hasattr(pyllamakv, name), f"{document}: kv.{name}"


def test_verdict_tables_equal_the_accepted_verdicts() -> None:
    """Pinned releases and accepted devices have rows, with their verdicts."""
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| \w+ \| (\w+) \| ([a-z-]+) \| stock", text, re.MULTILINE)
    shown = {f"{release}+patched {backend}": verdict for release, backend, verdict in rows}
    accepted = {name: one.verdict for name, one in expected.load(verified.shipped()).items()}
    assert shown == accepted
    pinned = {f"{release.name}+patched cpu" for release in lockfile.load(lockfile.shipped())}
    assert pinned <= set(shown)


def lost_requests(workload: str) -> dict[str, Any]:
    """Return what stock 0.3.9 did with 1,000 requests, of which patched lost none."""
    raw = json.loads((readme.ROOT / "qa/results/benchmarks.json").read_text(encoding="utf-8"))
    stock, patched = (
        next(
            each["data"]
            for each in raw["results"]
            if each["group"] == f"llama-server 0.3.9, {workload}" and each["name"].startswith(side)
        )
        for side in ("stock", "patched")
    )
    assert patched["lost"] == patched["deaths"] == 0
    assert stock["requests"] == patched["requests"] == 1000
    found: dict[str, Any] = stock
    return found


def test_the_lost_requests_are_those_of_the_results() -> None:
    """The counts in the text and in the drawing are those of `python -m qa load`."""
    stock = lost_requests("shift")
    text = " ".join((readme.ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"aborts {stock['deaths']} times and loses {stock['lost']} requests" in text
    drawn = (readme.ROOT / "docs/pictures/server-load.svg").read_text(encoding="utf-8")
    assert f"{stock['lost']} lost; aborts of the server (crosses): {stock['deaths']}" in drawn
    assert "patched: 1,000 of 1,000 requests answered" in drawn


def test_the_first_example_shows_four_failures_of_stock() -> None:
    """`python -m qa load` drew them, and its command in the text has the options of the results."""
    drawn = (readme.ROOT / "docs/pictures/server-park.svg").read_text(encoding="utf-8")
    assert "stock: 0 of 4 requests answered, 4 lost" in drawn
    assert "patched: 4 of 4 requests answered" in drawn
    raw = json.loads((readme.ROOT / "qa/results/benchmarks.json").read_text(encoding="utf-8"))
    rows = [row for row in raw["results"] if row["group"].endswith(", chats")]
    assert {row["name"]: row["data"]["lost"] for row in rows} == {
        "stock, 4 clients": 4,
        "patched, 4 clients": 0,
    }
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    assert "--workload chats --requests 4 --system stock --system patched" in text


def test_the_comparison_names_tests_that_exist() -> None:
    """The last cell of each feature is "no", or ends with the id of a test."""
    page = (readme.ROOT / "docs/compare.md").read_text("utf-8").partition("## Sources")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    columns = 0
    for row in rows:
        if row[0] == "feature":
            columns = len(row)
            continue
        assert len(row) == columns, row[0]
        if row[-1] == "no":
            continue
        found = re.search(r"`(tests/[\w/]+\.py)::(test_\w+)`$", row[-1])
        assert found, row[0]
        tree = ast.parse((readme.ROOT / found[1]).read_text("utf-8"))
        assert found[2] in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    assert len(rows) > 30


def test_the_arguments_of_llama_cpp_python_are_the_same_or_absent() -> None:
    """A row with "the same" names parameters that exist; one with "absent" names none."""
    from pyllamakv.runtime.model import Model

    functions = (
        pyllamakv.OpenLibrary.load_model,
        Model.context,
        pyllamakv.Context.chat,
        pyllamakv.Sequence.generate,
        pyllamakv.SamplerParams,
    )
    ours = {name for each in functions for name in inspect.signature(each).parameters}
    page = (readme.ROOT / "docs/from-llama-cpp-python.md").read_text("utf-8").partition("## Names")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", page[2], re.MULTILINE)
    same = {name for row, what in rows if what.startswith("the same") for name in words(row)}
    absent = {name for row, what in rows if what == "absent" for name in words(row)}
    assert len(same) > 10
    assert len(absent) > 15
    assert same <= ours, same - ours
    assert not absent & ours


def words(cell: str) -> list[str]:
    """Return the names in a cell of a table."""
    return re.findall(r"\w+", cell)


@pytest.mark.peer
def test_names_of_llama_cpp_python_exist() -> None:
    """The guide names methods, arguments and classes of 0.3.9; its source is read, not imported."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or importlib.metadata.version("llama-cpp-python") != "0.3.9":
        pytest.skip("llama-cpp-python 0.3.9 is not installed")
    folder = Path(spec.origin or "").parent
    names = set()
    for file in ("llama.py", "llama_cache.py", "llama_grammar.py"):
        for node in ast.walk(ast.parse((folder / file).read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
    page = (readme.ROOT / "docs/from-llama-cpp-python.md").read_text("utf-8").partition("## Names")
    rows = re.findall(r"^\| (`.*?) \|", page[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert len(named) > 50 and not named - names


def test_the_lost_requests_of_a_trace_are_those_of_the_results() -> None:
    """The page for operators has them."""
    stock = lost_requests("trace")
    text = " ".join((readme.ROOT / "docs/server.md").read_text(encoding="utf-8").split())
    deaths = stock["deaths"]
    times = {1: "once", 2: "twice"}.get(deaths, f"{deaths} times")
    assert f"stock 0.3.9 aborted {times} and lost {stock['lost']} requests" in text


@pytest.mark.slow
def test_the_memory_classes_of_the_newest_release_are_listed() -> None:
    """Every class that implements llama_memory_i, also through a base class, has a row."""
    store = open_store()
    # Classes of older releases have other names.
    newest = max(lockfile.load(lockfile.shipped()), key=lambda each: each.order)
    if not store.has(newest):
        pytest.skip(f"{newest.name} is not fetched: pyllamakv upstream fetch {newest.name}")
    headers = [path for path in store.ls(newest, "src") if path.endswith(".h")]
    text = b"".join(data or b"" for data in store.read_many(newest, headers).values()).decode()
    bases = dict(re.findall(r"^(?:class|struct) (\w+)(?: final)? *: *public (\w+)", text, re.M))
    found = {"llama_memory_i"}
    while more := {name for name, base in bases.items() if base in found} - found:
        found |= more
    page = (readme.ROOT / "docs/api.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(llama_\w+)`.* \| `[A-Z]+` \|", page, re.MULTILINE))
    missing = found - rows - {"llama_memory_i"}
    assert not missing, f"{newest.name} has memory classes without a row in docs/api.md: {missing}"
    assert len(found) > 1
