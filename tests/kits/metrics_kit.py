"""Parse Prometheus text strictly."""

from __future__ import annotations

import re

LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(exposition: str) -> tuple[dict[str, str], Samples]:
    """Return the kind of each metric and the value of each sample; refuse anything else."""
    kinds: dict[str, str] = {}
    samples: Samples = {}
    helped: list[str] = []
    assert not exposition or exposition.endswith("\n")
    for line in exposition.splitlines():
        assert line == line.strip() and line
        if line.startswith("# HELP "):
            name, help_text = line.removeprefix("# HELP ").split(" ", 1)
            assert NAME.fullmatch(name) and help_text and name not in helped
            assert re.fullmatch(r"(?:[^\\]|\\\\|\\n)*", help_text)
            helped.append(name)
        elif line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert helped[-1] == name and name not in kinds
            assert kind in ("gauge", "counter")
            assert name.endswith("_total") == (kind == "counter")
            kinds[name] = kind
        else:
            found = re.fullmatch(r"([^{ ]+)(?:\{(.*)\})? (\S+)", line)
            assert found, line
            name, inside, value = found.groups()
            assert name == helped[-1] and name in kinds
            labels = _labels(inside) if inside is not None else ()
            assert len(dict(labels)) == len(labels)
            assert (name, labels) not in samples
            samples[name, labels] = float(value)
            assert kinds[name] != "counter" or samples[name, labels] >= 0
    assert set(helped) == set(kinds) == {name for name, _ in samples}
    return kinds, samples


def _labels(inside: str) -> tuple[tuple[str, str], ...]:
    found = []
    while inside:
        label = LABEL.match(inside)
        assert label, inside
        value = re.sub(r'\\["\\n]', lambda each: UNESCAPED[each[0]], label[2])
        found.append((label[1], value))
        rest = inside[label.end() :]
        assert rest[:1] in ("", ",") and rest != ","
        inside = rest[1:]
    return tuple(found)
