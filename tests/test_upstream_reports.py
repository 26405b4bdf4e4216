"""`docs/upstream`: reproducers find the defects on stock, mails make the patched sources."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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

#: The longest page, in words.
WORDS = 400
#: Seconds within which a reproducer compiles.
COMPILE = 30

PAGES = sorted(FOLDER.glob("*.md"))
MODELS = {"window-rollback": "sliding", "whole-shift": "deep"}


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


def reproduce(
    id_: str, spec: str, checkout: Path, store: Store
) -> subprocess.CompletedProcess[str]:
    """Run the command of a page in a checkout with the libraries of a variant, then the program."""
    folders = ("include", "ggml/include")
    names = [name for part in folders for name in store.ls(release().commit, part)]
    for name, data in store.read_many(release().commit, names).items():
        assert data is not None
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes(data)
    (checkout / "build").mkdir()
    (checkout / "build" / "bin").symlink_to(built(spec).folder / "lib")
    (checkout / f"{id_}.cpp").write_bytes((FOLDER / f"{id_}.cpp").read_bytes())
    (command,) = re.findall(r"^g\+\+ (.*)$", page(id_), re.MULTILINE)
    shell = f"{compiler()} -Wall -Wextra -Werror {command}"
    done = subprocess.run(
        shell,
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=COMPILE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = str(synthetic_models.model(MODELS[id_]))
    return subprocess.run(
        [checkout / id_, model], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.native
@pytest.mark.parametrize("id_", IDS)
def test_a_reproducer_exits_with_1_on_stock_and_0_on_patched(
    id_: str, store: Store, tmp_path: Path
) -> None:
    """The command of the page compiles it; both variants are run on the same model."""
    for spec, status, word in (("stock", 1, "DEFECT: "), ("patched", 0, "OK: ")):
        done = reproduce(id_, f"{RELEASE}+{spec}", tmp_path / spec, store)
        assert done.returncode == status, (spec, done.stdout, done.stderr)
        assert done.stdout.splitlines()[-1].startswith(word), done.stdout


@pytest.mark.parametrize("id_", IDS)
def test_a_reproducer_uses_public_headers_alone(id_: str) -> None:
    """`llama.h` is the only header that is not of the standard library."""
    text = (FOLDER / f"{id_}.cpp").read_text(encoding="utf-8")
    assert re.findall(r'^#include "(.*)"', text, re.MULTILINE) == ["llama.h"]


@pytest.mark.parametrize("id_", IDS)
def test_a_mail_is_generated_from_its_patch(id_: str, store: Store) -> None:
    """A change of the port reaches the mail."""
    hint = f"run: python tests/kits/upstream_mails.py {id_}"
    assert path_of(id_).read_bytes() == generate(id_), hint


@pytest.mark.parametrize("id_", IDS)
def test_a_mail_makes_the_sources_of_its_patch(id_: str, store: Store, tmp_path: Path) -> None:
    """`git am` on the files of stock makes those of the patched tree, which differs in no other."""
    patched = apply.apply(release(), [id_], store=store)
    changed = [file.path for file in hunks.parse(path_of(id_).read_bytes()).files]
    stock = {path: store.read(release(), path) or b"" for path in changed}
    made = repository(tmp_path / "r", stock)
    done = git(made, "am", str(path_of(id_)))
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    for path in changed:
        assert (made / path).read_bytes() == store.read_many(patched.tree, [path])[path]
    words = ("diff-tree", "-r", "--name-only", release().commit, patched.tree)
    assert git(store.path, *words).stdout.decode().split() == changed


@pytest.mark.parametrize("id_", IDS)
def test_a_mail_mentions_upstream_only(id_: str) -> None:
    """No trailer, name or shared file of ours; the subject has upstream's form, in ASCII."""
    text = path_of(id_).read_bytes().decode("ascii")
    assert re.search(r"^Subject: \[PATCH\] [a-z-]+ : .{1,60}$", text, re.MULTILINE)
    ours = r"pyllamakv|^(?:Patch|Base|Requires|Origin|Upstream-Status|Scenario|Licence): "
    assert not re.findall(ours, text, re.MULTILINE)
    assert "new file mode" not in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_and_its_links_lead_somewhere(path: Path) -> None:
    """It also states that nothing is sent, as long as the patches do."""
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    assert "not sent yet" in text or "neither is sent yet" in text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("id_", IDS)
def test_a_diagnosis_names_lines_of_the_release(id_: str, store: Store) -> None:
    """Each `FILE:LINE` is followed by code of that line."""
    named = re.findall(r"`(src/[\w.-]+):(\d+)`\s+`([^`]+)`", page(id_))
    assert len(named) == page(id_).count("`src/") > 2
    for path, line, code in named:
        text = (store.read(release(), path) or b"").decode()
        assert code in text.splitlines()[int(line) - 1], f"{path}:{line}"
