"""Record a run that fails on stock llama.cpp, and replay it on patched, where it succeeds.

    python examples/record_and_replay.py [MODEL.gguf [DIRECTORY]]

Any Python code that uses a context can be recorded. A trace has one row per operation with its
result. The replay prints the first row with another result. Timelines of both replays are written
to the directory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models
from pyllamakv.traces import playback, replay, trace
from pyllamakv.view import drawing, timeline_drawing


def serve(context: kv.Context) -> None:
    """Serve three clients; one leaves, and a fourth finds no slot."""
    *clients, late = (context.sequence() for _ in range(4))
    for turn in range(16):
        context.decode([client.feed([3 + turn] * 5) for client in clients])
    clients[1].remove()
    try:
        context.decode(late.feed(list(range(3, 51))))
    except kv.NoKVSlot as error:
        print(f"recorded: no slot for {error.n_tokens} tokens with {error.stats.free} cells free")


def main(path: str, folder: Path) -> None:
    """Record on stock, and replay on stock and patched."""
    recorded = folder / "stock.jsonl"
    with (
        kv.open("0.3.9+stock") as library,
        library.load_model(path) as model,
        model.context(n_ctx=256, n_batch=256, n_ubatch=64, n_seq_max=4) as context,
        kv.record(context, recorded) as recording,
    ):
        serve(context)
    print(f"{recording.rows} rows in {recorded.name}")

    head, lines = trace.read(recorded)
    for side in ("stock", "patched"):
        replayed = replay.replay_on_variant(f"0.3.9+{side}", head, lines, model=path)
        picture = folder / f"{side}.svg"
        timeline = playback.play_timeline(recorded, f"0.3.9+{side}", path)
        picture.write_text(
            drawing.svg(timeline_drawing.paint(timeline, f"One client of three leaves: {side}")),
            encoding="utf-8",
        )
        print(f"{side}: {replayed.rows} rows played, {picture.name} drawn")
        for divergence in replayed.divergences:
            print(f"  {divergence}")


if __name__ == "__main__":
    where = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp())
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic_models.model("bytes")), where)
