"""What developers run and no wheel contains: stress tests, benchmarks, tests of llama-cpp-python.

Each section of `python -m qa stress` is a module with ``entries(effort, tick)``, which does the
work and returns what it measured, and ``names()``, the names that entries may have.
"""

#: What each section tries, in the order of the document.
SECTIONS = {
    "random_operations": "Random operations, compared with a ledger, K/V bytes and logits.",
    "mutation": "Mutants of the patches: a scenario or a header test must detect each.",
    "fuzzing": "Random bytes and arguments for every parser and C entry point.",
    "faults": "Kills, full disks, limits and lost workers, injected at random points.",
    "sanitizers": "Address, undefined-behaviour and thread sanitizers, each with a planted bug.",
    "leaks": "Memory and file descriptors over many contexts and decodes.",
    "defects": "Regression tests of all defects that the sections found.",
}
