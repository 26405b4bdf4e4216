"""Test JSON schemas: every sampled document is valid, and invalid schemas are refused."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import jsonschema
import llguidance
import numpy as np
import pytest
import runtime_kit as kit

import pyllamakv as kv
from pyllamakv.errors import NoTokenAllowed, SchemaError, ToolMissing, Unsupported, UsageError
from pyllamakv.runtime import json_schema
from pyllamakv.runtime.json_schema import SchemaProcessor
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.building.variant import Variant

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "size", "n"],
    "additionalProperties": False,
}


def document(model: kv.Model, seed: int) -> str:
    """Return a document of random tokens that the processor allows."""
    processor, random = SchemaProcessor(model, SCHEMA), np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(300):
        logits = random.normal(size=model.info.n_vocab).astype(np.float32)
        processor(tokens, logits)
        token = int(logits.argmax())
        if model.is_eog(token):
            return model.detokenize(tokens)
        tokens.append(token)
    raise AssertionError("the document did not end")


def test_random_documents_meet_the_schema(tmp_path: Path) -> None:
    """They are for any logits, and characters of several bytes are complete."""
    model = kit.model(tmp_path)
    for seed in range(5):
        text = document(model, seed)
        jsonschema.validate(json.loads(text), SCHEMA)
        # White space as `json.dumps` writes it; otherwise, it may have no end.
        assert text.startswith('{"city": "')
        assert text.count(" ") - text[: text.index('", "size')].count(" ") == 4
    assert model.schema_tokens is model.schema_tokens


def test_tokens_have_the_bytes_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the tokenizer changes a text, the longest tokens that match are chosen."""
    model = kit.model(tmp_path)
    plain = model.native.tokenize
    monkeypatch.setattr(model.native, "tokenize", lambda m, text, *o: plain(m, text.upper(), *o))
    for seed in range(3):
        jsonschema.validate(json.loads(document(model, seed)), SCHEMA)
    words = json_schema.Vocabulary(model)
    words.tokens = [b"", b"abc", b"a", b"b", *[b""] * model.info.n_vocab]
    assert words(b"ababc") == [2, 3, 1]
    assert words(b"ab?a") == [2, 3]


