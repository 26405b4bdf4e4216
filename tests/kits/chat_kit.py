"""Cases for chat templates, and the texts that transformers renders for them.

The templates in ``tests/data/chat_templates`` were written for these tests, with the constructs
that the families of models use. ``python tests/kits/chat_kit.py`` writes ``expected.json`` beside
them, also for the template of the fetched SmolLM2. It requires transformers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
EXPECTED = FOLDER / "expected.json"

#: The variables for special tokens.
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather at a place & time <now>.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "unit": {"type": "string", "enum": ["°C", "°F"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["place"],
        },
    },
}
_ASKED = {"role": "user", "content": "Is it warm in Zürich?"}
_CALL = {"function": {"name": "get_weather", "arguments": {"place": "Zürich", "unit": "°C"}}}

#: Name of a case -> messages and further arguments.
CASES: dict[str, dict[str, Any]] = {
    "question": {"messages": [{"role": "user", "content": "Hello"}]},
    "closed": {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}],
        "add_generation_prompt": False,
    },
    "system": {
        "messages": [
            {"role": "system", "content": "Be kind.\n"},
            {"role": "user", "content": "Who?"},
        ]
    },
    "turns": {
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": " Two\n"},
            {"role": "user", "content": "Three  "},
        ]
    },
    "characters": {
        "messages": [{"role": "user", "content": "<b>\"é\" & '日本'</b>\n\t{{ 7 * 7 }} {% x %} 🙂"}]
    },
    "tools": {
        "messages": [
            _ASKED,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"temperature": 21.5}'},
        ],
        "tools": [_TOOL],
    },
    "calls": {
        "messages": [_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]}],
        "tools": [_TOOL, _TOOL],
        "add_generation_prompt": False,
    },
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Look."}]},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What? "}]},
        ]
    },
    "order": {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    "variables": {
        "messages": [{"role": "user", "content": "Hello"}],
        "enable_thinking": False,
        "effort": "high",
        "documents": [{"title": "One"}],
    },
}
#: Variables of every case: a text with the date of today cannot be compared.
_FIXED = {"date_string": "26 Jul 2024"}


def templates() -> dict[str, str]:
    """Return the templates by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}


def arguments(case: str) -> dict[str, Any]:
    """Return the arguments of a case for `Model.apply_chat_template`."""
    return {"add_generation_prompt": True, **_FIXED, **CASES[case]}


def rendered(template: str, case: str) -> dict[str, str]:
    """Return the text or the error of transformers."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"tools": None, "documents": None, **arguments(case), **TOKENS}
    messages = given.pop("messages")
    try:
        texts, _ = render_jinja_template([messages], chat_template=template, **given)
    except (TemplateError, TypeError) as error:
        return {"error": str(error)}
    return {"text": texts[0]}


def digest(found: dict[str, str]) -> dict[str, str]:
    """Return a result with the sha256 of its text instead of the text."""
    if "text" not in found:
        return found
    return {"sha256": hashlib.sha256(found["text"].encode()).hexdigest()}


def main() -> None:
    """Write the expected texts."""
    from transformers import __version__

    from pyllamakv import models
    from pyllamakv.runtime.gguf_file import check_file

    smollm2 = check_file(models.find("smollm2-135m")).meta["tokenizer.chat_template"]
    every = {**templates(), "smollm2-135m": smollm2}
    found = {name: {case: rendered(text, case) for case in CASES} for name, text in every.items()}
    # The texts of a foreign template contain parts of it.
    found["smollm2-135m"] = {case: digest(each) for case, each in found["smollm2-135m"].items()}
    text = json.dumps(
        {"transformers": __version__, "expected": found}, ensure_ascii=False, indent=1
    )
    EXPECTED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
