"""A trained model continues its text word for word after another sequence was removed.

Damage to the cache of a trained model is visible as broken text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamakv.scenarios.scenario import CACHES, Scenario

if TYPE_CHECKING:
    from pyllamakv.scenarios.lab import Lab
    from pyllamakv.scenarios.player import Player

LENGTH = 60


def run(lab: Lab) -> None:
    """Generate two texts alternately, remove one, decode a long prompt, and continue the other."""
    alone = lab.player(512, n_ubatch=256)
    prompt = lab.tokenize("Once upon a time, there was a little girl")
    expected = _generate(alone, {0: prompt}, 2 * LENGTH)[0]

    player = lab.player(256, n_ubatch=256)
    other = lab.tokenize("The big dog ran to the park")
    half = _generate(player, {0: prompt, 1: other}, LENGTH)[0]
    player.remove(1)
    lab.picture(player, "before")
    free = player.free
    player.decode({2: free - LENGTH - 4})
    lab.picture(player, "after")
    rest = _generate(player, {0: half[-1:]}, LENGTH)[0]
    words = lab.text([*prompt, *half, *rest])
    lab.note(story=words)
    lab.expect(
        [*half, *rest][: len(expected)] == expected,
        f"the text differs: {words!r}, expected {lab.text([*prompt, *expected])!r}",
    )
    lab.verify(player)


def _generate(player: Player, first: dict[int, list[int]], count: int) -> dict[int, list[int]]:
    """Decode each prompt, and continue each sequence greedily."""
    generated: dict[int, list[int]] = {seq: [] for seq in first}
    feeds = first
    while len(next(iter(generated.values()))) < count:
        player.decode(feeds)
        rows = player.steps[-1].logits
        for seq, (_, logits) in zip(generated, sorted(rows.items()), strict=True):
            generated[seq].append(int(np.argmax(logits)))
        feeds = {seq: tokens[-1:] for seq, tokens in generated.items()}
    return generated


SCENARIO = Scenario(
    id="story",
    kind="fix",
    claim="A trained model continues its text word for word after a defragmentation.",
    issue="ollama/ollama#7545",
    run=run,
    model="test",
    settings=(CACHES[0], CACHES[3]),
)
