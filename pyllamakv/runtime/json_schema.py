"""Restrict sampling to JSON documents that meet a schema, with the library llguidance.

llguidance computes which tokens may come next. `SchemaProcessor` excludes the others from the
logits. The extra ``json`` installs the library.
"""

from __future__ import annotations

import json
import re
import threading
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamakv.binding import arguments
from pyllamakv.errors import NoTokenAllowed, SchemaError, ToolMissing, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from pyllamakv.runtime.parts import ModelParts


#: White space of a document, as `json.dumps` writes it. With any white space allowed, models write
#: blanks without end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Precedes the bytes of a control token, so that no text of a document can match it.
_CONTROL = b"\xff"
#: Precedes a text in a tokenization; no usual token contains it.
_BEFORE = b"\x02"


def compile_tokens(model: ModelParts) -> Any:
    """Return the vocabulary of a model as llguidance reads it; about a second for 128k tokens.

    Raises ToolMissing if llguidance is not installed, and Unsupported without a vocabulary.
    """
    llguidance, words = _library(), Vocabulary(model)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=words.ends or None)


#: Keywords whose values are data and no schemas.
_DATA = frozenset(("const", "default", "enum", "examples"))
#: Maximum of `expanded_size`, and of the parts of a schema in which an error is looked for.
MAX_PATTERN, _MAX_PARTS = 100_000, 1000
#: Maximum depth of nested values in a schema, that of llguidance's parser.
_MAX_DEPTH = 127
#: llguidance recurses along references: about 200 bytes of stack per byte of a schema with a chain
#: of them. A schema above this size is compiled on a thread with such a stack.
_SMALL, _STACK_PER_BYTE = 8192, 1024
_STACK_SIZE_LOCK = threading.Lock()
#: The error of an object that llguidance reports in place of that of its property.
_REQUIRED = re.compile(r"required property '(.*)' is unsatisfiable")
#: The parts of a regular expression whose number counts. A class without an end extends to the end,
#: and names have a limit: otherwise, the search would be quadratic in the length.
_ATOMS = re.compile(
    r"(?P<times>\{\d+(?:,\d*)?\})|(?P<open>\((?:\?(?:P?<[^>]{0,64}>|[^:)]{0,64}:))?)|(?P<close>\))"
    r"|(?P<free>[*+?|^$])|(?P<atom>\\[pPxu]\{[^}]{0,64}\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|.)",
    re.DOTALL,
)