@pytest.mark.native
def test_a_model_of_sentencepiece_fills_a_schema(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer adds a space before each text, but has all tokens."""
    monkeypatch.setattr(json_schema.Vocabulary, "_longest", None)
    with (
        kv.open(variant.folder) as library,
        library.load_model(synthetic_models.model("bytes")) as model,
        model.context(n_ctx=256) as ctx,
    ):
        assert model.piece(model.tokenize("{", add_special=False)[0]) == b" "
        with ctx.sequence() as sequence, model.sampler(json_schema=SCHEMA) as sampler:
            sequence.prefill(sequence.context.model.tokenize("Once"))
            text = "".join(sequence.generate(150, sampler))
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.xfail(strict=True, reason="a defect of llguidance that docs/chat.md names")
def test_exclusive_minimum_of_zero_does_not_end_at_zero(tmp_path: Path) -> None:
    """With a maximum below 1, the document 0 must not end."""
    model = kit.model(tmp_path)
    processor = SchemaProcessor(model, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5})
    logits = np.zeros(model.info.n_vocab, dtype=np.float32)
    processor(model.tokenize("0", add_special=False), logits)
    assert not np.isfinite(logits[2])


def test_a_complete_document_ends(tmp_path: Path) -> None:
    """Only an end token may follow; a new start discards the old document."""
    model = kit.model(tmp_path)
    processor = SchemaProcessor(model, json.dumps({"const": 5}))
    for tokens, allowed in (([], {56}), ([56], {2}), ([56, 2], {2}), ([], {56})):
        logits = np.zeros(model.info.n_vocab, dtype=np.float32)
        processor(tokens, logits)
        assert set(np.flatnonzero(np.isfinite(logits)).tolist()) == allowed


@pytest.mark.parametrize("tokens", [[57], [57, 56]])
def test_an_error_of_the_matcher_is_raised(tmp_path: Path, tokens: list[int]) -> None:
    """Later calls raise it too: the matcher never recovers, and then allows only end tokens."""
    model = kit.model(tmp_path)
    processor = SchemaProcessor(model, {"const": 5})
    logits = np.zeros(model.info.n_vocab, dtype=np.float32)
    for _ in range(2):
        with pytest.raises(NoTokenAllowed, match="cannot be continued: Parser Error: token"):
            processor(tokens, logits)
    with pytest.raises(NoTokenAllowed):
        processor([], logits)
    assert not logits.any()


def test_matcher_beyond_its_limit_raises_an_error(tmp_path: Path) -> None:
    """The document is incomplete, so it must not end."""
    model = kit.model(tmp_path)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    processor = SchemaProcessor(model, schema)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    limits = llguidance.LLParserLimits(step_max_items=1)
    processor._matcher = llguidance.LLMatcher(
        model.schema_tokens, grammar, log_level=0, limits=limits
    )
    tokens = model.tokenize('{"city": "ab', add_special=False)
    with pytest.raises(NoTokenAllowed, match="Too many items"):
        for i in range(len(tokens)):
            processor(tokens[: i + 1], np.zeros(model.info.n_vocab, dtype=np.float32))


def test_an_unused_model_is_freed(tmp_path: Path) -> None:
    """The model keeps its vocabulary for schemas, which must not keep the model."""
    model = kit.model(tmp_path)
    native, gone = model.native, weakref.ref(model)
    SchemaProcessor(model, {"const": 5})
    del model
    gc.collect()
    assert gone() is None
    assert native.freed[0] == "model"


def nested(depth: int) -> list[Any]:
    """Return arrays in arrays."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "'a'"),
        ({"type": "nope"}, "nope"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ("{", "line 1"),
        ({"a": {1, 2}}, "JSON cannot express"),
        ({"const": float("nan")}, "JSON cannot express"),
        ({"pattern": "(a{1000}){1000}"}, r"copies, at \(root\): nested"),
        ('{"enum":' + "[" * 200 + "]" * 200 + "}", "more than 127 nested"),
        ('{"enum":' + "[" * 3000 + "]" * 3000 + "}", "more than 127 nested"),
        ({"enum": nested(3000)}, "more than 127 nested"),
    ],
    ids=range(12),
)
def test_bad_schemas_are_refused(tmp_path: Path, schema: Any, message: str) -> None:
    """The message has the reason, before any token is sampled; no sampler is created."""
    model = kit.model(tmp_path)
    with pytest.raises(SchemaError, match=message):
        model.sampler(json_schema=schema)
    assert "sampler" not in model.native.created


def text_with(**keywords: Any) -> dict[str, Any]:
    """Return the schema of a text, in a schema with other parts."""
    parts = {"n": {"type": "null"}, "a/b": {"type": "string", **keywords}}
    return {"type": "object", "properties": parts, "required": ["a/b"]}


INSIDE = "/properties/a~1b"
BAD_PARTS = [
    (text_with(pattern="^a{2,1}$"), INSIDE, "^a{2,1}$", "the start must be <= the end"),
    (text_with(pattern="^(a$"), INSIDE, "^(a$", "unclosed group"),
    (text_with(pattern="^(a{1000}){1000}$"), INSIDE, "^(a{1000}){1000}$", "100000 copies"),
    (text_with(pattern="a{999999999}"), INSIDE, "a{999999999}", "more than 100000 copies"),
    (text_with(minLength=3, maxLength=2), INSIDE, "", "minLength (3) is greater than"),
    (text_with(maxLength=-1), INSIDE, "", "'maxLength', got -1"),
    (text_with(**{"not": {}}), INSIDE, "", "not"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "", "", "minItems (3) is greater than"),
    ({"$defs": {"x": {"pattern": "a{2,1}"}}, "$ref": "#/$defs/x"}, "/$defs/x", "a{2,1}", "start"),
    (
        {"type": "object", "patternProperties": {"a{2,1}": {"type": "null"}}},
        "/patternProperties/a{2,1}", "a{2,1}", "the start must be",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "pattern", "message"), BAD_PARTS)
