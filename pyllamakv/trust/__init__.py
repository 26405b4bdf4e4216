"""Try to lose something: random schedules, mutants, fuzzing, faults, sanitizers and leaks.

Every section is one module with ``entries(effort, tick)``, which does the work and returns what it
measured, and ``names()``, which are the names that entries may have; `pyllamakv trust` runs them
and writes RELIABILITY.md.
"""

#: What each section tries, in the order of the document.
SECTIONS = {
    "schedules": "Random schedules of operations against a ledger, K/V bytes and logits.",
    "mutants": "Patches made wrong on purpose: a scenario or a test of a header must catch each.",
    "fuzzing": "Bytes and arguments that nobody would write, over everything that reads them.",
    "faults": "Kills, full disks, limits and lost workers at random points.",
    "sanitizers": "Address, undefined-behaviour and thread sanitizers; each sees a planted bug.",
    "leaks": "Memory and file descriptors over many contexts and decodes.",
    "defects": "What all this found, fixed since: the tests that hold the cures run again.",
}