class Vocabulary:
    """The attributes and the call that llguidance requires of a tokenizer."""

    def __init__(self, model: ModelParts) -> None:
        if not model.info.has_vocab:
            raise Unsupported(
                "this model has no vocabulary: a JSON schema needs text", "vocabulary"
            )

        # In one call, which a worker answers at once.
        def ask(operation: str, *more: Any) -> list[Any]:
            ids = range(model.info.n_vocab)
            return model.native.many([(operation, (model.handle, i, *more)) for i in ids])

        # Without ``special``, a control token has no text.
        pairs = zip(ask("token_piece", True), ask("token_piece", False), strict=True)
        self.tokens = [whole if plain else _CONTROL + whole for whole, plain in pairs]
        self.ends = [token for token, end in enumerate(ask("token_is_eog")) if end]
        if not self.ends and not 0 <= model.info.token_eos < len(self.tokens):
            raise Unsupported(
                "this model has no end token: a JSON schema needs one", "end of generation"
            )
        self.eos_token_id = self.ends[0] if self.ends else model.info.token_eos
        self.bos_token_id = model.info.token_bos if model.info.token_bos >= 0 else None
        # Not the model: it keeps this object, in a cycle that the collector of Python cannot see.
        self._native, self._owner = model.native, model.owner
        self._before = self._tokenize(_BEFORE)

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens with exactly the bytes of ``text``, which llguidance requires."""
        found = self._tokenize(text)
        if self._bytes(found) != text:
            # SentencePiece adds a space at the start of a text, which is no start here.
            found = self._tokenize(_BEFORE + text)[len(self._before) :]
        return found if self._bytes(found) == text else self._longest(text)

    def _tokenize(self, text: bytes) -> list[int]:
        return self._native.tokenize(self._owner.raw, text, False, False)

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens)

    def _longest(self, text: bytes) -> list[int]:
        """Return the longest token that begins a text, then that of the rest, and so on."""
        ids = {word: token for token, word in enumerate(self.tokens)}
        found: list[int] = []
        while text:
            fitting = (n for n in range(len(text), 0, -1) if text[:n] in ids)
            n = next(fitting, 0)
            if not n:
                break  # no token has this byte
            found.append(ids[text[:n]])
            text = text[n:]
        return found


class SchemaProcessor:
    """Exclude tokens that cannot continue a JSON document; a `LogitsProcessor`.

    After a complete document, only end-of-generation tokens remain. Raises SchemaError, with the
    path and the pattern at fault, if the schema is invalid, has unsupported keywords, or cannot be
    met.
    """

    def __init__(self, model: ModelParts, schema: Mapping[str, Any] | str) -> None:
        llguidance, text = _library(), schema_text(schema)
        try:
            document = json.loads(text)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_LAYOUT)
        except RecursionError as error:
            raise _too_deep() from error
        except ValueError as error:
            if "recursion limit exceeded" in str(error):
                raise _too_deep() from error
            raise SchemaError(f"the JSON schema is invalid: {error}") from error
        _check_patterns(document)
        tokens = model.schema_tokens

        def compile_schema() -> Any:
            matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
            if matcher.is_error():
                raise _located(tokens, document, _reason(matcher))
            return matcher

        self._matcher = _with_stack(len(text), compile_schema)
        self._ends = list(tokens.eos_tokens)
        self._seen: list[int] = []

    def __call__(self, tokens: list[int], logits: NDArray[np.float32]) -> None:
        """Set the logits (n_vocab,) of tokens that may not follow ``tokens`` to -inf."""
        if tokens[: len(self._seen)] != self._seen:
            self._matcher.reset()
            self._seen = []
        new = tokens[len(self._seen) :]
        self._seen = list(tokens)
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        allowed = np.zeros(len(logits), dtype=np.bool_)
        if self._matcher.is_stopped():
            allowed[self._ends] = True
        else:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: len(logits)]
            allowed[: len(bits)] = bits
        # A matcher that exceeds a limit stops as at the end of a document, and never recovers.
        if self._matcher.is_error():
            raise NoTokenAllowed(f"the JSON schema cannot be continued: {_reason(self._matcher)}")
        logits[~allowed] = -np.inf


def _reason(matcher: Any) -> str:
    """Return the error of a matcher in one line, without its state and the text of a pattern."""
    text: str = matcher.get_error()
    lines = text.partition("\n<state>")[0].strip().splitlines()
    more = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join((lines[0], *more))


def _parts(document: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas in a schema with their JSON pointers, an outer one before its parts.

    A pattern of ``patternProperties`` is the schema of a text.
    """
    left = [("", document)]
    while left:
        path, value = left.pop()
        if isinstance(value, list):
            left += [(f"{path}/{i}", each) for i, each in enumerate(value)]
        if not isinstance(value, dict):
            continue
        yield path, value
        if path.endswith("/patternProperties"):
            for pattern in value:
                yield f"{path}/{_escaped(pattern)}", {"type": "string", "pattern": pattern}
        left += [
            (f"{path}/{_escaped(key)}", each) for key, each in value.items() if key not in _DATA
        ]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _located(tokens: Any, document: Any, reason: str) -> SchemaError:
    """Return the error of a schema, with the smallest part that has the same error alone."""
    matcher, shared = _library().LLMatcher, {}
    if isinstance(document, dict):
        shared = {key: document[key] for key in ("$defs", "definitions") if key in document}

    def reason_of(part: Any) -> str | None:
        if not isinstance(part, dict):
            return None
        try:
            text = json.dumps({**shared, **part})
            grammar = matcher.grammar_from_json_schema(text, defaults=_LAYOUT)
        except ValueError:
            return None
        alone = matcher(tokens, grammar, log_level=0)
        return _reason(alone) if alone.is_error() else None

    place, part, why = "", document, reason
    for path, each in islice(_parts(document), _MAX_PARTS):
        if path.count("/") < place.count("/"):
            continue
        found = reason_of(each)
        if found == why:
            place, part = path, each
            if (required := _REQUIRED.search(why)) and required[1] in each.get("properties", ()):
                # The error of the object hides that of the property.
                why = reason_of(each["properties"][required[1]]) or why
    pattern = part.get("pattern", "") if isinstance(part, dict) else ""
    msg = f"the JSON schema cannot be used: {reason if why == reason else f'{reason}: {why}'}"
    if pattern:
        msg += f": pattern {arguments.shown(pattern)}"
    return SchemaError(msg + (f", at {place}" if place else ""), path=place, pattern=pattern)


