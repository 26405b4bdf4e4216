"""Define the bodies of requests: their fields, types and meaning.

Names are those of the OpenAI API, and of llama-server for what OpenAI does not have. A field that
is not listed here is refused. Ranges of sampler parameters are checked by `SamplerParams`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pyllamakv.binding.protocol import SamplerParams
from pyllamakv.errors import GrammarError, KvError, NoTokenAllowed, SchemaError, UsageError
from pyllamakv.serve.engine import InvalidField

#: Fields of OpenAI's API that are refused, and the values with which they request nothing.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "refusal": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
#: Fields of a request -> the parameters of `SamplerParams` with other names.
_RENAMED: Final = {
    "dry_sequence_breakers": "dry_breakers",
    "frequency_penalty": "penalty_freq",
    "presence_penalty": "penalty_present",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "penalty_repeat",
}
#: Names of samplers in llama-server that differ.
_SAMPLERS: Final = {"typ_p": "typical_p"}

_INT32 = 2**31 - 1

# Limits of what a body may contain. The size of a body limits prompts and the texts of messages.
_MAX_FIELDS: Final = 100
_MAX_NAME: Final = 1 << 12
_MAX_GRAMMAR: Final = 256 << 10  # the shim's, in bytes
_MAX_VALUES: Final = 10_000  # of a JSON schema, or of the variables of a template
_MAX_TOKENS: Final = 1 << 20
_MAX_PROMPTS: Final = 1 << 12
_MAX_MESSAGES: Final = 1 << 12
_MAX_PARTS: Final = 1 << 10
_MAX_BIASES: Final = 1 << 10  # OpenAI's
_MAX_STOPS: Final = 64
_MAX_STOP: Final = 1 << 10
_MAX_SAMPLERS: Final = 20
# llama.cpp compares each breaker with the whole vocabulary, for each sampler.
_MAX_BREAKERS: Final = 16
_MAX_BREAKER: Final = 64


def _limited_values(data: Any) -> Any:
    """Return a JSON value; refuse one of too many values in all."""
    left, values = _MAX_VALUES, [data]
    while values:
        value = values.pop()
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(inner, str) or not hasattr(inner, "__len__"):
            continue
        left -= len(inner)
        if left < 0:
            raise ValueError(f"more than {_MAX_VALUES} values")
        values.extend(inner)
    return data


def _few_biases(data: Any) -> Any:
    # Before the items are checked: pydantic would report each of an object that is wrong.
    if isinstance(data, dict | list) and len(data) > _MAX_BIASES:
        raise ValueError(f"more than {_MAX_BIASES} biases")
    return data


# As in vLLM, an empty salt is refused: it would share what its sender wanted to separate.
Salt = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]

# Lists report their first error alone, because the report of each takes time and memory.
TokenCount = Annotated[int, Field(ge=0, le=_INT32)]
Name = Annotated[str, Field(max_length=_MAX_NAME)]
Grammar = Annotated[str, Field(max_length=_MAX_GRAMMAR)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_limited_values)]
Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP)]
Stops = Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True)]
Samplers = Annotated[list[Name], Field(max_length=_MAX_SAMPLERS, fail_fast=True)]
Breaker = Annotated[str, Field(max_length=_MAX_BREAKER)]
Breakers = Annotated[list[Breaker], Field(max_length=_MAX_BREAKERS, fail_fast=True)]
Bias = Annotated[list[int | float | bool], Field(max_length=2, fail_fast=True)]
Biases = Annotated[list[Bias], Field(max_length=_MAX_BIASES, fail_fast=True)]
Tokens = Annotated[list[int], Field(max_length=_MAX_TOKENS, fail_fast=True)]
TextPrompts = Annotated[list[str], Field(max_length=_MAX_PROMPTS, fail_fast=True)]
TokenPrompts = Annotated[list[Tokens], Field(max_length=_MAX_PROMPTS, fail_fast=True)]


class FieldUnsupported(ValueError):
    """A field, or a value of one, that OpenAI's API has and this server does not support.

    ``field`` is its name below the object that is checked; None: it is ``name``.
    """

    def __init__(self, name: str, field: str | None = None) -> None:
        super().__init__(f"this server does not support {name}")
        self.field = name if field is None else field


class ApiObject(BaseModel):
    """An object of a request. Null is the same as absent; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        """Remove fields that request nothing, and refuse those that are not supported."""
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"an object has {len(data)} fields, and at most {_MAX_FIELDS}")
        kept = {}
        for name, value in data.items():
            if value is None:
                continue
            neutral = UNSUPPORTED.get(name)
            if neutral is None:
                kept[name] = value
            elif not any(type(value) is type(each) and value == each for each in neutral):
                raise FieldUnsupported(name)
        return kept


