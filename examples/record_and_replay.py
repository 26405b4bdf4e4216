"""Record a run on stock llama.cpp, where it fails, and replay it on patched, where it does not.

    python examples/record_and_replay.py [MODEL.gguf [FOLDER]]

What is recorded is any Python that uses a context. The trace says row by row what was done and what
came of it; replayed, it shows the first row that comes out otherwise. A timeline of each side is
drawn into the folder as well.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pyllamakv as kv
from pyllamakv.harness import drawing, film, replaying, synthetic, timeline, trace


def serve(context: kv.Context) -> int:
    """Answer three clients in turn until a new one finds no cells; return how often that was."""
    failures = 0
    clients = [context.sequence() for _ in range(4)]
    for turn in range(40):
        context.decode(
            [client.feed([3 + (turn + n) % 20] * 2) for n, client in enumerate(clients[:3])]
        )
    clients[1].remove()
    try:
        context.decode(clients[3].feed(list(range(3, 51))))
    except kv.NoKVSlot as error:
        print(f"recorded: no slot for {error.n_tokens} tokens with {error.stats.free} cells free")
        failures += 1
    return failures


def draw(path: Path, title: str) -> Path:
    """Draw the timeline of a trace beside it."""
    _, lines = trace.read(path)
    picture = path.with_suffix(".svg")
    picture.write_text(drawing.svg(timeline.paint(film.of_trace(lines, title))), encoding="utf-8")
    return picture


def main(path: str, folder: Path) -> None:
    """Record on stock, replay on both."""
    recorded = folder / "stock.jsonl"
    with (
        kv.open("0.3.9+stock") as library,
        library.load_model(path) as model,
        model.context(n_ctx=256, n_batch=256, n_ubatch=64, n_seq_max=4) as context,
        kv.record(context, recorded) as recording,
    ):
        serve(context)
    print(f"{recording.rows} rows in {recorded.name}, timeline in {draw(recorded, 'stock').name}")

    head, lines = trace.read(recorded)
    for spec in ("0.3.9+stock", "0.3.9+patched"):
        replay = replaying.on(spec, head, lines, model=path)
        print(f"{spec}: {replay.rows} rows played")
        for divergence in replay.divergences:
            print(f"  {divergence}")


if __name__ == "__main__":
    where = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp())
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic.model("bytes")), where)
