"""Complete prompts with llama-cpp-python and one of its caches, without pyllamakv.

The first line of its input is JSON with the options of `Llama`, and the ``folder`` of a disk cache
or an empty text for a RAM cache; it is answered with the package's version. Each later line is a
prompt of tokens and ``n``, answered with the seconds up to the first token, the prompt tokens that
were evaluated, and the tokens of the answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    request = json.loads(sys.stdin.readline())
    import llama_cpp

    llama = llama_cpp.Llama(**request["options"], verbose=False)
    folder = request["folder"]
    llama.set_cache(llama_cpp.LlamaDiskCache(folder) if folder else llama_cpp.LlamaRAMCache())
    _say({"version": llama_cpp.__version__})
    evaluate, generate = llama.eval, llama.generate
    evaluated, first, begin = 0, 0.0, 0.0
    tokens: list[int] = []

    def counting(given: list[int]) -> None:
        nonlocal evaluated
        if not tokens:
            evaluated += len(given)
        evaluate(given)

    def timed(*words: Any, **options: Any) -> Iterator[int]:
        nonlocal first
        for token in generate(*words, **options):
            first = first or time.perf_counter() - begin
            tokens.append(token)
            yield token

    llama.eval, llama.generate = counting, timed
    for line in sys.stdin:
        asked = json.loads(line)
        evaluated, first = 0, 0.0
        tokens.clear()
        begin = time.perf_counter()
        llama.create_completion(
            asked["prompt"], max_tokens=asked["n"], temperature=0.0, repeat_penalty=1.0
        )
        _say({"first": first, "evaluated": evaluated, "tokens": tokens})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
