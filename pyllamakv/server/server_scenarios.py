"""The server scenarios: clients over HTTP against llama-server, stock and patched."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllamakv.errors import (
    PromptTooLong,
    RequestFailed,
    ScenarioFailed,
    ServerDied,
    Unsupported,
    Untestable,
)
from pyllamakv.server.server_client import ServerClient, package
from pyllamakv.server.server_lab import (
    CLIENTS,
    MODELS,
    NOT_ASCII,
    SLOT,
    CompletionRequest,
    ServerLab,
    answered,
    answers,
    complete,
    first_difference,
    in_parallel,
    largest_change,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pyllamakv.scenarios.outcome import Kind
    from pyllamakv.server.server_client import ServerCompletion
    from pyllamakv.server.server_process import ServerProcess

#: Seconds until a cancelled request must have left its slot.
_IDLE = 60.0

#: Seconds until a chat must be answered.
_CHAT = 120.0

#: Seconds until a request with tools must be answered: the server fills the memory meanwhile.
_TOOLS = 20.0

#: Seconds in which the log of a batch follows its answer: a thread of the server writes it.
_LOGGED = 0.2

#: Turns of a conversation; tokens that a turn adds to the prompt, at least and at most; tokens of
#: an answer. They fit into a slot.
_TURNS = 3
_TURN = (100, 128)
_ANSWER = 12

#: Cells of a cache that four clients exceed with requests that fit alone, and of one that a request
#: outgrows; lengths of prompts and answers of the former, at least and at most.
_FEW_CELLS = 1024
_FEWER_CELLS = 512
_PROMPT_LENGTHS = (40, 400)
_ANSWER_LENGTHS = (40, 240)

#: Cells of a cache whose half takes more than a MiB with the model "sliding"; length of two prompts
#: that leave few of them, and of answers that do not fit into the rest.
_MANY_CELLS = 2048
_HALF = _MANY_CELLS * 15 // 32
_QUARTER = _MANY_CELLS // 4
#: JSON schemas that no grammar enforces, with the part to name in the error. Stock hangs at the
#: last ones, and ignores the pattern of the others.
_BAD_SCHEMAS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "string", "pattern": r"^hello\!$"}, "#/pattern"),
    (
        {"type": "object", "properties": {"a/b": {"type": "string", "pattern": "[a-z]+"}}},
        "#/properties/a~1b/pattern",
    ),
    ({"type": "array", "items": {"type": "string", "pattern": "^(?=a)a$"}}, "#/items/pattern"),
    ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a$|b"}]}, "#/anyOf/1/pattern"),
    ({"type": "integer", "minimum": 7, "maximum": 6}, "#: minimum"),
    ({"type": "string", "pattern": "^a{2,1}$"}, "#/pattern"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "#: minLength"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "#: minItems"),
    # Upstream converts this bound to [0-9]{17,15}.
    ({"type": "integer", "minimum": 10**17}, "{17,"),
    (
        {"anyOf": [{"$ref": "#/a"}], "a": {"type": "string", "minLength": 2, "maxLength": 1}},
        "#/a: minLength",
    ),
)

#: A grammar whose repetition has its maximum in another line, and one with literals like it.
_BAD_GRAMMARS = ('root ::= [{] "{2,1}" "a"{2,1}', 'root ::= ("a"{2, # {\n1})')

#: Schemas with a pattern that every string matches, and with one that nothing refers to.
_LOOSE_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "string", "pattern": ".*"},
    {"type": "boolean", "$defs": {"a": {"type": "string", "pattern": "b"}}},
)

#: Requests whose format cannot be enforced, or not with the rest of the request, with the part to
#: name in the error. Stock ignores the format.
_BAD_REQUESTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"json_schema": {"type": "null"}, "grammar": 'root ::= "a"'}, "json_schema and grammar"),
    ({"grammar": {"type": "null"}}, "grammar must be a string"),
    ({"response_format": "json_object"}, "response_format type"),
    ({"response_format": {"schema": {"type": "null"}}}, "response_format type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "no schema"),
    (
        {
            "response_format": {"type": "json_object", "schema": {"type": "null"}},
            "json_schema": {"type": "boolean"},
        },
        "json_schema and response_format",
    ),
)

#: A JSON schema that a grammar enforces, and what its answers match.
_GOOD_SCHEMA = {"type": "string", "pattern": "^(ab|cd){2,3}$"}
_GOOD_TEXT = re.compile('"(ab|cd){2,3}"')

#: The begin of a completion and of a chat.
_PROMPT: dict[str, Any] = {"prompt": "a", "n_predict": 16, "temperature": 0}
_CHAT_REQUEST: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 16,
    "temperature": 0,
}

#: Parameters of a tool that a grammar repeats without end, with the part to name in the error.
#: Stock hangs at each until the memory is full. Other patterns accept any string.
_BAD_PARAMETERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "string", "pattern": "^a{2,1}$"}, "{2,1}"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "{3,2}"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "{2,1}"),
)
_LOOSE_PARAMETER = {"type": "string", "pattern": "[a-z]+"}

#: A chat template from which the server derives a grammar of tool calls.
_TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Bytes at the end of a slot file that server-safety writes.
_SEAL = 32

#: The metrics of the patch server-park.
_PARKS = "llamacpp:parks_total"
_PARK_FAILURES = "llamacpp:park_failures_total"
_PARKED = ("llamacpp:parked_slots", "llamacpp:parked_bytes")

#: Upstream's metric of generated tokens.
_GENERATED = "llamacpp:tokens_predicted_total"

#: Metrics of the patch server-metrics: of moves, and of searches for cells.
_MOVES = tuple(
    f"llamacpp:kv_defragmentation{what}_total" for what in ("s", "_moves", "_cells", "_bytes")
)
_SEARCHES = "llamacpp:kv_slot_searches_total"
_FAILURES = "llamacpp:kv_slot_failures_total"
_REPEATED = "llamacpp:kv_decode_retries_total"


@dataclass(frozen=True)
class ServerScenario:
    """A claim about a server, and the run that verifies it with ``packages`` of the extra.

    Only ``patch`` of the server claims it; empty: the whole series does.
    """

    id: str
    kind: Kind
    claim: str
    run: Callable[[ServerLab], None]
    packages: tuple[str, ...] = ("httpx",)
    patch: str = ""


def _prompt_lengths(lab: ServerLab, count: int, most: float = 0.8) -> list[int]:
    """Return random lengths between a tenth and ``most`` of a slot."""
    return [lab.random.randint(SLOT // 10, int(SLOT * most)) for _ in range(count)]


def _context_shift(lab: ServerLab) -> None:
    """Send requests whose answers outgrow their slots."""
    with lab.server(shift=True) as server:
        with ServerClient(server.url) as client:
            requests = [
                CompletionRequest(
                    lab.prompt(client, length), SLOT - length + lab.random.randint(1, SLOT // 2)
                )
                for length in _prompt_lengths(lab, 40)
            ]
        found = answers(server, requests, CLIENTS)
        lab.note(requests=len(found), shifted=sum(each.truncated for each in found))
        short = sum(
            len(each.tokens) != request.n_predict
            for each, request in zip(found, requests, strict=True)
        )
        if short:
            raise ScenarioFailed(f"{short} of {len(found)} answers are too short", failure="lost")
        _refuse_retries(lab, server)


def _parallel(lab: ServerLab) -> None:
    """Send long and short prompts that fit; compare with a single client."""
    with lab.server("--metrics") as server:
        with ServerClient(server.url) as client:
            prompts = [lab.prompt(client, length) for length in _prompt_lengths(lab, 48)]
        requests = [
            CompletionRequest(prompt, lab.random.randint(8, min(192, SLOT - len(prompt) - 8)))
            for prompt in prompts
        ]
        alone = answers(server, requests, 1)
        together = answers(server, requests, CLIENTS)
        lab.note(requests=len(requests) * 2)
        _refuse_other_text(lab, alone, together)
        _compare_metrics(server, [*alone, *together])
        if "server-metrics" in lab.built.manifest.server_patches:
            _compare_searches(server)
        _refuse_retries(lab, server)


def _conversations(
    lab: ServerLab, server: ServerProcess
) -> list[tuple[CompletionRequest, ServerCompletion]]:
    """Return the turns of a conversation per slot, held at the same time.

    A turn repeats the prompt and the answer before it, which the server has cached, and adds to
    them. It begins when all conversations have had the turn before.
    """

    def ask(client: ServerClient, slot: int) -> ServerCompletion:
        return complete(client, prompts[slot], _ANSWER, id_slot=slot)

    turns: list[tuple[CompletionRequest, ServerCompletion]] = []
    prompts: list[tuple[int, ...]] = [()] * CLIENTS
    with ServerClient(server.url) as client:
        for _ in range(_TURNS):
            for slot in range(CLIENTS):
                prompts[slot] += lab.prompt(client, lab.random.randint(*_TURN))
            asked = [CompletionRequest(prompt, _ANSWER) for prompt in prompts]
            found = answered(in_parallel(server.url, range(CLIENTS), CLIENTS, ask))
            turns += zip(asked, found, strict=True)
            for slot, each in enumerate(found):
                prompts[slot] += each.tokens
    return turns


def _sliding_window(lab: ServerLab) -> None:
    """Hold conversations with a sliding-window model; compare with prompts that are not cached."""
    # A turn is several micro-batches, and the windows of all slots leave no cell for the next one.
    with lab.server("-b", str(SLOT), "-ub", "32", model="sliding", one_cache=True) as server:
        turns = _conversations(lab, server)
        alone = _compare_with_uncached(lab, server, turns)
        # A few cells that are missing in a window change probabilities before they change a text.
        changes = [largest_change(one, found) for one, (_, found) in zip(alone, turns, strict=True)]
        changed = sum(change > lab.tie for change in changes)
        lab.note(changed=changed)
        if changed:
            raise ScenarioFailed(
                f"in {changed} of {len(turns)} answers, the margin of a token differs from that of "
                f"a single client by up to {max(changes):.2f}",
                failure="data",
            )
        # Not a defect here: the cache of the windows has fewer cells than a batch has tokens.
        lab.note(retries=_retries(server))


def _hybrid(lab: ServerLab) -> None:
    """Hold conversations with a hybrid model, which reuses its states, and go back in them."""
    with lab.server(model="hybrid") as server, ServerClient(server.url) as client:
        turns = _conversations(lab, server)
        for index, (_, found) in enumerate(turns[CLIENTS:], CLIENTS):
            if not found.reused:
                raise ScenarioFailed(f"turn {index // CLIENTS} of a conversation reused no token")
        for slot, (request, _) in enumerate(turns[CLIENTS : 2 * CLIENTS]):
            # The state after this prompt is gone, unless the server keeps checkpoints.
            again = complete(client, request.prompt, request.n_predict, id_slot=slot)
            turns.append((request, again))
        _compare_with_uncached(lab, server, turns)
        _refuse_retries(lab, server)


def _sparse(lab: ServerLab) -> None:
    """Free the cells of all slots but one, and use them again; the answers stay the same."""
    options = ["--defrag-thold", "0.1"] if "--defrag-thold" in lab.flags else []
    with (
        lab.folder() as folder,
        lab.server("--slot-save-path", f"{folder}/", *options, one_cache=True) as server,
        ServerClient(server.url) as client,
    ):
        turns: list[tuple[CompletionRequest, ServerCompletion]] = []

        def ask(slot: int, prompt: tuple[int, ...], n_predict: int) -> tuple[int, ...]:
            found = complete(client, prompt, n_predict, id_slot=slot)
            turns.append((CompletionRequest(prompt, n_predict), found))
            return prompt + found.tokens

        for kept in range(CLIENTS):
            others = [slot for slot in range(CLIENTS) if slot != kept]
            prompts = {slot: lab.prompt(client, SLOT - 64) for slot in others}
            for slot in others:
                ask(slot, prompts[slot], 1)
            begun = ask(kept, lab.prompt(client, SLOT // 8), SLOT // 4)
            for slot in others:
                client.post(f"/slots/{slot}?action=erase", {})
            ask(kept, begun, SLOT // 4)
            for slot in others:
                ask(slot, prompts[slot], 16)
        _compare_with_uncached(lab, server, turns)
        _refuse_retries(lab, server)


def _threshold(lab: ServerLab) -> None:
    """Leave used cells at the end of the cache; a threshold moves them, and 0 does not."""
    manifest = lab.built.manifest
    known = "--defrag-thold" in lab.flags
    if not known and not manifest.patches:
        raise Unsupported("the server has no option --defrag-thold", "server")
    if manifest.patches:
        # No patch claims a feature that the release and the applied patches do not have.
        if not known:
            raise Untestable("the server has no option --defrag-thold")
        if {"compaction", "full-defrag"}.isdisjoint(manifest.patches):
            raise Untestable("no patch that moves cells is applied")
        if "server-metrics" not in manifest.server_patches:
            raise Untestable("the patch server-metrics, which counts the moves, is not applied")
    for threshold in ("0", "0.2"):
        with (
            lab.folder() as folder,
            # Thresholds apply if attention visits at least 2,048 cells.
            lab.server(
                "--metrics",
                "--slot-save-path",
                f"{folder}/",
                "--defrag-thold",
                threshold,
                slots=CLIENTS + 1,
                one_cache=True,
            ) as server,
            ServerClient(server.url) as client,
        ):
            turns = _leave_sparse(lab, client, CLIENTS + 1)
            metrics = client.metrics()
            if _MOVES[0] not in metrics:
                raise Unsupported(f"the server has no metric {_MOVES[0]}", "server")
            lab.note(defragmentations=int(metrics[_MOVES[0]]))
            for name in _MOVES:
                if bool(metrics.get(name)) != (threshold != "0"):
                    raise ScenarioFailed(
                        f"--defrag-thold {threshold}: {name} is {metrics.get(name)}"
                    )
            _compare_with_uncached(lab, server, turns)
            _refuse_retries(lab, server)


def _leave_sparse(
    lab: ServerLab, client: ServerClient, slots: int
) -> list[tuple[CompletionRequest, ServerCompletion]]:
    """Fill all slots, erase all but the last one, and use two; return these turns."""
    prompts = [lab.prompt(client, SLOT - 8) for _ in range(slots)]
    for slot, prompt in enumerate(prompts):
        complete(client, prompt, 1, id_slot=slot)
    last = slots - 1
    for slot in range(last):
        client.post(f"/slots/{slot}?action=erase", {})
    requests = {last: CompletionRequest(prompts[last], 4)}
    # A server reads its counters before a batch: the batches of this request follow the move.
    requests[0] = CompletionRequest(prompts[0][: SLOT // 8], _ANSWER)
    return [
        (request, complete(client, request.prompt, request.n_predict, id_slot=slot))
        for slot, request in requests.items()
    ]


def _compare_with_uncached(
    lab: ServerLab,
    server: ServerProcess,
    turns: Sequence[tuple[CompletionRequest, ServerCompletion]],
) -> list[ServerCompletion]:
    """Compare answers with those of a single client whose prompts are evaluated completely.

    Returns the answers of that client.
    """
    requests = [request for request, _ in turns]
    alone = answers(server, requests, 1, cache_prompt=False)
    lab.note(requests=2 * len(turns), reused=sum(found.reused for _, found in turns))
    if reused := sum(each.reused for each in alone):
        raise ScenarioFailed(f"{reused} tokens of prompts were reused despite cache_prompt=false")
    _refuse_other_text(lab, alone, [found for _, found in turns])
    return alone


def _refuse_other_text(
    lab: ServerLab, alone: Sequence[ServerCompletion], found: Sequence[ServerCompletion]
) -> None:
    """Raise ScenarioFailed for an answer that a single client does not get."""
    pairs = list(zip(alone, found, strict=True))
    lab.note(other_text=sum(one.tokens != other.tokens for one, other in pairs))
    for index, (one, other) in enumerate(pairs):
        at = first_difference(one, other, lab.tie)
        if at is not None:
            ends = min(len(one.tokens), len(other.tokens))
            message = f"request {index}: token {at} is not that of a single client"
            if at < ends:
                margin = min(one.margins[at], other.margins[at])
                message += f", by a log-probability of {margin:.2f}"
            raise ScenarioFailed(message, failure="data")


def _cancelled(lab: ServerLab) -> None:
    """Disconnect in the middle of answers; the slots become idle and answer as before."""
    with lab.server("--metrics") as server, ServerClient(server.url) as client:
        prompts = [lab.prompt(client, length) for length in _prompt_lengths(lab, 24, most=0.5)]
        requests = [CompletionRequest(prompt, SLOT - len(prompt) - 8) for prompt in prompts]
        check = CompletionRequest(prompts[0], 32)
        (before,) = answers(server, [check], 1)
        counted = client.metrics().get(_GENERATED, 0.0)

        def cancel(one: ServerClient, request: CompletionRequest) -> None:
            one.cancel(request.prompt, request.n_predict, after=3, logit_bias=NOT_ASCII)

        failed = [
            each
            for each in in_parallel(server.url, requests, CLIENTS, cancel)
            if isinstance(each, Exception)
        ]
        if failed:
            raise ScenarioFailed(f"{len(failed)} requests did not start: {failed[0]}")
        if not client.wait_idle(_IDLE):
            raise ScenarioFailed("a cancelled request keeps its slot", failure="hang")
        # Older releases do not count the tokens of cancelled requests; those of all others are.
        generated = client.metrics().get(_GENERATED, math.inf) - counted
        asked = sum(request.n_predict for request in requests)
        if generated > asked / 2:
            raise ScenarioFailed(
                f"{generated:g} of {asked} tokens were generated for cancelled requests"
            )
        (after,) = answers(server, [check], 1)
        lab.note(requests=len(prompts) + 2, cancelled=len(prompts), retries=_retries(server))
        if first_difference(before, after, lab.tie) is not None:
            raise ScenarioFailed("an answer differs after cancelled requests", failure="data")


def _too_long(lab: ServerLab) -> None:
    """Send requests that are longer than a slot, among others that fit."""
    with lab.server() as server, ServerClient(server.url) as client:
        fits = CompletionRequest(lab.prompt(client, SLOT // 4), 16)
        large = CompletionRequest(lab.prompt(client, SLOT + 64), 16)

        def ask(one: ServerClient, request: CompletionRequest) -> int:
            return complete(one, request.prompt, request.n_predict).n_prompt

        found = in_parallel(server.url, [fits, large] * 6, CLIENTS, ask)
        lab.note(requests=len(found), refused=sum(isinstance(e, PromptTooLong) for e in found))
        lab.note(retries=_retries(server))
        for index, result in enumerate(found):
            if isinstance(result, ScenarioFailed):
                raise result
            if index % 2 and not isinstance(result, PromptTooLong):
                raise ScenarioFailed(f"a request longer than its slot was not refused: {result!r}")
            if not index % 2 and result != len(fits.prompt):
                raise ScenarioFailed(f"a request that fits was not answered: {result!r}")


def _slot_files(lab: ServerLab) -> None:
    """Reuse a prompt, save its slot, restore it into another slot; the answers are equal."""
    with (
        lab.folder() as folder,
        lab.server("--slot-save-path", f"{folder}/") as server,
        ServerClient(server.url) as client,
    ):
        prompts = [lab.prompt(client, SLOT // 2) for _ in range(CLIENTS)]
        # Slots that grow alternately leave scattered cells in the cache.
        for part in (4, 2, 1):
            for slot, prompt in enumerate(prompts):
                complete(client, prompt[: len(prompt) // part], 1, id_slot=slot)
        expected = complete(client, prompts[0], 32, id_slot=0)
        lab.note(reused=expected.reused)
        if expected.reused < len(prompts[0]) - 1:
            raise ScenarioFailed(
                f"a repeated prompt of {len(prompts[0])} tokens reused {expected.reused}"
            )
        client.post("/slots/0?action=save", {"filename": "slot"})
        client.post("/slots/1?action=erase", {})
        client.post("/slots/1?action=restore", {"filename": "slot"})
        found = complete(client, prompts[0], 32, id_slot=1)
        lab.note(requests=2 + 3 * CLIENTS, restored=found.reused, retries=_retries(server))
        if found.reused < len(prompts[0]) - 1:
            raise ScenarioFailed(f"a restored slot reused {found.reused} tokens", failure="lost")
        if first_difference(expected, found, lab.tie) is not None:
            raise ScenarioFailed("the answer of a restored slot differs", failure="data")


def _require(lab: ServerLab, flag: str) -> None:
    """Raise Untestable for a release without an option."""
    if flag not in lab.flags:
        raise Untestable(f"the server has no option {flag}")


def _reuse(lab: ServerLab) -> None:
    """Send prompts that begin like those of other slots and of cached prompts."""
    _require(lab, "--cache-ram")
    turns: list[tuple[CompletionRequest, ServerCompletion]] = []
    with lab.server() as server, ServerClient(server.url) as client:

        def ask(prompt: tuple[int, ...], slot: int, least: int, what: str) -> tuple[int, ...]:
            found = complete(client, prompt, _ANSWER, id_slot=slot)
            turns.append((CompletionRequest(prompt, _ANSWER), found))
            if found.reused < least:
                raise ScenarioFailed(
                    f"{what}: {found.reused} tokens of the prompt were reused, expected {least} "
                    f"of {len(prompt)}",
                    failure="lost",
                )
            return prompt + found.tokens

        first, other, busy = (lab.prompt(client, SLOT // 2) for _ in range(3))
        ask(first, 0, 0, "the first prompt")
        ask(other, 0, 0, "another prompt")
        half = first[: SLOT // 4]
        ask(half + other[:16], 1, len(half), "an empty slot, and the half of a prompt of slot 0")
        ask(first, 2, len(first) - 1, "an empty slot, and a prompt of which another took a copy")
        # Chats that have more than their half in common share a slot.
        begin = lab.prompt(client, SLOT * 3 // 8)
        chats = [begin + lab.prompt(client, SLOT // 8) for _ in range(3)]
        for least in (0, len(chats[0])):
            for at, chat in enumerate(chats):
                chats[at] = ask(chat, 2, least, "chats that take turns in a slot")
                chats[at] += lab.prompt(client, 8)
        # A busy slot has the start of the prompt.
        with closing(client.stream(busy, SLOT // 3, id_slot=0)) as events:
            next(events)
            ask(busy[:-8] + other[:16], 3, len(busy) - 8, "a prompt that begins like a busy slot's")

        begun = threading.Event()

        def wait(own: ServerClient, request: CompletionRequest) -> ServerCompletion:
            if request.n_predict > _ANSWER:
                return complete(
                    own,
                    request.prompt,
                    request.n_predict,
                    streamed=True,
                    id_slot=0,
                    begun=begun.set,
                )
            # The second one arrives while its slot is busy.
            begun.wait(_IDLE)
            return complete(own, request.prompt, request.n_predict, id_slot=0)

        asked = [CompletionRequest(busy, SLOT // 3), CompletionRequest(first, _ANSWER)]
        turns += zip(asked, answered(in_parallel(server.url, asked, 2, wait)), strict=True)
        _compare_with_uncached(lab, server, turns)


def _mixed(lab: ServerLab) -> None:
    """Hold chats, three with each begin, and unrelated ones at once in two slots."""
    _require(lab, "--cache-idle-slots")
    # Without the patch, it depends on the order of requests what their slots still have.
    least = SLOT // 4 if "server-reuse" in lab.built.manifest.server_patches else 0
    turns: list[tuple[CompletionRequest, ServerCompletion]] = []

    def ask(client: ServerClient, prompt: tuple[int, ...]) -> ServerCompletion:
        return complete(client, prompt, _ANSWER)

    with lab.server("--cache-idle-slots", slots=2) as server, ServerClient(server.url) as client:
        begins = [lab.prompt(client, SLOT // 4) for _ in range(4)]
        chats = [begin + lab.prompt(client, 16) for begin in begins for _ in range(3)]
        for turn in range(2):
            prompts = [
                *chats,
                *(lab.prompt(client, lab.random.randint(16, 128)) for _ in range(10)),
            ]
            order = lab.random.sample(range(len(prompts)), len(prompts))
            asked = [prompts[at] for at in order]
            found = answered(in_parallel(server.url, asked, CLIENTS, ask))
            for at, each in zip(order, found, strict=True):
                turns.append((CompletionRequest(prompts[at], _ANSWER), each))
                if at < len(chats):
                    if each.reused < turn * least:
                        msg = f"chat {at}: {each.reused} tokens of the second prompt were reused"
                        raise ScenarioFailed(msg, failure="lost")
                    chats[at] += each.tokens + lab.prompt(client, 16)
        _compare_with_uncached(lab, server, turns)


def _other_end(lab: ServerLab) -> None:
    """Send a prompt with another end to models whose state cannot be cut."""
    _require(lab, "--checkpoint-min-step")
    for model in ("hybrid", "recurrent"):
        with (
            lab.server("-ub", "64", model=model, cells=_FEW_CELLS) as server,
            ServerClient(server.url) as client,
        ):
            prompt = lab.prompt(client, 900)
            complete(client, prompt, _ANSWER, id_slot=0)
            changed = prompt[:700] + lab.prompt(client, 100)
            found = complete(client, changed, _ANSWER, id_slot=0)
            if found.reused < 512:
                raise ScenarioFailed(
                    f"{model}: of 700 equal tokens, {found.reused} were reused, expected 512",
                    failure="lost",
                )
            turns = [(CompletionRequest(changed, _ANSWER), found)]
            _compare_with_uncached(lab, server, turns)


def _swa_full(lab: ServerLab) -> None:
    """Go back in prompts of a server with --swa-full, whose saved states lack cells."""
    _require(lab, "--swa-full")
    with (
        lab.folder() as folder,
        lab.server(
            "--swa-full", "--slot-save-path", f"{folder}/", "-ub", "32", model="sliding"
        ) as server,
        ServerClient(server.url) as client,
    ):
        turns: list[tuple[CompletionRequest, ServerCompletion]] = []

        def ask(prompt: tuple[int, ...], slot: int) -> ServerCompletion:
            found = complete(client, prompt, _ANSWER, id_slot=slot)
            turns.append((CompletionRequest(prompt, _ANSWER), found))
            return found

        for _ in range(2):
            first, other = (lab.prompt(client, SLOT // 4) for _ in range(2))
            # A saved state has the last 56 tokens: half of the window before these 40 is missing.
            again = first[:-16] + lab.prompt(client, 40)
            first += ask(first, 0).tokens
            client.post("/slots/0?action=save", {"filename": "slot"})
            ask(other, 0)
            ask(again, 0)
            for prompt in (first + other[:8], again):
                client.post("/slots/1?action=restore", {"filename": "slot"})
                found = ask(prompt, 1)
                # The window of the whole prompt is complete.
                if prompt is not again and found.reused < len(first) - 1:
                    raise ScenarioFailed(f"a restored slot reused {found.reused} tokens")
        alone = _compare_with_uncached(lab, server, turns)
        changes = [largest_change(one, found) for one, (_, found) in zip(alone, turns, strict=True)]
        lab.note(changed=sum(change > lab.tie for change in changes))
        if max(changes) > lab.tie:
            raise ScenarioFailed(
                f"the margin of a token differs from that of a single client by up to "
                f"{max(changes):.2f}",
                failure="data",
            )


def _schema(lab: ServerLab) -> None:
    """Request answers by schemas and grammars that cannot be enforced, and by one that can."""
    _require(lab, "--checkpoint-min-step")
    with lab.server() as server, ServerClient(server.url) as client:
        for schema, part in _BAD_SCHEMAS:
            for path, body in _requests(schema):
                _refuse_answer(lambda: str(client.post(path, body)), f"{path}: {body}", part)  # noqa: B023
        for schema in _LOOSE_SCHEMAS:
            for path, body in _requests(schema):
                client.post(path, body)
        for path, body in _requests(_GOOD_SCHEMA):
            text = _text_of(client.post(path, body))
            if not _GOOD_TEXT.fullmatch(text):
                msg = f"{path}: {body}: {text!r} does not match the schema"
                raise ScenarioFailed(msg, failure="data")
            lab.note(requests=len(_BAD_SCHEMAS) + len(_LOOSE_SCHEMAS) + 1)
        for path, request in (("/completion", _PROMPT), ("/v1/chat/completions", _CHAT_REQUEST)):
            for fields, part in _BAD_REQUESTS:
                bad = {**request, **fields}
                _refuse_answer(lambda: str(client.post(path, bad)), f"{path}: {fields}", part)  # noqa: B023
        for grammar in _BAD_GRAMMARS:
            bad = {**_PROMPT, "grammar": grammar}
            _refuse_answer(lambda: str(client.post("/completion", bad)), grammar, "{2,1}")  # noqa: B023
        lab.note(requests=2 * len(_BAD_REQUESTS) + len(_BAD_GRAMMARS))
    with lab.folder() as folder:
        template = folder / "template.jinja"
        template.write_text(_TEMPLATE, encoding="utf-8")
        with (
            lab.server("--jinja", "--chat-template-file", str(template)) as server,
            ServerClient(server.url, timeout=_TOOLS) as client,
        ):

            def call(schema: dict[str, Any], choice: str) -> str:
                parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
                tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
                body = {**_CHAT_REQUEST, "tools": [tool], "tool_choice": choice}
                return str(client.post("/v1/chat/completions", body))

            for choice in ("auto", "required"):
                for schema, part in _BAD_PARAMETERS:
                    _refuse_answer(lambda: call(schema, choice), f"{schema}", part)  # noqa: B023
                call(_LOOSE_PARAMETER, choice)
        lab.note(requests=2 * len(_BAD_PARAMETERS) + 2)


def _requests(schema: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return paths and requests of all APIs with a schema, once for each place of it."""
    plain = {"type": "json_schema", "schema": schema}
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {"input": "a", "max_output_tokens": 16, "temperature": 0}
    return (
        ("/completion", {**_PROMPT, "json_schema": schema}),
        ("/completion", {**_PROMPT, "json_schema": schema, "grammar": ""}),
        ("/completion", {**_PROMPT, "response_format": wrapped}),
        ("/v1/completions", {**_PROMPT, "response_format": wrapped}),
        ("/v1/completions", {**_PROMPT, "json_schema": schema, "grammar": None}),
        ("/v1/chat/completions", {**_CHAT_REQUEST, "response_format": wrapped}),
        ("/v1/chat/completions", {**_CHAT_REQUEST, "response_format": plain}),
        ("/v1/responses", {**asked, "text": {"format": {**plain, "name": "a"}}}),
        ("/v1/messages", {**_CHAT_REQUEST, "output_format": plain}),
        ("/v1/messages", {**_CHAT_REQUEST, "output_config": {"format": plain}}),
        ("/v1/messages", {**_CHAT_REQUEST, "json_schema": schema}),
    )


