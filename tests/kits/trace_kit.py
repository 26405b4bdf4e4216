"""Record a script on a simulated library."""

from __future__ import annotations

from pathlib import Path

from fakes.simulated import SimulatedNative

from pyllamakv.scenarios import synthetic_models
from pyllamakv.traces import script, script_player, trace
from pyllamakv.traces.script_session import ScriptSession

STORY = """
# two sequences, one leaves
{"op": "context", "n_ctx": 64, "n_ubatch": 16, "n_seq_max": 4}
{"op": "decode", "feed": {"0": 16, "1": 16}, "interleave": true}
{"op": "copy", "seq": 0, "into": 2, "to": 4}
{"op": "save", "seq": 1, "as": "kept"}
{"op": "remove", "seq": 1}
{"op": "shift", "seq": 0, "from": 8, "by": 2}
{"op": "snapshot", "label": "holes"}
{"op": "defrag"}
{"op": "restore", "seq": 1, "as": "kept"}
{"op": "batch", "tokens": [5, 6, 7], "seq": [0, [0, 3], 1], "logits": "all"}
{"op": "step", "seq": 2, "token": 9}
{"op": "advance", "steps": [[1, 2], [3, 4]], "seq": [0, 1]}
{"op": "decode", "feed": {"0": 60}, "expect": "no-slot"}
{"op": "note", "text": "still there"}
"""


def record(path: Path, text: str = STORY, native=None) -> Path:
    """Play a script and record it."""
    session = ScriptSession(native or SimulatedNative())
    recorder = trace.Recorder(
        path, trace.current_head("simulated", synthetic_models.model("tiny"), {}), session
    )
    try:
        script_player.play(script.parse(text.splitlines()), session, recorder.observe)
    finally:
        recorder.close()
        session.close()
    return path
