"""Reproduce: requests that fit alone, but not together, are all answered with status 500.

    python3 server-park.py LLAMA_SERVER MODEL.gguf

Starts the server with a cache of 1,024 cells and the usual four slots, and sends four chats of
about 200 tokens at the same time, each with 150 tokens to generate. Exits with 0 if all are
answered, 1 if one is not, and 2 if the server does not start.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

CELLS = 1024
CHATS = 4
PROMPT = 200  # tokens
ANSWER = 150
START = 60  # seconds
CHAT = 300

#: Ignores the proxies of the environment.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, body: dict) -> dict:
    """Send JSON and return the JSON of the answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with OPENER.open(request, timeout=CHAT) as answer:
        return json.load(answer)


def chat(url: str, number: int) -> str:
    """Return an empty text if a chat is answered completely, or else the error."""
    message = {"role": "user", "content": prompt(url, number)}
    body = {"messages": [message], "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    try:
        usage = post(f"{url}/v1/chat/completions", body)["usage"]
    except urllib.error.HTTPError as error:
        return f"{error.code}: {json.load(error)['error']['message']}"
    if usage["completion_tokens"] != ANSWER:
        return f"{usage['completion_tokens']} of {ANSWER} tokens"
    return ""


def prompt(url: str, number: int) -> str:
    """Return a text of about `PROMPT` tokens, another one for each chat."""
    words = ""
    while len(post(f"{url}/tokenize", {"content": words})["tokens"]) < PROMPT - 20:
        words += f"Chat {number} is about a cat and a dog. "
    return words


def wait(url: str, server: subprocess.Popen) -> bool:
    """Return whether the server becomes ready."""
    for _ in range(10 * START):
        try:
            with OPENER.open(f"{url}/health", timeout=5):
                return True
        except OSError:
            if server.poll() is not None:
                return False
            time.sleep(0.1)
    return False


def main() -> int:
    """Run the server and the chats."""
    program, model = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = [program, "-m", model, "-c", str(CELLS), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            if not wait(url, server):
                print("the server did not start")
                return 2
            with ThreadPoolExecutor(CHATS) as pool:
                errors = [each for each in pool.map(chat, [url] * CHATS, range(CHATS)) if each]
        finally:
            server.terminate()
    print(f"{CHATS - len(errors)} chats were answered, {len(errors)} failed")
    for each in errors:
        print(each)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