class StreamOptions(ApiObject):
    """Options of a stream."""

    include_usage: bool = False


class SchemaFormat(ApiObject):
    """A JSON schema with a name; ``strict`` has no effect, because every schema is enforced."""

    name: Name = ""
    description: Name = ""
    schema_: JsonObject = Field(alias="schema")
    strict: bool = False


class ResponseFormat(ApiObject):
    """The format of a reply: text, any JSON object, or JSON that meets a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: JsonObject | None = Field(None, alias="schema")

    def to_schema(self) -> dict[str, Any] | None:
        """Return the schema that a reply must meet, or None."""
        given = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        if self.type == "json_schema" and given is None:
            msg = "response_format of type json_schema has no json_schema.schema"
            raise InvalidField(msg, "response_format")
        if self.type == "text" and given is not None:
            msg = "response_format of type text has a schema; use type json_schema"
            raise InvalidField(msg, "response_format")
        return given if given is not None or self.type == "text" else {"type": "object"}


class TextPart(ApiObject):
    """A part of a message."""

    type: Name
    text: str = ""

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "text":
            raise FieldUnsupported(kind[:50])
        return data


Parts = Annotated[list[TextPart], Field(max_length=_MAX_PARTS, fail_fast=True)]


class ChatMessage(ApiObject):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, data: Any) -> Any:
        if isinstance(data, dict) and (role := data.get("role")) in ("tool", "function"):
            raise FieldUnsupported(f"the role {role}", "role")
        return data

    def to_template(self) -> dict[str, str]:
        """Return the message for a chat template, which knows no developer and no parts."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": content, **named}


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
]


