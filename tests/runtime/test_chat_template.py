"""Test chat templates: equal texts as transformers, special tokens, and located errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import chat_kit
import pytest
import runtime_kit as kit

import pyllamakv as kv
from pyllamakv.errors import ArgumentTypeError, ChatTemplateError, Unsupported, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant

RECORD = json.loads(chat_kit.EXPECTED.read_text(encoding="utf-8"))
EXPECTED: dict[str, dict[str, dict[str, str]]] = RECORD["expected"]
USER = [{"role": "user", "content": "Hi"}]


def compare(model: kv.Model, name: str, **options: Any) -> None:
    """Render every case, and compare with the text or error of transformers."""
    for case, wanted in EXPECTED[name].items():
        given = {**chat_kit.arguments(case), **options}
        try:
            found = {"text": model.apply_chat_template(**given)}
            assert wanted in (found, chat_kit.digest(found)), (case, found)
        except ChatTemplateError as error:
            assert wanted.get("error", "nothing") in str(error), case


@pytest.mark.parametrize("name", chat_kit.templates())
def test_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """They are for all cases of a template with the constructs of a family."""
    assert EXPECTED[name].keys() == chat_kit.CASES.keys()
    text = chat_kit.templates()[name]
    compare(kit.model(tmp_path), name, template=text, **chat_kit.TOKENS)


def test_recorded_texts_equal_those_of_transformers() -> None:
    """With transformers installed, it renders what was recorded."""
    pytest.importorskip("transformers")
    for name, text in chat_kit.templates().items():
        for case in chat_kit.CASES:
            assert chat_kit.rendered(text, case) == EXPECTED[name][case], (name, case)


@pytest.mark.native
@pytest.mark.real_model
@pytest.mark.slow
def test_template_of_a_real_model_renders_as_in_transformers(
    patched: Variant, real_model: Path
) -> None:
    """Its markers become one token each, and no first token is added."""
    with kv.open(patched.folder) as library, library.load_model(real_model) as model:
        compare(model, "smollm2-135m")
        text = model.apply_chat_template(USER)
        tokens = model.tokenize_chat(USER)
        assert model.detokenize(tokens, special=True) == text
        (start,) = model.tokenize("<|im_start|>", add_special=False, parse_special=True)
        (end,) = model.tokenize("<|im_end|>", add_special=False, parse_special=True)
        assert tokens[0] == start
        assert (tokens.count(start), tokens.count(end)) == (3, 2)
        assert model.is_eog(end)
        names = "{{ bos_token }} {{ eos_token }} {{ unk_token }} {{ pad_token }}"
        found = model.apply_chat_template(USER, template=names)
        # As in the tokenizer's configuration of the model.
        assert found == "<|im_start|> <|im_end|> <|endoftext|> <|im_end|>"


def test_model_template_for_tools_and_argument_override(tmp_path: Path) -> None:
    """A model can have a separate one for tools; an argument overrides both."""
    key = "tokenizer.chat_template"
    model = kit.model(tmp_path, meta={key: "plain", f"{key}.tool_use": "tools"})
    assert model.chat_template == "plain"
    assert model.apply_chat_template(USER) == "plain"
    assert model.apply_chat_template(USER, []) == "plain"
    assert model.apply_chat_template(USER, [{"name": "f"}]) == "tools"
    assert model.apply_chat_template(USER, [{"name": "f"}], template="mine") == "mine"
    assert kit.model(tmp_path).chat_template is None
    with pytest.raises(Unsupported, match="pass one as template="):
        kit.model(tmp_path).apply_chat_template(USER)


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    """Metadata names more of them; an id that the vocabulary lacks is omitted."""
    ids = {"tokenizer.ggml.unknown_token_id": "68", "tokenizer.ggml.padding_token_id": "99999"}
    model = kit.model(tmp_path, meta=ids)
    names = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token is defined }}"
    assert model.apply_chat_template(USER, template=names) == "</s>|</s>|A|False"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages is empty"),
        ("Hi", "messages must be a list"),
        (5, "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["Hi"], r"messages\[0\] must be a mapping"),
        ([*USER, {"content": "Hi"}], r"messages\[1\] has no 'role'"),
        ([{"role": 5}], r"messages\[0\]\['role'\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\]"),
        ([{"role": "user", "content": "a", "more": {1, 2}}], "messages must consist of JSON"),
        ([{"role": "user", "content": b"a"}], r"messages\[0\]\['content'\]"),
    ],
)
def test_bad_messages_are_named(tmp_path: Path, messages: Any, place: str) -> None:
    """The message has the index and the invalid key."""
    with pytest.raises(UsageError, match=place):
        kit.model(tmp_path).apply_chat_template(messages, template="x")


def test_other_bad_arguments_are_named(tmp_path: Path) -> None:
    """Check tools, variables, the template, and the flag."""
    model = kit.model(tmp_path)
    for options, place in (
        ({"tools": ["f"]}, r"tools\[0\]"),
        ({"tools": {"f": 1}}, "tools"),
        ({"tools": [{"f": print}]}, "tools must consist of JSON"),
        ({"x": object()}, "x must consist of JSON"),
        ({"template": 5}, "template"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ):
        with pytest.raises(UsageError, match=place):
            model.apply_chat_template(USER, **{"template": "x", **options})
    with pytest.raises(ArgumentTypeError):
        model.apply_chat_template(USER, template=b"x")