def _text_of(found: Mapping[str, Any]) -> str:
    """Return the text of an answer, in the form of any API."""
    if "choices" in found:
        (choice,) = found["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    content = found["output"][-1]["content"] if "output" in found else found["content"]
    return str(content if isinstance(content, str) else content[-1]["text"])


def _refuse_answer(send: Callable[[], str], what: str, part: str) -> None:
    """Raise ScenarioFailed unless a request is refused with status 400 and a part of the error."""
    try:
        text = send()
    except RequestFailed as error:
        if error.code == 400 and part in str(error):
            return
        msg = f"{what}: expected status 400 with {part!r}, found: {error}"
        raise ScenarioFailed(msg) from error
    raise ScenarioFailed(f"{what}: expected status 400, found the answer {text!r}", failure="data")


def _slot_damage(lab: ServerLab) -> None:
    """Restore damaged slot files and one of another model; the slot keeps its prompt."""
    _require(lab, "--checkpoint-min-step")
    with lab.folder() as folder:
        option = ("--slot-save-path", f"{folder}/")
        with lab.server(*option, model="other") as server, ServerClient(server.url) as client:
            complete(client, lab.prompt(client, SLOT // 4), 1, id_slot=0)
            client.post("/slots/0?action=save", {"filename": "foreign"})
        log: list[str] = []
        with lab.server(*option, sink=log.append) as server, ServerClient(server.url) as client:
            saved, kept = (lab.prompt(client, SLOT // 4) for _ in range(2))
            complete(client, saved, 1, id_slot=0)
            expected = [complete(client, kept, _ANSWER, id_slot=1) for _ in range(2)][1]
            client.post("/slots/0?action=save", {"filename": "slot"})
            whole = (folder / "slot").read_bytes()
            damaged = {"foreign": (folder / "foreign").read_bytes()}
            for at in (9, len(whole) // 3, len(whole) // 2, len(whole) - _SEAL, len(whole) - 1):
                damaged[f"flipped-{at}"] = whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :]
            for cut in (len(whole) // 2, _SEAL + 100, len(whole) - 10, len(whole)):
                damaged[f"cut-{cut}"] = whole[: len(whole) - cut]
            _refuse_slot_files(lab, client, folder, damaged, kept, expected)
            # Files of other servers have no checksum.
            (folder / "old").write_bytes(whole[:-_SEAL])
            for name in ("slot", "old"):
                client.post("/slots/2?action=restore", {"filename": name})
                found = complete(client, saved, 1, id_slot=2)
                if found.reused < len(saved) - 1:
                    raise ScenarioFailed(f"a restored slot reused {found.reused} tokens")
            lab.note(requests=8)
        if not any("'old' has no checksum" in line.replace(f"{folder}/", "") for line in log):
            raise ScenarioFailed("a file without a checksum is restored without a warning")
        # A hybrid model has checkpoints after its state.
        with (
            lab.server(*option, "-ub", "64", model="hybrid", cells=_FEW_CELLS) as server,
            ServerClient(server.url) as client,
        ):
            saved, kept = (lab.prompt(client, SLOT * 3 // 4) for _ in range(2))
            complete(client, saved, 1, id_slot=0)
            expected = [complete(client, kept, _ANSWER, id_slot=1) for _ in range(2)][1]
            client.post("/slots/0?action=save", {"filename": "hybrid"})
            whole = (folder / "hybrid").read_bytes()
            ends = [*_ends_of_checkpoints(whole), len(whole) - _SEAL + 4, len(whole) - 1]
            cuts = {f"hybrid-{end}": whole[:end] for end in ends}
            _refuse_slot_files(lab, client, folder, cuts, kept, expected)


def _ends_of_checkpoints(data: bytes) -> list[int]:
    """Return where the parts of the checkpoints in a slot file end, without the last part.

    They are a magic number, a version, a count, and per checkpoint 16 bytes and three times a size
    of 8 bytes and as many bytes.
    """
    at = data.find(b"SCKP\x01\0\0\0")
    if at < 0:
        raise ScenarioFailed("a slot file of a hybrid model has no checkpoints")
    ends = [at + 2, at + 4, at + 8, at + 12]
    for _ in range(int.from_bytes(data[at + 8 : at + 12], sys.byteorder)):
        ends.append(ends[-1] + 16)
        for _ in range(3):
            ends.append(ends[-1] + 8)
            ends.append(ends[-1] + int.from_bytes(data[ends[-1] - 8 : ends[-1]], sys.byteorder))
    return sorted({*ends} - {ends[-1]})


def _refuse_slot_files(
    lab: ServerLab,
    client: ServerClient,
    folder: Path,
    files: Mapping[str, bytes],
    kept: tuple[int, ...],
    expected: ServerCompletion,
) -> None:
    """Raise ScenarioFailed unless slot 1 refuses files and keeps the prompt that it has."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
        _refuse_answer(
            lambda: str(client.post("/slots/1?action=restore", {"filename": name})),  # noqa: B023
            f"the slot file {name}",
            "another model" if name == "foreign" else "restore",
        )
        found = complete(client, kept, _ANSWER, id_slot=1)
        if found.reused < max(1, expected.reused):
            raise ScenarioFailed(f"after {name}, {found.reused} tokens were reused")
        if first_difference(expected, found, lab.tie) is not None:
            raise ScenarioFailed(f"after {name}, the answer differs", failure="data")
    lab.note(requests=2 * len(files))


def _openai(lab: ServerLab) -> None:
    """Hold chats with the openai package; every message is answered."""
    openai: Any = package("openai")
    with lab.server(shift=True) as server:
        # A word of the text is one to five tokens.
        turns = [lab.words(length // 5) for length in _prompt_lengths(lab, 32)]

        def ask(_client: ServerClient, text: str) -> int:
            # Without the proxies of the environment.
            client = openai.DefaultHttpxClient(trust_env=False)
            with openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=client
            ) as api:
                try:
                    answer = api.chat.completions.create(
                        model="model",
                        messages=[{"role": "user", "content": text}],
                        max_tokens=SLOT,
                        temperature=0,
                        extra_body={"ignore_eos": True, "logit_bias": NOT_ASCII},
                        timeout=_CHAT,
                    )
                except openai.APITimeoutError as error:
                    raise TimeoutError(f"a chat was not answered for {_CHAT:g} s") from error
            return int(answer.usage.completion_tokens) if answer.usage else 0

        found = in_parallel(server.url, turns, CLIENTS, ask)
        failed = [each for each in found if isinstance(each, Exception)]
        lab.note(requests=len(found))
        if failed:
            message = f"{len(failed)} of {len(found)} chats were not answered: {failed[0]}"
            raise ScenarioFailed(message)
        if wrong := [each for each in found if each != SLOT]:
            raise ScenarioFailed(
                f"{len(wrong)} of {len(found)} answers are incomplete: expected {SLOT} tokens, "
                f"found {wrong[0]}",
                failure="lost",
            )
        _refuse_retries(lab, server)


def _overcommit(lab: ServerLab) -> None:
    """Send requests that fit alone, but not together, to slots that share all cells."""
    parked = 0
    for model in ("full", "sliding", "hybrid", "recurrent"):
        if lab.architectures and MODELS[model].architecture not in lab.architectures:
            continue
        for shift in (False, True):
            # Cells of a window are not shifted: the answers of a sliding model end with the cache.
            cells = _FEWER_CELLS if shift and model != "sliding" else _FEW_CELLS
            # A micro-batch of 32 tokens leaves the windows fewer cells than the cache has.
            with lab.server(
                "--metrics", "-ub", "32", model=model, shift=shift, cells=cells
            ) as server:
                parked += _share_cells(lab, server, cells, outgrown=shift)
    lab.note(parked=parked)
    if lab.built.manifest.patches and not parked:
        raise ScenarioFailed("no request was parked, so the cells sufficed for all of them")


def _share_cells(lab: ServerLab, server: ServerProcess, cells: int, *, outgrown: bool) -> int:
    """Compare answers of four clients with those of one, also while others disconnect.

    Returns how many requests were parked. Raises ScenarioFailed if the server lost an answer,
    evaluated a token twice, or does not free what it parked.
    """
    with ServerClient(server.url) as client:
        requests = []
        for _ in range(4 if outgrown else 12):
            prompt = lab.prompt(client, lab.random.randint(*_PROMPT_LENGTHS) * cells // _FEW_CELLS)
            longer = cells - len(prompt) + lab.random.randint(1, 64)
            answer = longer if outgrown else lab.random.randint(*_ANSWER_LENGTHS)
            requests.append(CompletionRequest(prompt, answer))
        alone = answers(server, requests, 1, cache_prompt=False)

        def ask(
            one: ServerClient, item: tuple[int, CompletionRequest]
        ) -> tuple[ServerCompletion, ...]:
            number, request = item
            if number < 0:
                one.cancel(request.prompt, request.n_predict, after=2, logit_bias=NOT_ASCII)
                return ()
            return (complete(one, request.prompt, request.n_predict, streamed=bool(number % 2)),)

        def ask_all(items: Sequence[tuple[int, CompletionRequest]]) -> list[ServerCompletion]:
            found = in_parallel(server.url, items, CLIENTS, ask)
            return answered([one for each in found for one in _listed(each)])

        found = ask_all(list(enumerate(requests)))
        _refuse_other_text(lab, alone, found)
        _compare_metrics(server, [*alone, *found])
        # Each answer is asked for again, between those of clients that disconnect.
        mixed = [(sign * (1 + at), each) for at, each in enumerate(requests) for sign in (1, -1)]
        _refuse_other_text(lab, alone, ask_all(mixed))
        _ask_for_families(lab, server, cells)
        if not client.wait_idle(_IDLE):
            raise ScenarioFailed("a cancelled request keeps its slot", failure="hang")
        metrics = client.metrics()
        lab.note(requests=4 * len(requests), cancelled=len(requests))
        _refuse_parked(metrics)
        return int(metrics.get(_PARKS, 0))


def _park_limit(lab: ServerLab) -> None:
    """Set ``LLAMA_SERVER_PARK_MIB``; leave while parked, and end the server meanwhile."""
    if not lab.built.manifest.patches:
        raise Unsupported("the server parks no requests", "server")
    for text in ("-1", "1 GiB"):
        log: list[str] = []
        with _parking_server(lab, text, log.append) as server:
            if text == "-1":
                _leave_while_parked(lab, server)
        if not any(f"LLAMA_SERVER_PARK_MIB is '{text}'" in line for line in log):
            raise ScenarioFailed(f"LLAMA_SERVER_PARK_MIB={text!r} is not reported in the log")
    # The state of a prompt takes more than one MiB.
    for text, expected in (("1", ["", "503 LLAMA_SERVER_PARK_MIB"]), ("0", ["500 Context"] * 2)):
        with _parking_server(lab, text) as server:
            _exceed_limit(lab, server, expected)
    _save_while_parked(lab)
    _park_beside_embeddings(lab)
    _rank_together(lab)
    try:
        with _parking_server(lab, "16") as server:
            _exceed_cells(lab, server)
            with _half_of_the_cells(lab, server):
                os.kill(server.pid, signal.SIGTERM)
                if not server.ended(_IDLE):
                    raise ScenarioFailed("SIGTERM does not end a server that parks", failure="hang")
    except ServerDied as died:
        if died.exitcode != 0:
            raise


def _parking_server(
    lab: ServerLab, limit: str, sink: Callable[[str], None] | None = None, *options: str
) -> AbstractContextManager[ServerProcess]:
    """Return a server with two slots and a limit of the memory of parked requests."""
    return lab.server(
        "--metrics",
        *options,
        model="sliding",
        slots=2,
        cells=_MANY_CELLS,
        env={"LLAMA_SERVER_PARK_MIB": limit},
        sink=sink,
    )


@contextmanager
def _half_of_the_cells(
    lab: ServerLab, server: ServerProcess
) -> Iterator[tuple[Generator[dict[str, Any], None, None], ...]]:
    """Start two answers that do not fit together; yield their events when one is parked."""
    with ExitStack() as stack:
        events = []
        for slot in range(2):
            client = stack.enter_context(ServerClient(server.url))
            prompt = lab.prompt(client, _HALF)
            answer = client.stream(prompt, _QUARTER, n_probs=0, id_slot=slot, logit_bias=NOT_ASCII)
            events.append(stack.enter_context(closing(answer)))
            next(answer)
        until = time.monotonic() + _IDLE
        while not client.slots()[1]["park"]["is_parked"]:
            if time.monotonic() > until:
                raise ScenarioFailed("two requests that do not fit together, and none is parked")
        lab.note(requests=2)
        yield tuple(events)


def _end_answers(answers: Iterable[Iterable[dict[str, Any]]]) -> None:
    """Read the rest of answers of `_half_of_the_cells`; raises ScenarioFailed if one is cut off."""
    lasts = [list(each)[-1] for each in answers]
    found = [last.get("tokens_predicted") for last in lasts]
    if found != [_QUARTER] * len(found):
        raise ScenarioFailed(
            f"of answers that do not fit together, {found} tokens arrived", failure="lost"
        )


def _leave_while_parked(lab: ServerLab, server: ServerProcess) -> None:
    """Disconnect the client of a parked request; the other one gets its answer."""
    with ServerClient(server.url) as client:
        with _half_of_the_cells(lab, server) as (stays, leaves):
            leaves.close()
            _end_answers([stays])
        if not client.wait_idle(_IDLE):
            raise ScenarioFailed("a parked request keeps its slot without a client", failure="hang")
        metrics = client.metrics()
        lab.note(cancelled=1, parked=int(metrics[_PARKS]))
        _refuse_parked(metrics)


def _save_while_parked(lab: ServerLab) -> None:
    """Save the slot of a parked request, which waits for the end of its answer."""
    with (
        lab.folder() as folder,
        _parking_server(lab, "16", None, "--slot-save-path", f"{folder}/") as server,
        ServerClient(server.url, timeout=_IDLE) as client,
        ThreadPoolExecutor(1) as pool,
        _half_of_the_cells(lab, server) as answers,
    ):
        found = pool.submit(client.post, "/slots/1?action=save", {"filename": "slot"})
        _end_answers(answers)
        saved = found.result()["n_saved"]
        lab.note(saved=saved)
        # The last token of an answer is not evaluated.
        if saved != _HALF + _QUARTER - 1:
            raise ScenarioFailed(f"the slot of a parked request was saved with {saved} tokens")


def _park_beside_embeddings(lab: ServerLab) -> None:
    """Request an embedding, which shares no batch with a parked request; both are answered."""
    words = ("--metrics", "--embeddings", "--pooling", "last")
    size = ("-b", str(_MANY_CELLS), "-ub", str(_MANY_CELLS))
    with (
        lab.server(*words, *size, model="sliding", slots=3, cells=_MANY_CELLS) as server,
        ServerClient(server.url, timeout=_IDLE) as client,
        ThreadPoolExecutor(1) as pool,
        _half_of_the_cells(lab, server) as answers,
    ):
        # It fits with the parked request no better than the other one does.
        prompt = lab.prompt(client, _HALF + _QUARTER // 2)
        found = pool.submit(client.post, "/v1/embeddings", {"input": list(prompt)})
        until = time.monotonic() + _IDLE
        with ServerClient(server.url) as other:
            while not other.slots()[2]["is_processing"] and not found.done():
                if time.monotonic() > until:
                    raise ScenarioFailed("a request for an embedding starts in no slot")
        _end_answers(answers)
        if not found.result()["data"]:
            raise ScenarioFailed("a request for an embedding has none", failure="lost")
        lab.note(requests=1)


def _rank_together(lab: ServerLab) -> None:
    """Request ranks of documents that do not fit together; no state is saved, and none fails."""
    with (
        lab.server("--metrics", "--reranking", slots=2, cells=_FEWER_CELLS) as server,
        ServerClient(server.url) as client,
    ):
        # The values are not compared: the model has no head for ranks.
        for count in (2, 3) * 8:
            # A document has about 320 tokens. Of three, the second and third may each keep cells
            # that the other one needs; the third begins again then.
            words = [lab.words(_FEWER_CELLS // 7) for _ in range(count)]
            found = client.post("/v1/rerank", {"query": "a", "documents": words})["results"]
            if len(found) != count:
                raise ScenarioFailed("a document that fits alone has no rank", failure="lost")
            lab.note(requests=1)
        metrics = client.metrics()
        if metrics[_PARK_FAILURES]:
            raise ScenarioFailed("requests for ranks failed")
        _refuse_parked(metrics)


def _exceed_limit(lab: ServerLab, server: ServerProcess, expected: Sequence[str]) -> None:
    """Send two requests that do not fit together; compare how they are refused, if at all."""
    with ServerClient(server.url) as client:
        prompts = [lab.prompt(client, _HALF) for _ in expected]

        def ask(one: ServerClient, prompt: tuple[int, ...]) -> ServerCompletion:
            return complete(one, prompt, _QUARTER // 2)

        found = in_parallel(server.url, prompts, len(prompts), ask)
        refused = sorted(str(each) if isinstance(each, RequestFailed) else "" for each in found)
        lab.note(requests=len(found), refused=sum(map(bool, refused)))
        for words, reason in zip(expected, refused, strict=True):
            if bool(words) != bool(reason) or not all(word in reason for word in words.split()):
                raise ScenarioFailed(f"expected {words or 'an answer'!r}, found {reason!r}")
        metrics = client.metrics()
        failures = sum("PARK" in words for words in expected)
        if metrics[_PARK_FAILURES] != failures:
            raise ScenarioFailed(f"{_PARK_FAILURES} is {metrics[_PARK_FAILURES]:g}, not {failures}")
        _refuse_parked(metrics)


def _exceed_cells(lab: ServerLab, server: ServerProcess) -> None:
    """Request two answers that do not fit together with their prompt, and one that does."""
    with ServerClient(server.url) as client:
        prompt = lab.prompt(client, _HALF)

    def ask(client: ServerClient, count: int) -> int:
        n_predict = _QUARTER + _QUARTER // 4 if count > 1 else _ANSWER
        found = client.complete_family(prompt, n_predict, count, logit_bias=NOT_ASCII)
        return len(found[0].tokens)

    family, single = in_parallel(server.url, [2, 1], 2, ask)
    with ServerClient(server.url) as client:
        failures = client.metrics()[_PARK_FAILURES]
    lab.note(requests=2, refused=1)
    if not isinstance(family, PromptTooLong) or "needs" not in str(family):
        raise ScenarioFailed(f"two answers that do not fit are not refused: {family!r}")
    if failures != 1:
        raise ScenarioFailed(f"{_PARK_FAILURES} is {failures:g} after one refused request")
    if single != _ANSWER:
        raise ScenarioFailed(f"an answer beside a refused request is {single!r}", failure="lost")


def _refuse_parked(metrics: Mapping[str, float]) -> None:
    """Raise ScenarioFailed if a request is parked, or its memory kept, although none runs."""
    for name in _PARKED:
        if metrics.get(name):
            raise ScenarioFailed(f"{name} is {metrics[name]:g} although all slots are idle")


def _listed(
    found: tuple[ServerCompletion, ...] | Exception,
) -> Sequence[ServerCompletion | Exception]:
    return (found,) if isinstance(found, Exception) else found


def _ask_for_families(lab: ServerLab, server: ServerProcess, cells: int) -> None:
    """Request two answers to a prompt at once; their sequences share its cells.

    Such a request fits alone, also while a resumed sequence has cells of its own for the prompt,
    and two of them do not fit together.
    """
    with ServerClient(server.url) as client:
        prompts = [lab.prompt(client, cells // 5) for _ in range(6)]
    requests = [CompletionRequest(prompt, cells // 5) for prompt in prompts]
    alone = answers(server, requests, 1, cache_prompt=False)

    def ask(client: ServerClient, request: CompletionRequest) -> list[ServerCompletion]:
        return client.complete_family(request.prompt, request.n_predict, 2, logit_bias=NOT_ASCII)

    found = in_parallel(server.url, requests, CLIENTS, ask)
    lab.note(requests=2 * len(requests))
    for one, family in zip(alone, found, strict=True):
        if isinstance(family, Exception):
            raise ScenarioFailed(f"a request for two answers was not answered: {family}")
        _refuse_other_text(lab, [one] * len(family), family)


def _compare_metrics(server: ServerProcess, found: Sequence[ServerCompletion]) -> None:
    """Raise ScenarioFailed unless the server counts the tokens of all answers to its clients."""
    with ServerClient(server.url) as client:
        metrics = client.metrics()
    for name, expected in (
        ("llamacpp:prompt_tokens_total", sum(each.n_prompt - each.reused for each in found)),
        (_GENERATED, sum(len(each.tokens) for each in found)),
    ):
        if metrics.get(name) != expected:
            raise ScenarioFailed(f"{name} is {metrics.get(name)}, expected {expected}")


def _compare_searches(server: ServerProcess) -> None:
    """Raise ScenarioFailed unless each search that failed was repeated, or its batch split."""
    with ServerClient(server.url) as client:
        metrics = client.metrics()
    searches, failures, repeated = (metrics.get(name) for name in (_SEARCHES, _FAILURES, _REPEATED))
    if not searches:
        raise ScenarioFailed(f"{_SEARCHES} is {searches} after answers")
    retries = _retries(server)
    if failures is None or repeated is None or failures != repeated + retries:
        raise ScenarioFailed(
            f"{_FAILURES} is {failures}, expected the sum of {_REPEATED} ({repeated}) and of "
            f"{retries} split batches"
        )


def _refuse_retries(lab: ServerLab, server: ServerProcess) -> None:
    """Raise ScenarioFailed for retries: a slot always has enough free cells for its request."""
    retries = _retries(server)
    lab.note(retries=retries)
    if retries:
        raise ScenarioFailed(
            f"{retries} batches found no cells and were split, although enough are free"
        )


def _retries(server: ServerProcess) -> int:
    """Return how many batches were split, when the log of the last one has arrived."""
    time.sleep(_LOGGED)
    return server.retries


SCENARIOS = (
    ServerScenario(
        "server-context-shift",
        "fix",
        "Answers that outgrow their slots are completed without retries.",
        _context_shift,
    ),
    ServerScenario(
        "server-parallel",
        "fix",
        "Parallel requests that fit are answered without retries, and as for a single client.",
        _parallel,
    ),
    ServerScenario(
        "server-openai",
        "fix",
        "Chats of the openai package that outgrow their slots are answered without retries.",
        _openai,
        ("httpx", "openai"),
    ),
    ServerScenario(
        "server-cancelled",
        "guard",
        "Requests of clients that disconnect leave their slots; later answers are unchanged.",
        _cancelled,
    ),
    ServerScenario(
        "server-too-long",
        "guard",
        "Requests longer than a slot are refused with an error; others are answered.",
        _too_long,
    ),
    ServerScenario(
        "server-slots",
        "guard",
        "A cached, saved and restored prompt is not evaluated again; the answer is the same.",
        _slot_files,
    ),
    ServerScenario(
        "server-sliding-window",
        "fix",
        "Conversations of a sliding-window model get the answers of prompts that are not cached.",
        _sliding_window,
    ),
    ServerScenario(
        "server-hybrid",
        "guard",
        "Conversations of a hybrid model reuse their prompts and get the same answers.",
        _hybrid,
    ),
    ServerScenario(
        "server-sparse",
        "fix",
        "When most cells become free, the answers of the slot that keeps its cells do not change.",
        _sparse,
    ),
    ServerScenario(
        "server-overcommit",
        "fix",
        "Requests that fit alone, but not together, get the answers of a single client.",
        _overcommit,
        patch="server-park",
    ),
    ServerScenario(
        "server-park-limit",
        "feature",
        "LLAMA_SERVER_PARK_MIB limits parked requests; a client can leave, and the server end.",
        _park_limit,
        patch="server-park",
    ),
    ServerScenario(
        "server-reuse",
        "fix",
        "A prompt that begins like that of another slot or a cached one is not evaluated again.",
        _reuse,
        patch="server-reuse",
    ),
    ServerScenario(
        "server-mixed-chats",
        "guard",
        "Chats with equal begins, among unrelated ones in two slots, get the text of one client.",
        _mixed,
    ),
    ServerScenario(
        "server-other-end",
        "fix",
        "Hybrid and recurrent models reuse the begin of a prompt that has another end.",
        _other_end,
        patch="server-reuse",
    ),
    ServerScenario(
        "server-swa-full",
        "fix",
        "With --swa-full, prompts that go back in cached ones get the answers of uncached ones.",
        _swa_full,
        patch="server-safety",
    ),
    ServerScenario(
        "server-schema",
        "fix",
        "Schemas and grammars that cannot be enforced are refused with status 400 and the path.",
        _schema,
        patch="server-safety",
    ),
    ServerScenario(
        "server-slot-damage",
        "fix",
        "Damaged slot files, and those of another model, are refused; the slot keeps its prompt.",
        _slot_damage,
        patch="server-safety",
    ),
    ServerScenario(
        "server-defrag-thold",
        "feature",
        "--defrag-thold moves the cells of a sparse cache together; with 0, none are moved.",
        _threshold,
    ),
)
