"""Turn the messages of a chat into the text that a model was trained on.

The template is Jinja, from the model file or the caller. `template_worker` renders it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pyllamakv.binding import arguments
from pyllamakv.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyllamakv.runtime.parts import ModelParts


#: Metadata of the template, and of another one that some models have for calls of tools.
KEY: Final = "tokenizer.chat_template"
TOOL_KEY: Final = f"{KEY}.tool_use"

#: Variable of transformers -> the metadata of its token.
_SPECIAL: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def special_tokens(model: ModelParts) -> dict[str, str]:
    """Return the special tokens that a template may use, by variable, as text."""
    ids = {"bos_token": model.info.token_bos, "eos_token": model.info.token_eos}
    for name, key in _SPECIAL.items():
        value = model.meta(key)
        if value is not None and value.isdecimal():
            ids[name] = int(value)
    known = range(model.info.n_vocab)
    return {
        name: model.detokenize([token], special=True)
        for name, token in ids.items()
        if token in known
    }


def render(
    model: ModelParts,
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: Iterable[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    template: str | None,
    variables: Mapping[str, Any],
) -> str:
    """Return the text of messages; `Model.apply_chat_template` describes it."""
    given = check_messages(messages)
    listed = None if tools is None else _check_tools(tools)
    if template is None:
        template = (model.meta(TOOL_KEY) if listed else None) or model.chat_template
        if template is None:
            msg = "the model file has no chat template; pass one as template="
            raise Unsupported(msg, "chat_template")
    arguments.text("template", template)
    values = {
        **special_tokens(model),
        "documents": None,
        **variables,
        "messages": given,
        "tools": listed,
        "add_generation_prompt": arguments.flag("add_generation_prompt", add_generation_prompt),
    }
    for name, value in values.items():
        _check_json(name, value)
    from pyllamakv.runtime import template_process

    return template_process.shared().render(template, values)


def check_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat as dictionaries.

    Raises ArgumentTypeError or UsageError with the index of the message and the key at fault.
    """
    found = []
    for i, message in enumerate(arguments.items("messages", messages, "a list of messages")):
        name = f"messages[{i}]"
        if not isinstance(message, Mapping):
            expected = "a mapping such as {'role': 'user', 'content': 'Hello'}"
            raise arguments.wrong_type(name, message, expected)
        if "role" not in message:
            raise UsageError(f"{name} has no 'role', such as 'user', 'assistant' or 'system'")
        arguments.text(f"{name}['role']", message["role"])
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            expected = "text, a list of parts, or None"
            raise arguments.wrong_type(f"{name}['content']", content, expected)
        found.append(dict(message))
    if not found:
        raise UsageError("messages is empty: a chat has at least one message")
    return found


def _check_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    listed = arguments.items("tools", tools, "a list of tools, or None")
    for i, tool in enumerate(listed):
        if not isinstance(tool, Mapping):
            expected = "a mapping: a function with its JSON schema"
            raise arguments.wrong_type(f"tools[{i}]", tool, expected)
    return [dict(each) for each in listed]


def _check_json(name: str, value: Any) -> None:
    """Raise UsageError unless JSON can express a value: the template is in another process."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} must consist of JSON values: {error}") from error