def test_schema_error_names_path_and_pattern(
    tmp_path: Path, schema: dict[str, Any], path: str, pattern: str, message: str
) -> None:
    """With its JSON pointer and pattern, in the message and as fields."""
    with pytest.raises(SchemaError) as caught:
        SchemaProcessor(kit.model(tmp_path), schema)
    assert (caught.value.path, caught.value.pattern) == (path, pattern)
    text = str(caught.value)
    assert message in text
    assert path in text
    assert pattern in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0), ("abc", 3), ("a{3}", 3), ("(ab){2,3}", 6), ("(a{10}b){10}", 110), ("a*b+c?", 3),
        ("[a{5}]{4}", 4), (r"\(a{2}\)", 4), (r"\p{Greek}{7}", 7), ("a{,3}", 5), ("(a|b){0}", 2),
        ("(?:a{100}){100}", 10_000), ("((a{1000}){1000}){1000}", 10**9), (r"[\]a]{3}(?<n>b){2}", 5),
        ("a{2}" + "[" * 1_000_000, 3), ("(?" * 100_000, 0), (r"\p{" * 100_000, 200_000),
    ],
)  # fmt: skip
def test_expanded_pattern_size_multiplies_repetitions(pattern: str, size: int) -> None:
    """Nested repetitions multiply; braces in classes and escapes are not repetitions."""
    assert json_schema.expanded_size(pattern) == size


def test_long_chain_of_references_is_compiled(tmp_path: Path) -> None:
    """The recursion of llguidance does not exhaust the stack, which would end the process."""
    program = """
import sys
from pathlib import Path

sys.path[:] = sys.argv[2].split("|")
import runtime_kit
from pyllamakv.runtime.json_schema import SchemaProcessor

chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(5000)}
chain["d5000"] = {"type": "null"}
SchemaProcessor(runtime_kit.model(Path(sys.argv[1])), {"$defs": chain, "$ref": "#/$defs/d0"})
"""
    command = [sys.executable, "-c", program, str(tmp_path), "|".join(sys.path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


def test_bounds_of_a_valid_schema_are_not_expanded(tmp_path: Path) -> None:
    """The number of items and characters may be large, and data is not a schema."""
    model = kit.model(tmp_path)
    for schema in (
        {"type": "array", "items": {"type": "null"}, "maxItems": 10**9},
        text_with(minLength=10**6, maxLength=10**9),
        text_with(pattern="^a{0,100000}$"),
        {"const": {"pattern": "(a{1000}){1000}"}},
        {"enum": [{"pattern": "(a{1000}){1000}"}]},
    ):
        SchemaProcessor(model, schema)(([]), np.zeros(model.info.n_vocab, dtype=np.float32))


def test_other_types_are_refused(tmp_path: Path) -> None:
    """A schema is a mapping or text."""
    for wrong in (5, [1], b"{}", True):
        with pytest.raises(UsageError, match="json_schema"):
            kit.model(tmp_path).sampler(json_schema=wrong)


def test_model_without_an_end_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document could not end."""
    model = kit.model(tmp_path)
    monkeypatch.setattr(model.native, "token_is_eog", lambda model, token: False)
    monkeypatch.setattr(model, "info", dataclasses.replace(model.info, token_eos=-1))
    with pytest.raises(Unsupported, match="no end token"):
        model.sampler(json_schema={})


def test_missing_llguidance_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ToolMissing, match=r"pip install 'pyllamakv\[json\]'"):
        kit.model(tmp_path).sampler(json_schema={})


@pytest.mark.native
@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["here", "worker"])
def test_a_real_model_fills_a_schema(patched: Variant, real_model: Path, isolated: bool) -> None:
    """Greedily and at a high temperature."""
    with (
        kv.open(patched.folder, isolated=isolated) as library,
        library.load_model(real_model) as model,
        model.context(n_ctx=256) as ctx,
    ):
        for temperature in (0.0, 1.5):
            with model.sampler(json_schema=SCHEMA, temperature=temperature, seed=3) as sampler:
                text = "".join(
                    ctx.chat([{"role": "user", "content": "Name a city."}], 100, sampler)
                )
            jsonschema.validate(json.loads(text), SCHEMA)
