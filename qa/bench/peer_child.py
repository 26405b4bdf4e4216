"""Run llama-cpp-python's loops: a program for a Python without pyllamakv.

The first line of its input is the workload as JSON, answered with the package's version; each later
line runs one round, answered with its seconds and its result.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    work = json.loads(sys.stdin.readline())
    import llama_cpp

    loop = {"generate": generate, "eval": evaluate, "llama_decode": low, "clients": clients}
    run = loop[work["api"]](llama_cpp, work)
    _say({"version": llama_cpp.__version__, "file": llama_cpp.__file__})
    for _ in sys.stdin:
        begin = time.perf_counter()
        seconds, result = run()
        wall = time.perf_counter() - begin
        _say({"seconds": seconds, "result": [float(value) for value in result], "wall": wall})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _llama(llama_cpp: Any, work: dict[str, Any], **options: Any) -> Any:
    return llama_cpp.Llama(
        work["model"],
        n_ctx=work["n_ctx"],
        n_batch=work["n_batch"],
        n_ubatch=work["n_batch"],
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        **options,
    )


def generate(llama_cpp: Any, work: dict[str, Any]) -> Any:
    """Continue greedily with `Llama.generate`."""
    llama = _llama(llama_cpp, work)

    def run() -> tuple[float, list[int]]:
        left, token = work["steps"], -1
        begin = time.thread_time()
        for chosen in llama.generate(work["tokens"], temp=0.0, repeat_penalty=1.0):
            token = chosen
            left -= 1
            if not left:
                break
        return time.thread_time() - begin, [token]

    return run


def clients(llama_cpp: Any, work: dict[str, Any]) -> Any:
    """Serve the clients of a round one after the other with `Llama.generate`."""
    llama = _llama(llama_cpp, work)
    rounds = iter(work["prompts"])

    def run() -> tuple[float, list[int]]:
        tokens: list[int] = []
        begin = time.thread_time()
        for prompt in next(rounds):
            going = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
            tokens += itertools.islice(going, work["steps"])
            going.close()
        return time.thread_time() - begin, tokens

    return run


def evaluate(llama_cpp: Any, work: dict[str, Any]) -> Any:
    """Read the logits after each `Llama.eval` of a token, or of a whole prompt."""
    prompt = work["kind"] == "prompt"
    llama = _llama(llama_cpp, work, logits_all=not prompt)
    tokens = work["tokens"]

    def run() -> tuple[float, list[float]]:
        llama.reset()
        value = 0.0
        begin = time.thread_time()
        if prompt:
            llama.eval(tokens)
            value = llama_cpp.llama_get_logits_ith(llama.ctx, -1)[0]
        else:
            for _ in range(work["steps"]):
                llama.eval(tokens)
                value = llama.scores[llama.n_tokens - 1][0]
        return time.thread_time() - begin, [value]

    return run


def low(llama_cpp: Any, work: dict[str, Any]) -> Any:
    """Refill one llama_batch for each step, with its declarations of the C functions."""
    mp, cp = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    n, steps, greedy = work["sequences"], work["steps"], work["kind"] == "greedy"
    cp.n_ctx, cp.n_seq_max = work["n_ctx"], n
    cp.n_batch = cp.n_ubatch = work["n_batch"]
    cp.n_threads = cp.n_threads_batch = 1
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_load_model_from_file(work["model"].encode(), mp)
    ctx = llama_cpp.llama_new_context_with_model(model, cp)
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for k in range(n):
        batch.n_seq_id[k], batch.seq_id[k][0], batch.logits[k] = 1, k, 1
    token, pos, places = batch.token, batch.pos, range(n)
    decode, sample = llama_cpp.llama_decode, llama_cpp.llama_sampler_sample
    logits = llama_cpp.llama_get_logits_ith

    def run() -> tuple[float, list[float]]:
        llama_cpp.llama_kv_cache_seq_rm(ctx, -1, -1, -1)
        for k in places:
            token[k] = work["tokens"][k]
        value = 0.0
        begin = time.thread_time()
        for i in range(steps):
            for k in places:
                pos[k] = i
            code = decode(ctx, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            if greedy:
                for k in places:
                    token[k] = sample(chain, ctx, k)
            else:
                for k in places:
                    value = logits(ctx, k)[0]
        seconds = time.thread_time() - begin
        return seconds, [token[k] for k in places] if greedy else [value]

    return run


if __name__ == "__main__":
    main()
