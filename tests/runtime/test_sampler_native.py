"""Test the samplers of llama.cpp by their effect on known logits, in several releases."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.binding.protocol import SAMPLERS, Capability
from pyllamakv.errors import GrammarError, NoTokenAllowed, Unsupported, UsageError
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

pytestmark = pytest.mark.native

#: Release -> the capabilities of samplers that it lacks.
RELEASES = {
    "0.3.9": Capability.ADAPTIVE_P,
    "0.3.36": Capability(0),
    "b11549": Capability(0),
}
EVERY = (
    Capability.SAMPLER | Capability.SAMPLER_CHAIN | Capability.GRAMMAR | Capability.TOP_N_SIGMA
    | Capability.XTC | Capability.DRY | Capability.ADAPTIVE_P
)  # fmt: skip


@pytest.fixture(scope="module", params=[f"{r}+{k}" for r in RELEASES for k in ("stock", "patched")])
def model(request: pytest.FixtureRequest) -> Iterator[kv.Model]:
    """Load a small model with a vocabulary of bytes, on several releases."""
    with (
        kv.open(built(request.param).folder) as library,
        library.load_model(synthetic_models.model("bytes")) as loaded,
    ):
        yield loaded


def row(model: kv.Model, chances: dict[int, float]) -> NDArray[np.float32]:
    """Return logits with these probabilities; all other tokens share one in a million."""
    n = model.info.n_vocab
    found = np.full(n, math.log(1e-6 / n), dtype=np.float32)
    for token, chance in chances.items():
        found[token] = math.log(chance)
    return found


FOUR = {10: 0.5, 20: 0.3, 30: 0.15, 40: 0.05}


def drawn(model: kv.Model, logits: NDArray[np.float32], n: int = 300, **options: Any) -> list[int]:
    """Return ``n`` tokens that a sampler chooses from the same logits."""
    with model.sampler(**{"temperature": 1.0, "seed": 5, **options}) as sampler:
        draw = model.native.sample_logits
        with sampler.lock as handle:
            return [draw(handle, logits) for _ in range(n)]


def test_releases_have_the_samplers(model: kv.Model) -> None:
    """A missing capability is refused with its name, in Python and in C."""
    about = model.native.about
    missing = RELEASES[about.variant.partition("-")[0]]
    assert about.capabilities & EVERY == EVERY & ~missing
    if Capability.ADAPTIVE_P in missing:
        with pytest.raises(Unsupported, match="ADAPTIVE_P"):
            model.sampler(temperature=1, adaptive_target=0.5)
        params = kv.SamplerParams(temperature=1, adaptive_target=0.5)
        with model.owner as raw, pytest.raises(Unsupported):
            model.native.sampler_new(raw, params)


def test_a_seed_repeats_the_draws(model: kv.Model) -> None:
    """Up to the largest seed; without one, each sampler has a random one."""
    even = np.zeros(model.info.n_vocab, dtype=np.float32)
    for seed, same in ((0, True), (2**32 - 2, True), (None, False)):
        assert (drawn(model, even, 20, seed=seed) == drawn(model, even, 20, seed=seed)) == same


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {10, 20, 30, 40}),
        ({"top_k": 2}, {10, 20}),
        ({"top_p": 0.75}, {10, 20}),
        ({"min_p": 0.2}, {10, 20, 30}),
        # -log(0.3) is closest to the entropy, 1.14.
        ({"typical_p": 0.2}, {20}),
        ({"top_n_sigma": 0.05}, {10}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, {30, 40}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.4}, {10, 20, 30, 40}),
        ({"temperature": 0.01}, {10}),
        ({"logit_bias": {10: -math.inf, 20: -math.inf}}, {30, 40}),
        ({"logit_bias": {77: 30.0}}, {77}),
        ({"temperature": 0.0, "xtc_probability": 1.0, "xtc_threshold": 0.1}, {30}),
        ({"temperature": 0.0, "logit_bias": {10: -5.0}}, {20}),
        ({"mirostat": 2, "mirostat_tau": 0.0}, {10}),
        ({"mirostat": 1, "mirostat_tau": 0.0}, {10}),
    ],
    ids=str,
)
def test_a_sampler_keeps_its_tokens(
    model: kv.Model, options: dict[str, Any], kept: set[int]
) -> None:
    """Of four likely tokens, exactly these are chosen in many draws."""
    assert set(drawn(model, row(model, FOUR), **options)) == kept


def test_chances_are_those_of_the_logits(model: kv.Model) -> None:
    """Mirostat at a large target does not change them either; a seed has one result."""
    logits = row(model, FOUR)
    counts = np.bincount(drawn(model, logits, 2000), minlength=50)
    assert np.abs(counts[[10, 20, 30, 40]] / 2000 - [0.5, 0.3, 0.15, 0.05]).max() < 0.05
    assert drawn(model, logits, 50) == drawn(model, logits, 50) != drawn(model, logits, 50, seed=6)
    counts = np.bincount(drawn(model, logits, 500, mirostat=2, mirostat_tau=9.0), minlength=50)
    assert abs(counts[10] / 500 - 0.5) < 0.1


def test_samplers_run_in_the_given_order(model: kv.Model) -> None:
    """A high temperature before top_p flattens the probabilities that it adds up."""
    logits = row(model, FOUR)
    first = {"samplers": ["temperature", "top_p"], "temperature": 20.0, "top_p": 0.7}
    last = {**first, "samplers": ["top_p", "temperature"]}
    assert set(drawn(model, logits, **last)) == {10, 20}
    assert len(set(drawn(model, logits, **first))) > 20
    assert drawn(model, logits, min_p=0.1, top_k=3) == drawn(
        model, logits, min_p=0.1, top_k=3, samplers=SAMPLERS
    )
    with pytest.raises(UsageError, match="'top_p'"):
        model.sampler(samplers=["temperature"], top_p=0.5)


def test_dynamic_temperature_depends_on_the_entropy(model: kv.Model) -> None:
    """A certain distribution has the lowest temperature, a uniform one the highest."""
    options = {"temperature": 1.0, "dynatemp_range": 1.0}
    sure = row(model, {10: 0.9, 20: 0.1})
    assert set(drawn(model, sure, **options)) == {10}
    assert set(drawn(model, sure)) == {10, 20}
    even = np.zeros(model.info.n_vocab, dtype=np.float32)
    assert len(set(drawn(model, even, **options))) > 100


def test_penalties_count_what_was_accepted(model: kv.Model) -> None:
    """Presence counts once, frequency per occurrence, and repetition is a factor."""
    logits = np.zeros(model.info.n_vocab, dtype=np.float32)
    logits[[10, 20, 30]] = 4.0, 3.0, 2.5
    history = [10, 10, 10, 20]
    for options, chosen in (
        ({"penalty_present": 1.2}, 10),
        ({"penalty_present": 1.2, "penalty_freq": 0.5}, 30),
        ({"penalty_freq": 0.45}, 10),
        ({"penalty_freq": 0.45, "penalty_last_n": 2}, 10),
        ({"penalty_freq": 0.4, "logit_bias": {10: -0.1}}, 10),
        ({"penalty_repeat": 2.0}, 30),
        ({"penalty_repeat": 2.0, "penalty_last_n": 1}, 10),
    ):
        with model.sampler(**options) as sampler:
            sampler.accept(history)
            with sampler.lock as handle:
                penalized = logits.copy()
                tokens = history[-sampler.params.penalty_last_n :]
                for token in set(tokens):
                    penalized[token] /= options.get("penalty_repeat", 1.0)
                    penalized[token] -= options.get("penalty_present", 0.0)
                    penalized[token] -= options.get("penalty_freq", 0.0) * tokens.count(token)
                for token, bias in options.get("logit_bias", {}).items():
                    penalized[token] += bias
                found = model.native.sample_logits(handle, logits)
            assert found == penalized.argmax() == chosen, options
            sampler.reset()
            with sampler.lock as handle:
                assert model.native.sample_logits(handle, logits) == 10


def test_dry_breaks_a_repetition(model: kv.Model) -> None:
    """A token that would extend a repeated part is penalized, unless a breaker is between."""
    logits = np.zeros(model.info.n_vocab, dtype=np.float32)
    a, b, c, d, extends = model.tokenize("abcdX", add_special=False)[-5:]
    repeated = [a, b, c, d, extends, a, b, c, d]
    logits[extends], logits[200] = 2.0, 1.0
    for options, chosen in (
        ({"dry_multiplier": 5.0}, 200),
        ({"dry_multiplier": 0.0}, extends),
        ({"dry_multiplier": 5.0, "dry_allowed_length": 6}, extends),
        ({"dry_multiplier": 5.0, "dry_breakers": ["d"]}, extends),
        ({"dry_multiplier": 5.0, "dry_penalty_last_n": 3}, extends),
    ):
        with model.sampler(**options) as sampler:
            sampler.accept(repeated)
            with sampler.lock as handle:
                assert model.native.sample_logits(handle, logits) == chosen, options


def test_adaptive_p_prefers_its_target(model: kv.Model) -> None:
    """Tokens near the target probability are chosen more often than by their own."""
    if Capability.ADAPTIVE_P not in model.native.about.capabilities:
        pytest.skip("this release has no adaptive-p")
    counts = np.bincount(drawn(model, row(model, FOUR), adaptive_target=0.3), minlength=50)
    assert counts[20] > 0.4 * 300


def test_a_grammar_restricts_the_text(model: kv.Model) -> None:
    """To its language, then to an end token; reset restarts it."""
    logits = np.zeros(model.info.n_vocab, dtype=np.float32)
    options = {"temperature": 1.0, "grammar": 'root ::= [a-c]{2} ("x" | "é")'}
    for seed in range(3):
        with model.sampler(**options, seed=seed) as sampler:
            for _ in range(2):
                tokens = []
                with sampler.lock as handle:
                    while not tokens or not model.is_eog(tokens[-1]):
                        tokens.append(model.native.sample_logits(handle, logits))
                text = model.detokenize(tokens[:-1])
                assert set(text[:2]) <= set("abc")
                assert text[2:] in ("x", "é")
                sampler.reset()


#: Each rule doubles the ways through the next one.
DOUBLING = (
    "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(30)) + 'root ::= r0\nr30 ::= | "a"'
)
NESTED_RULES = 'root ::= r0\nr40 ::= "a"\n' + "".join(
    f"r{i} ::= r{i + 1} r{i} | r{i + 1}\n" for i in range(40)
)
GRAMMARS = [
    ('root :== "a"', 1, 6, "::="),
    ('root ::= "a\n', 2, 1, "end of input"),
    ('root ::= "a" )', 1, 14, "expecting newline"),
    ("# one\n\nroot ::= a %\n", 3, 12, "expecting newline"),
    ('root ::= "\\xZZ"', 1, 13, "hex"),
    ('a ::= "b"\nroot ::= a missing', 2, 12, "'missing' is not defined"),
    ('a ::= "a"', 0, 0, "no rule 'root'"),
    ("", 0, 0, "no rule 'root'"),
    ('root ::= root "a"', 1, 1, "left recursion"),
    # llama.cpp misses that `a` is empty, and never ends.
    ('root ::= a root "x" | "y"\na ::= b\nb ::= | "z"', 1, 1, "left recursion"),
    ('root ::= "b" ("a"?)*', 1, 1, "left recursion"),
    ('root ::= "a"{2,1}', 1, 13, "minimum of {2,1} is larger"),
    ('root ::= "a"{ 12 , 2 }', 1, 13, "minimum of { 12 , 2 } is larger"),
    ('root ::= ("a"{2#}\n,1})', 1, 14, "is larger than the maximum"),
    ('root ::= "a"{,3}', 1, 13, "expected {m}, {m,} or {m,n}"),
    ('root ::= "a"{1000}{1000}{1000}', 1, 19, "too many repetitions"),
    ('root ::= "\n" "\n"{2000}{2000}', 3, 8, "too many repetitions"),
    ('root ::= "a"{2001}', 1, 13, "too many repetitions"),
    ('root ::= "a"{99999999999999999999}', 1, 13, "too many repetitions"),
    ("root ::= " + "(" * 300, 1, 266, "nested groups"),
    ("root ::= " + "a? " * 300 + '\na ::= "a"', 1, 779, "too many repetitions"),
    ("a ::= b\n" * 10001, 10001, 5, "too many rules"),
    ("x" * 300_000, 0, 0, "300000 bytes"),
    ("root ::= " + "r " * 30 + '"a"\nr ::= "" | ""', 0, 0, "too many ways"),
    ('root ::= "a" ' + "r " * 30 + '\nr ::= "" | ""', 0, 0, "too many ways"),
    (DOUBLING, 0, 0, "too many ways"),
    ('root ::= a{0,100}\na ::= "a"{0,100}', 0, 0, "too many ways"),
    ("root ::= " + '"a"? ' * 250, 0, 0, "too many ways"),
    # The parser of b11549 counts the rules of a group.
    ('root ::= ("a" ("b" | "c")){0,1500}', 1, 27, "too many repetitions"),
    ('root ::= "x"\na ::= (b c "d"?){600}\nb ::= "b"\nc ::= "c"', 2, 17, "too many repetitions"),
    ("root ::= <" + "a" * 5000 + ">", 1, 10, "a token of more than 1024 bytes"),
    # Nested repetitions, also with a character before each, and as rules.
    ("root ::= " + "(" * 40 + '"a"' + ")+" * 40, 0, 0, "nested repetitions"),
    ("root ::= " + '("a" ' * 20 + '"a"' + ")+" * 20, 0, 0, "nested repetitions"),
    (NESTED_RULES, 0, 0, "nested repetitions"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "column", "message"), GRAMMARS, ids=range(len(GRAMMARS)))
def test_bad_grammars_have_a_place(
    model: kv.Model, text: str, line: int, column: int, message: str
) -> None:
    """Line and column are in the error, and there is no output on stderr."""
    with pytest.raises(GrammarError, match=re.escape(message)) as caught:
        model.sampler(grammar=text)
    assert (caught.value.line, caught.value.column) == (line, column)


#: That of llama.cpp, and expressions with 15 levels of operators.
JSON_GRAMMAR = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
EXPRESSIONS = (
    "root ::= e0\n"
    + "".join(f'e{i} ::= e{i + 1} ws ("{chr(0x3A + i)}" ws e{i + 1} ws)*\n' for i in range(15))
    + 'e15 ::= [a-z]+ | "(" ws e0 ws ")"\nws ::= [ \\t\\n]*'
)


def test_deep_grammars_are_accepted(model: kv.Model) -> None:
    """Nested groups, optional elements and chains of rules do not exhaust the stack or memory."""
    for text in (
        "root ::= " + "(" * 256 + '"a"' + ")" * 256,
        "root ::= " + '"a"? ' * 64,
        'root ::= "a"{0,2000}',
        "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000)) + 'root ::= r0\nr9000 ::= "a"',
        'root ::= "#)(" [^"\\]#(] "a" # ((({',
        'root ::= (("a"{1000}){100}){20}',
        'root ::= (" "? "b"?)? ("c"* "d"?)? "e"',
        "root ::= " + " | ".join(f'"k{i}"' for i in range(9000)),
        'root ::= "[" (item ("," item)*)? "]"\nitem ::= [a-z]{1,64} ws\nws ::= [ \\t\\n]*',
        'root ::= ([a-z]+ " "?)+',
        'root ::= (((("a")+)+)+)+',
        'root ::= ("a" ("b" | "c")){0,1000}',
        JSON_GRAMMAR,
        EXPRESSIONS,
    ):
        with model.sampler(grammar=text) as sampler, sampler.lock as handle:
            logits = np.zeros(model.info.n_vocab, dtype=np.float32)
            assert model.native.sample_logits(handle, logits) >= 0


def test_sampling_without_an_allowed_token_is_refused(model: kv.Model) -> None:
    """The sampler does not change; llama.cpp would abort on some of these."""
    logits = np.zeros(model.info.n_vocab, dtype=np.float32)
    bias = {i: -math.inf for i in range(model.info.n_vocab) if model.piece(i).startswith(b"a")}
    with (
        model.sampler(grammar='root ::= "a"', logit_bias=bias) as sampler,
        sampler.lock as handle,
        pytest.raises(NoTokenAllowed, match="the grammar allows none"),
    ):
        model.native.sample_logits(handle, logits)
    for value in (math.nan, math.inf):
        wrong = logits.copy()
        wrong[5] = value
        for options in ({}, {"temperature": 1.0}):
            with pytest.raises(kv.NativeError, match="logit of token 5"):
                drawn(model, wrong, 1, **options)
    with pytest.raises(NoTokenAllowed):
        drawn(model, np.full(model.info.n_vocab, -np.inf, dtype=np.float32), 1)
    with pytest.raises(kv.NativeError, match="size of the vocabulary"):
        drawn(model, logits[:-1], 1)
    with pytest.raises(kv.UsageError, match=r"token of logit_bias must be .* to \d+, not 99999"):
        model.sampler(logit_bias={99999: 1.0})
    with pytest.raises(kv.NativeError, match="bias of token 99999"):  # the check in C
        model.native.sampler_new(model.handle, kv.SamplerParams(logit_bias={99999: 1.0}))


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["here", "worker"])
def test_samplers_work_over_a_context(patched: Any, isolated: bool) -> None:
    """Here and in a worker: the same text of a grammar, and the same errors."""
    with (
        kv.open(patched.folder, isolated=isolated) as library,
        library.load_model(synthetic_models.model("bytes")) as model,
        model.context(n_ctx=128) as ctx,
    ):
        params = kv.SamplerParams(
            temperature=1.0, seed=3, grammar='root ::= "(" [a-z]+ ")"', logit_bias={3: -math.inf}
        )
        sequence = ctx.sequence()
        sequence.prefill(model.tokenize("Once"))
        text = "".join(sequence.generate(100, params))
        assert text[0] == "("
        assert text[1:].rstrip(")").isalpha()
        sequence.trim(4)
        with model.sampler(grammar='root ::= "abcdef"', top_k=1) as sampler:
            for piece in sequence.generate(9, sampler):
                assert piece == "a"
                break
            assert "".join(sequence.generate(9, sampler)) == "bcdef"
        with pytest.raises(GrammarError, match="line 1, column 1") as caught:
            model.sampler(grammar="%")
        assert (caught.value.line, caught.value.column) == (1, 1)
        with model.sampler(top_logprobs=1, processors=[lambda _, x: x.fill(0)]) as sampler:
            token = sampler.sample(ctx)
            assert sampler.logprobs[0].token == token == 0
            assert sampler.logprobs[0].top[0][0] == ctx.logits().argmax()
        other = library.load_model(synthetic_models.tiny())
        with other.sampler(top_logprobs=1) as wrong:
            with pytest.raises(UsageError, match="model of 64 tokens, and this one has 320"):
                wrong.sample(ctx)
            assert not wrong.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["here", "worker"])
def test_a_loop_in_c_ends_where_nothing_is_allowed(patched: Any, isolated: bool) -> None:
    """The decoded steps are in the sequence, with logits, and the cache agrees."""
    with (
        kv.open(patched.folder, isolated=isolated) as library,
        library.load_model(synthetic_models.model("bytes")) as model,
        model.context(n_ctx=128) as ctx,
    ):
        sequence = ctx.sequence()
        sequence.prefill(model.tokenize("Once"))
        before = len(sequence)
        ban = {i: -math.inf for i in range(model.info.n_vocab) if model.piece(i).startswith(b"c")}
        with model.sampler(grammar='root ::= "a" "b" "c"', logit_bias=ban) as sampler:
            first = sampler.sample(ctx)
            with pytest.raises(NoTokenAllowed, match="sample after 2 steps"):
                ctx.advance([sequence], [first], 9, sampler)
        assert len(sequence) == before + 2
        assert model.detokenize(sequence.tokens[before:]) == "ab"
        assert sequence.pos_max == len(sequence) - 1
        best = sequence.logits().argmax()
        fresh = model.context(n_ctx=128)
        other = fresh.sequence()
        other.prefill(sequence.tokens)
        assert other.logits().argmax() == best
