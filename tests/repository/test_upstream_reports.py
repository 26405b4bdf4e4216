"""Test `docs/upstream`: reproducers of defects on stock, and mails with the patches."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cpp_kit import compiler
from native_kit import built
from patching_kit import git, repository
from upstream_mails import FOLDER, IDS, RELEASE, generate, path_of

from pyllamakv.patching import apply, hunks
from pyllamakv.scenarios import synthetic_models
from pyllamakv.source import spec_resolver
from pyllamakv.source.releases import Release
from pyllamakv.source.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Maximum length of a page, in words.
WORDS = 400
#: Timeout of a reproducer's compilation in seconds.
COMPILE = 30

#: The mails whose reproducer is a program in C++.
PROGRAMS = ("window-rollback", "whole-shift")

PAGES = sorted(FOLDER.glob("*.md"))
MODELS = {"window-rollback": "sliding", "whole-shift": "deep"}
#: Sources that upstream's generator of models needs.
ARCHS = ("tests/test-llama-archs.cpp", "common/common.cpp", "common/log.cpp")
#: Timeout of their compilation in seconds.
COMPILE_ARCHS = 600


@pytest.fixture
def store() -> Store:
    """Return the store, or skip if it lacks the release."""
    opened = open_store()
    if not opened.has(release()):
        pytest.skip(f"{RELEASE} is not fetched here: pyllamakv upstream fetch {RELEASE}")
    return opened


def release() -> Release:
    """Return the release of the mails."""
    return spec_resolver.resolve(RELEASE)


def page(id_: str) -> str:
    """Return the text of a diagnosis."""
    return (FOLDER / f"{id_}.md").read_text(encoding="utf-8")


def extract(checkout: Path, store: Store, folders: Sequence[str]) -> None:
    """Write directories of the release into a checkout."""
    names = [name for part in folders for name in store.ls(release().commit, part)]
    for name, data in store.read_many(release().commit, names).items():
        assert data is not None
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes(data)


def compiled(id_: str, spec: str, checkout: Path, store: Store) -> Path:
    """Run the command of a page in a checkout with the libraries of a variant."""
    extract(checkout, store, ("include", "ggml/include"))
    (checkout / "build").mkdir()
    (checkout / "build" / "bin").symlink_to(built(spec).folder / "lib")
    (checkout / f"{id_}.cpp").write_bytes((FOLDER / f"{id_}.cpp").read_bytes())
    (command,) = re.findall(r"^g\+\+ (.*)$", page(id_), re.MULTILINE)
    shell = f"{compiler()} -Wall -Wextra -Werror {command}"
    run(shell, cwd=checkout, timeout=COMPILE)
    return checkout / id_


def run(shell: str, **options: Any) -> None:
    """Run a shell command that must succeed."""
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def reproduce(program: Path, model: Path | str) -> tuple[int, str]:
    """Return the status and the output of a reproducer."""
    done = subprocess.run(
        [program, str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def models_of_upstream(folder: Path, store: Store, archs: str) -> None:
    """Build upstream's generator of models for stock, and run it.

    Its common code refers to samplers and JSON, which the generator never calls: they are stubs.
    """
    extract(folder, store, ("include", "ggml/include", "src", "common", "tests"))
    library = built(f"{RELEASE}+stock").folder / "lib"
    include = "-Iinclude -Iggml/include -Icommon -Isrc"
    objects = [f"{Path(name).stem}.o" for name in ARCHS]
    for name, target in zip(ARCHS, objects, strict=True):
        command = f"{compiler()} -std=c++17 -O0 {include} -c {name} -o {target}"
        run(command, cwd=folder, timeout=COMPILE_ARCHS)
    link = (
        f"{compiler()} *.o -o archs -L{library} -Wl,-rpath,{library} -lllama -lggml -lggml-base "
        "-Wl,--no-demangle"
    )
    failed = subprocess.run(
        link, shell=True, cwd=folder, capture_output=True, text=True, check=False
    )
    stubs = sorted(set(re.findall(r"undefined reference to `(\w+)'", failed.stderr)))
    text = "".join(f'extern "C" void {name}() {{ __builtin_trap(); }}\n' for name in stubs)
    (folder / "stubs.cpp").write_text(text, encoding="utf-8")
    run(f"{compiler()} -c stubs.cpp -o stubs.o && {link}", cwd=folder, timeout=COMPILE_ARCHS)
    run(f"./archs -a '^({archs})$' -o .", cwd=folder, timeout=COMPILE_ARCHS)


@pytest.mark.native
@pytest.mark.parametrize("id_", PROGRAMS)
def test_a_reproducer_exits_with_1_on_stock_and_0_on_patched(
    id_: str, store: Store, tmp_path: Path
) -> None:
    """The command of the page compiles it; both variants run with the same model."""
    for spec, status, word in (("stock", 1, "DEFECT: "), ("patched", 0, "OK: ")):
        program = compiled(id_, f"{RELEASE}+{spec}", tmp_path / spec, store)
        found, output = reproduce(program, synthetic_models.model(MODELS[id_]))
        assert found == status, (spec, output)
        assert output.splitlines()[-1].startswith(word), output


@pytest.mark.native
@pytest.mark.slow
def test_models_of_upstream_lose_a_part_of_their_state(store: Store, tmp_path: Path) -> None:
    """The state of each is smaller on stock, as the page shows, and keeps its size on patched."""
    archs = ("gemma2", "gemma3", "plamo3")
    models_of_upstream(tmp_path, store, "|".join(archs))
    for spec, status in (("stock", 1), ("patched", 0)):
        program = compiled("window-rollback", f"{RELEASE}+{spec}", tmp_path / spec, store)
        for arch in archs:
            found, output = reproduce(program, tmp_path / f"{arch}-dense.gguf")
            assert found == status, (spec, arch, output)
            sizes = re.findall(r"refused batch: .* had (\d+) bytes before and has (\d+)", output)
            assert (sizes[0][0] == sizes[0][1]) is (spec == "patched"), output
            if (spec, arch) == ("stock", "gemma3"):
                assert sizes[0] == ("66408", "63300"), "the page shows other sizes"


@pytest.mark.native
def test_every_abort_of_a_shift_damages_a_trained_model(store: Store, tmp_path: Path) -> None:
    """The page has the numbers of stories260K."""
    model = os.environ.get("PYLLAMAKV_TEST_MODEL", "")
    if Path(model).name != "stories260K.gguf":
        pytest.skip("PYLLAMAKV_TEST_MODEL does not name stories260K.gguf")
    for spec, last in (
        ("stock", "DEFECT: 10 of 10 aborted decodes left wrong keys"),
        ("patched", "OK: none of 46 aborted decodes left wrong keys"),
    ):
        _, output = reproduce(
            compiled("whole-shift", f"{RELEASE}+{spec}", tmp_path / spec, store), model
        )
        assert output.splitlines()[-1] == last
        assert re.search(r"\b10 of 10 aborts\b.*\bnone of 46\b", page("whole-shift"))


@pytest.mark.parametrize("id_", PROGRAMS)
def test_a_reproducer_uses_public_headers_alone(id_: str) -> None:
    """`llama.h` is the only header outside of the standard library."""
    text = (FOLDER / f"{id_}.cpp").read_text(encoding="utf-8")
    assert re.findall(r'^#include "(.*)"', text, re.MULTILINE) == ["llama.h"]


@pytest.mark.parametrize("id_", IDS)
def test_a_mail_is_generated_from_its_patch(id_: str, store: Store) -> None:
    """A change of the port changes the mail."""
    hint = f"run: python tests/kits/upstream_mails.py {id_}"
    assert path_of(id_).read_bytes() == generate(id_), hint


@pytest.mark.parametrize("id_", IDS)
def test_applied_mail_equals_the_patched_sources(id_: str, store: Store, tmp_path: Path) -> None:
    """`git am` on the files of stock gives those of the patched tree, which has no other change."""
    patched = apply.apply(release(), [id_], store=store)
    changed = [file.path for file in hunks.parse(path_of(id_).read_bytes()).files]
    read = {path: store.read(release(), path) for path in changed}
    stock = {path: data for path, data in read.items() if data is not None}
    made = repository(tmp_path / "r", stock)
    done = git(made, "am", str(path_of(id_)))
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    for path in changed:
        assert (made / path).read_bytes() == store.read_many(patched.tree, [path])[path]
    words = ("diff-tree", "-r", "--name-only", release().commit, patched.tree)
    assert git(store.path, *words).stdout.decode().split() == changed


@pytest.mark.parametrize("id_", IDS)
def test_a_mail_mentions_upstream_only(id_: str) -> None:
    """It has no trailer or name of this project; the subject has upstream's format, in ASCII."""
    text = path_of(id_).read_bytes().decode("ascii")
    assert re.search(r"^Subject: \[PATCH\] [a-z-]+ : .{1,60}$", text, re.MULTILINE)
    ours = r"pyllamakv|^(?:Patch|Base|Requires|Origin|Upstream-Status|Scenario|Licence): "
    assert not re.findall(ours, text, re.MULTILINE)
    assert text.count("new file mode") == (id_ == "server-park")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_report_page_is_short_and_its_links_exist(path: Path) -> None:
    """It also states that nothing was sent, as long as the patches do."""
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    assert "not sent yet" in text or "none is sent yet" in text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("id_", IDS)
def test_a_diagnosis_names_lines_of_the_release(id_: str, store: Store) -> None:
    """Each `FILE:LINE` is followed by code of that line."""
    named = re.findall(r"`((?:src|tools)/[\w./-]+):(\d+)`\s+`([^`]+)`", page(id_))
    assert len(named) == len(re.findall("`(?:src|tools)/", page(id_))) > 2
    for path, line, code in named:
        text = (store.read(release(), path) or b"").decode()
        assert code in text.splitlines()[int(line) - 1], f"{path}:{line}"
