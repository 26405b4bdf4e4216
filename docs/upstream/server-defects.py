"""Reproduce defects of llama-server.

    python3 server-defects.py LLAMA_SERVER MODEL.gguf [CASE...]

Runs the cases, each with a server of its own: id-slot, shared-entry, other-slot, busy-slot,
other-end (needs a hybrid or recurrent model), swa-full (needs sliding windows of at least 32
tokens), pattern, tools, format, slot-file. Without names, those for any model run. Exits with 0 if
no case fails, 1 if one does, and 2 if a server does not start.
"""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

START = 60  # seconds
ANSWER = 300
TOOLS = 10  # the server fills the memory meanwhile

#: A chat template from which the server derives a grammar of tool calls.
TEMPLATE = """
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

#: Ignores the proxies of the environment.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server with slots of 1,024 cells, and a directory for slot files."""

    def __init__(self, program: str, model: str, folder: str, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.folder = f"http://127.0.0.1:{port}", folder
        words = [program, "-m", model, "--host", "127.0.0.1", "--port", str(port)]
        words += [
            "-np",
            "4",
            "-c",
            "4096",
            "--slot-save-path",
            f"{folder}/",
            "-ub",
            "64",
            "-t",
            "1",
            *flags,
        ]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(10 * START):
            try:
                with OPENER.open(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        print("the server did not start")
        sys.exit(2)

    def post(self, path: str, body: dict, timeout: float = ANSWER) -> dict:
        """Send JSON and return the JSON of the answer."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with OPENER.open(request, timeout=timeout) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], slot: int, **options: object) -> dict:
        """Complete a prompt in a slot."""
        body = {"prompt": prompt, "id_slot": slot, "n_predict": 4, "temperature": 0}
        return self.post("/completion", {**body, "ignore_eos": True, **options})

    def stream(self, prompt: list[int], slot: int, **options: object) -> Iterator[str]:
        """Complete a prompt in a slot, and yield the text of each token when it is there."""
        body = {"prompt": prompt, "id_slot": slot, "temperature": 0, "stream": True}
        data = json.dumps({**body, "ignore_eos": True, **options}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/completion", data, headers)
        with OPENER.open(request, timeout=ANSWER) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])["content"]

    def reused(self, prompt: list[int], slot: int) -> int:
        """Return how many tokens of a prompt were not evaluated."""
        return len(prompt) - self.complete(prompt, slot)["timings"]["prompt_n"]

    def prompt(self, name: str, length: int) -> list[int]:
        """Return a prompt of ``length`` tokens."""
        text = " ".join(f"{name} {at} went to see a cat." for at in range(length))
        return self.post("/tokenize", {"content": text})["tokens"][:length]


def id_slot(server: Server) -> str:
    """Select an empty slot by its id: it does not load from the prompt cache."""
    first = server.prompt("Tom", 200)
    server.complete(first, 0)
    server.complete(server.prompt("Anna", 200), 0)
    return expect(server.reused(first, 1), 199)


def shared_entry(server: Server) -> str:
    """Send a prompt that begins like a cached one: it takes the copy."""
    first, other = server.prompt("Tom", 200), server.prompt("Anna", 200)
    server.complete(first, 0)
    server.complete(other, 0)
    server.complete(first[:100] + other[:50], 0)
    server.complete(server.prompt("Tim", 200), 0)
    return expect(server.reused(first, 0), 199)


def other_slot(server: Server) -> str:
    """Send a prompt that begins like that of another slot: it is evaluated completely."""
    first = server.prompt("Tom", 200)
    server.complete(first, 0)
    return expect(server.reused(first + server.prompt("Anna", 20), 1), 200)


def busy_slot(server: Server) -> str:
    """Send a request to a busy slot: it replaces what the slot has."""
    first, busy = server.prompt("Tom", 200), server.prompt("Anna", 200)
    server.complete(first, 0)
    alone = server.complete(busy, 0, n_predict=700)["content"]
    server.complete(first, 0)
    other = threading.Thread(target=lambda: server.complete(first, 0))
    found = ""
    for part in server.stream(busy, 0, n_predict=700):
        if other.ident is None:
            other.start()
        found += part
    other.join()
    return "" if found == alone else "the answer differs"


def other_end(server: Server) -> str:
    """Change the end of a prompt: a hybrid or recurrent model evaluates all of it."""
    first = server.prompt("Tom", 900)
    server.complete(first, 0)
    return expect(server.reused(first[:700] + server.prompt("Anna", 100), 0), 512)


def swa_full(server: Server) -> str:
    """Go back in a saved prompt with --swa-full: a part of the window is missing."""
    window = 16
    first, other = server.prompt("Tom", 300), server.prompt("Anna", 300)
    again = first[:-window] + server.prompt("Tim", 40)
    wanted = server.complete(again, 1, cache_prompt=False, n_probs=1, n_predict=16)
    server.complete(first, 0)
    server.post("/slots/0?action=save", {"filename": "slot"})
    server.complete(other, 0)
    server.post("/slots/2?action=restore", {"filename": "slot"})
    found = server.complete(again, 2, n_probs=1, n_predict=16)
    rows = [each.get("completion_probabilities", []) for each in (wanted, found)]
    if not all(rows):
        return "an answer has no log-probabilities"
    off = max(abs(a["logprob"] - b["logprob"]) for a, b in zip(*rows, strict=True))
    return f"a log-probability differs by {off:.2f}" if off > 0.05 else ""


def pattern(server: Server) -> str:
    """Request a pattern that no grammar has: it is ignored."""
    schema = {"type": "string", "pattern": r"^hello\!$"}
    try:
        text = server.post("/completion", {"prompt": "a", "n_predict": 16, "json_schema": schema})
    except urllib.error.HTTPError as error:
        return "" if error.code == 400 else f"status {error.code}"
    return f"status 200 with {text['content']!r}"


def tools(server: Server) -> str:
    """Send a tool whose parameter has a range that no text matches: the server hangs."""
    value = {"type": "string", "pattern": "^a{2,1}$"}
    parameters = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    try:
        server.post("/v1/chat/completions", body, TOOLS)
    except urllib.error.HTTPError as error:
        return "" if error.code == 400 else f"status {error.code}"
    except OSError as error:
        return f"no answer in {TOOLS} s: {error}"
    return "status 200"


def other_format(server: Server) -> str:
    """Send a schema where the API of responses has it: it is ignored."""
    wanted = {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}
    body = {"input": "a", "max_output_tokens": 8, "text": {"format": wanted}}
    text = server.post("/v1/responses", body)["output"][-1]["content"][0]["text"]
    # Blanks can precede the value.
    return "" if text.strip() in ("", "true", "false") else f"status 200 with {text!r}"


def slot_file(server: Server) -> str:
    """Restore a slot file that ends within its state: the server ends."""
    server.complete(server.prompt("Tom", 200), 0)
    server.post("/slots/0?action=save", {"filename": "slot"})
    path = Path(server.folder) / "slot"
    path.write_bytes(path.read_bytes()[:-100])
    try:
        server.post("/slots/1?action=restore", {"filename": "slot"})
    except urllib.error.HTTPError as error:
        return "" if error.code == 400 else f"status {error.code}"
    except OSError as error:
        return f"the server ended: {error}"
    return "status 200"


def expect(reused: int, least: int) -> str:
    """Return a text if fewer tokens than expected were reused."""
    return "" if reused >= least else f"{reused} tokens were reused, expected {least}"


#: The cases, with the flags of their server, and whether any model suits them.
CASES: dict[str, tuple[Callable[[Server], str], tuple[str, ...], bool]] = {
    "id-slot": (id_slot, (), True),
    "shared-entry": (shared_entry, (), True),
    "other-slot": (other_slot, (), True),
    "busy-slot": (busy_slot, (), True),
    "other-end": (other_end, (), False),
    "swa-full": (swa_full, ("--swa-full",), False),
    "pattern": (pattern, (), True),
    "tools": (tools, ("--jinja", "--chat-template", TEMPLATE), True),
    "format": (other_format, (), True),
    "slot-file": (slot_file, ("--kv-unified",), True),
}


def main() -> int:
    """Run the cases."""
    program, model, *names = sys.argv[1:]
    failed = 0
    for name in names or [name for name, (_, _, common) in CASES.items() if common]:
        run, flags, _ = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            server = Server(program, model, folder, "--no-cache-idle-slots", *flags)
            try:
                error = run(server)
            finally:
                server.process.kill()
                server.process.wait()
        failed += bool(error)
        print(f"{name}: {error or 'as expected'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