class GenerationFields(ApiObject):
    """The fields that completions and chats share."""

    #: The field that has the prompt.
    prompt_field: ClassVar[str]

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Stops = []
    max_tokens: TokenCount | None = None
    n_predict: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    json_schema: JsonObject | None = None
    logit_bias: Annotated[dict[str, float] | Biases, BeforeValidator(_few_biases)] = {}
    # vLLM's: prompts with different salts share no cached prefix.
    cache_salt: Salt | None = None
    # Names of the caller for its own purposes, which need no action.
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    # Samplers. The defaults are those of OpenAI; all others are off.
    seed: int | None = None
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Breakers | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    samplers: Samplers | None = None
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _all_are_best(self) -> Self:
        """Refuse a choice of the best texts; the best ``n`` of ``n`` are all of them."""
        if self.best_of not in (None, self.n):
            raise FieldUnsupported("best_of")
        return self

    @property
    def given_limits(self) -> dict[str, int]:
        """Return the fields that limit the number of generated tokens."""
        fields = {"max_tokens": self.max_tokens, "n_predict": self.n_predict}
        return {name: value for name, value in fields.items() if value is not None}

    def limit(self, default: int | None) -> int | None:
        """Return the maximum number of tokens, ``default`` if none is given; None: no limit."""
        given = self.given_limits
        if len(set(given.values())) > 1:
            msg = f"{' and '.join(given)} differ: send one of them"
            raise InvalidField(msg, next(iter(given)))
        value = next(iter(given.values()), default)
        return None if value == -1 else value

    def reply_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that a reply must meet, or None."""
        formatted = None if self.response_format is None else self.response_format.to_schema()
        if formatted is not None and self.json_schema is not None:
            msg = "response_format and json_schema both have a schema: send one of them"
            raise InvalidField(msg, "json_schema")
        found = formatted if formatted is not None else self.json_schema
        if found is not None and self.grammar is not None:
            msg = "a schema and grammar both restrict the text: send one of them"
            raise InvalidField(msg, "grammar")
        return found

    def param_of(self, error: KvError) -> str | None:
        """Return the field that an error of a generation is about; None if it is about none."""
        if isinstance(error, NoTokenAllowed) and self.logit_bias:
            # A grammar or a schema alone allows some token, unless the text met all of it.
            return "logit_bias"
        if isinstance(error, GrammarError | SchemaError | NoTokenAllowed):
            if self.grammar is not None:
                return "grammar"
            return "json_schema" if self.json_schema is not None else "response_format"
        if not isinstance(error, UsageError):
            return None
        param = error.param if isinstance(error, InvalidField) else "prompt"
        return self.prompt_field if param == "prompt" else param

    def sampler_params(self, n_ctx: int) -> SamplerParams:
        """Return the parameters of the sampler; ``n_ctx`` replaces -1 as a number of tokens.

        Raises InvalidField for a value out of range, and for contradictions.
        """
        found: dict[str, Any] = {"logit_bias": self._biases()}
        for name in _SAMPLER_FIELDS & self.model_fields_set | {"temperature"}:
            found[_RENAMED.get(name, name)] = getattr(self, name)
        for name in ("penalty_last_n", "dry_penalty_last_n"):
            if found.get(name) == -1:
                found[name] = n_ctx
        if (seed := found.get("seed")) is not None:
            # OpenAI's seeds have 64 bits; llama-server's -1 requests a random one.
            found["seed"] = None if seed == -1 else seed % (2**32 - 1)
        if found.get("top_n_sigma", 0) < 0:
            found["top_n_sigma"] = 0.0
        if self.samplers is not None:
            found["samplers"] = tuple(_SAMPLERS.get(each, each) for each in self.samplers)
        try:
            return SamplerParams(**found)
        except UsageError as error:
            raise _as_sent(error) from error

    def _biases(self) -> dict[int, float]:
        """Return tokens with biases; OpenAI's -100, and false, exclude a token."""
        bias = self.logit_bias
        found: dict[int, float] = {}
        for pair in bias.items() if isinstance(bias, dict) else bias:
            token, value = pair if len(pair) == 2 else (None, None)
            number = int(token) if isinstance(token, str) and _is_number(token) else token
            if type(number) is not int or value is None or value is True:
                raise InvalidField("logit_bias must map token numbers to numbers", "logit_bias")
            excludes = value is False or value <= -100
            try:
                found[number] = float("-inf") if excludes else float(value)
            except OverflowError:
                msg = f"the bias of token {number} is too large a number"
                raise InvalidField(msg, "logit_bias") from None
        return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _as_sent(error: UsageError) -> UsageError:
    """Return an error of `SamplerParams` with the names of the request, of which one is first."""
    message = str(error)
    for sent, own in _RENAMED.items():
        message = re.sub(rf"\b{own}\b", sent, message)
    named = (word for word in re.findall(r"\w+", message) if word in GenerationFields.model_fields)
    param = next(named, None)
    return error if param is None else InvalidField(message, param)


_SAMPLER_FIELDS: Final = frozenset(GenerationFields.model_fields) & (
    frozenset(SamplerParams.__dataclass_fields__) | frozenset(_RENAMED)
) - {"logit_bias", "samplers"}


class TextRequest(GenerationFields):
    """The body of a completion: prompts as text or tokens."""

    prompt_field = "prompt"

    prompt: str | Tokens | TextPrompts | TokenPrompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, at least one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidField("prompt is an empty list", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt


class ChatRequest(GenerationFields):
    """The body of a chat completion."""

    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: JsonObject = {}

    @property
    def given_limits(self) -> dict[str, int]:
        """Return the fields that limit the number of generated tokens."""
        given = super().given_limits
        if self.max_completion_tokens is not None:
            given["max_completion_tokens"] = self.max_completion_tokens
        return given

    @property
    def n_logprobs(self) -> int | None:
        """Return the number of most likely tokens of each token; None: no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("top_logprobs requires logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class PinRequest(ApiObject):
    """A prefix to evaluate and to protect from eviction: a prompt, or the messages of a chat."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    prompt: str | Tokens | None = None
    messages: Messages | None = None
    cache_salt: Salt | None = None

    def param_of(self, error: UsageError) -> str:
        """Return the field that an error of `Engine.pin` is about."""
        if isinstance(error, InvalidField):
            return error.param
        return "prompt" if self.messages is None else "messages"


class UnpinRequest(ApiObject):
    """The name of a pinned prefix."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
