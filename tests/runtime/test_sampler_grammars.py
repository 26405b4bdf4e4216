"""Test that any grammar gives a sampler or a typed error, within time and memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import hypothesis_profile  # noqa: F401
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_kit import built

import pyllamakv as kv
from pyllamakv.runtime.memory_estimate import mapped_bytes
from pyllamakv.scenarios import synthetic_models

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's"),
]

#: Limits of one grammar: seconds of CPU time, and bytes.
SECONDS, MEMORY = 2.0, 500 << 20

NAMES = st.sampled_from(["root", "a", "b", "c", "missing"])
LITERALS = st.sampled_from(
    ['""', '"x"', '"é"', '"\n"', "[a-z]", "[^x]", "[]", ".", '"\\x41"', "<x>"]
)
COUNTS = st.integers(0, 2100)
REPEATS = st.one_of(
    st.sampled_from(["*", "+", "?", "{", "{}", "{,2}", "{2,1}", "{1000}{1000}", "{0,0}"]),
    st.builds("{{{}}}".format, COUNTS),
    st.builds("{{{},{}}}".format, COUNTS, COUNTS),
    st.builds("{{{},}}".format, COUNTS),
)
ITEMS = st.recursive(
    st.one_of(NAMES, LITERALS),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, REPEATS),
        st.builds("({})".format, inner),
        st.builds("({} | )".format, inner),
        st.lists(inner, min_size=1, max_size=6).map(" ".join),
        st.lists(inner, min_size=1, max_size=6).map(" | ".join),
        st.builds(lambda item, n: " ".join([item] * n), inner, st.integers(1, 40)),
        st.builds(lambda item, n: "(" * n + item + ")" * n, inner, st.integers(1, 300)),
    ),
    max_leaves=12,
)
GRAMMARS = st.one_of(
    st.text(max_size=60),
    st.lists(st.builds("{} ::= {}\n".format, NAMES, ITEMS), max_size=5).map(
        lambda rules: "".join(rules) + 'root ::= a b\nc ::= "y" | ""\n'
    ),
)


@pytest.mark.parametrize("release", ["0.3.9", "0.3.16", "b11549"])
@pytest.mark.parametrize("name", ["bytes", "test"])
def test_random_grammars_are_used_or_refused(release: str, name: str) -> None:
    """A signal or an endless loop would end the worker, whose memory is limited.

    Tokens of "test" have several characters, and the ways of a grammar multiply for each.
    """
    if name == "test" and not os.environ.get(synthetic_models.VARIABLE):
        pytest.skip(f"{synthetic_models.VARIABLE} is not set")
    with (
        kv.open(built(f"{release}+patched").folder, isolated=True, timeout=60) as library,
        library.load_model(synthetic_models.model(name)) as model,
    ):
        pid: int = library.native.pid  # type: ignore[attr-defined]
        resource.prlimit(pid, resource.RLIMIT_AS, (limit := mapped_bytes(pid) + MEMORY, limit))
        logits = np.zeros(model.info.n_vocab, np.float32)

        @settings(max_examples=300)
        @given(GRAMMARS)
        @example('root ::= "a"{2,1}')
        @example("root ::= " + '"a"? ' * 130)
        @example("root ::= " + "r " * 14 + '"a"\nr ::= "" | ""')
        @example("root ::= " + " | ".join(f'"k{i}"' for i in range(9000)))
        @example("root ::= " + "(" * 40 + '"a"' + ")+" * 40)
        @example("root ::= " + "(" * 250 + '"a"' + ")+" * 250)
        @example("root ::= " + '("a" ' * 20 + '"a"' + ")+" * 20)
        @example(
            "".join(f"r{i} ::= r{i + 1} r{i} | r{i + 1}\n" for i in range(40))
            + 'root ::= r0\nr40 ::= "a"'
        )
        def use(grammar: str) -> None:
            before = seconds(pid)
            try:
                with model.sampler(grammar=grammar, temperature=1.0, seed=1) as sampler:
                    for _ in range(4):
                        with sampler.lock as handle:
                            model.native.sample_logits(handle, logits)
            except (kv.UsageError, kv.NoTokenAllowed):
                pass
            assert seconds(pid) - before < SECONDS

        use()


def seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