def _check_patterns(document: Any) -> None:
    """Raise SchemaError for a pattern whose repetitions make too many copies.

    llguidance expands them: 1,000,000 copies took 5 seconds, and then no token was allowed.
    """
    for path, part in _parts(document):
        pattern = part.get("pattern")
        if isinstance(pattern, str) and expanded_size(pattern) > MAX_PATTERN:
            msg = (
                f"the repetitions of pattern {arguments.shown(pattern)} make more than "
                f"{MAX_PATTERN} copies, at {path or '(root)'}: nested repetitions multiply"
            )
            raise SchemaError(msg, path=path, pattern=pattern)


def expanded_size(pattern: str) -> int:
    """Return the number of characters and classes in a regular expression without repetitions.

    ``{m,n}`` counts as n copies, and ``*`` as one.
    """
    sizes, last = [0], 0
    for match in _ATOMS.finditer(pattern):
        kind = match.lastgroup
        if kind == "open":
            sizes.append(0)
            last = 0
        elif kind == "close" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif kind == "times":
            copies = max(1, *(int(n) for n in re.findall(r"\d{1,9}", match[0])))
            sizes[-1] += last * (copies - 1)
            last *= copies
        elif kind == "atom":
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """Return a schema, a mapping or its JSON text, as JSON text."""
    if isinstance(schema, str):
        return arguments.text("json_schema", schema)
    expected = "a JSON schema: a mapping of JSON values, or its text"
    if not hasattr(schema, "items"):
        raise arguments.wrong_type("json_schema", schema, expected)
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except RecursionError as error:
        raise _too_deep() from error
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"the JSON schema has a value that JSON cannot express: {error}"
        ) from error


def _with_stack(length: int, work: Callable[[], Any]) -> Any:
    """Return the result of work on a schema, with a stack that is large enough for its length."""
    if length <= _SMALL:
        return work()
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, name="json schema", daemon=True)
    size = (1 << 20) + length * _STACK_PER_BYTE // 4096 * 4096
    try:
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(size)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
    except (RuntimeError, ValueError) as error:
        msg = (
            f"a JSON schema of {length} characters needs a stack of {size} bytes: use a smaller one"
        )
        raise SchemaError(msg) from error
    thread.join()
    value, raised = results[0]
    if raised is not None:
        raise raised
    return value


def _too_deep() -> SchemaError:
    nested = f"the JSON schema has more than {_MAX_DEPTH} nested arrays and objects"
    return SchemaError(f"{nested}: use `$defs` and `$ref`")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        msg = "a JSON schema needs llguidance: pip install 'pyllamakv[json]'"
        raise ToolMissing(msg, "llguidance", "pip install 'pyllamakv[json]'") from None
    return llguidance
