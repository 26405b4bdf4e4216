"""Stress tests, benchmarks, and tests against llama-cpp-python; not part of the wheel.

Each section of `python -m qa stress` is a module with ``entries(effort, tick)``, which runs the
section and returns its results, and ``names()``, the possible names of its entries.
"""

#: What each section does, in the order of the document.
SECTIONS = {
    "random_operations": "Random operations, compared with a ledger, K/V bytes and logits.",
    "slips": "Slips of a maintainer: a quick scenario, a header test or a quick test detects each.",
    "fuzzing": "Random bytes for every parser, in Python and in C++.",
    "native_calls": "Native calls at the boundaries of their arguments, on every kind of memory.",
    "faults": "Kills, full disks and limits, injected at random points.",
    "interrupts": "Random operations that a signal interrupts, compared with cells and logits.",
    "sanitizers": "Address, undefined-behaviour and thread sanitizers, each with a planted bug.",
    "leaks": "Memory and file descriptors over many contexts and decodes.",
    "servers": "llama-server over HTTP, stock against patched.",
}
