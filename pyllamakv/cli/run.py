"""Run a decode script, or prompts on a model: `pyllamakv run`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyllamakv.cli.options import Json, Model, Threads, VariantName
from pyllamakv.cli.stdout import note, to_json, write_json, write_lines
from pyllamakv.errors import UsageError
from pyllamakv.scenarios import cell_picture
from pyllamakv.traces import variant_selection

if TYPE_CHECKING:
    from pyllamakv.traces.script import Line

#: Options that apply to --prompt only.
_OF_PROMPTS = ("max_tokens", "n_ctx", "threads", "flash_attn", "temperature", "seed")

app = typer.Typer(add_completion=False)


Script = Annotated[
    Path | None, typer.Argument(metavar="SCRIPT", help="Decode script (JSON lines) or trace.")
]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text to complete; repeatable.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Maximum new tokens per prompt.")
]
ContextSize = Annotated[int, typer.Option("--n-ctx", min=0, help="Context size; 0: as needed.")]
FlashAttention = Annotated[bool, typer.Option("--flash-attn", help="Use flash attention.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0: greedy.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=2**32 - 2, help="Random seed; default: a new one."),
]


@app.command()
def command(
    context: typer.Context,
    script: Script = None,
    variant: VariantName = "",
    model: Model = "",
    prompt: Prompts = None,
    max_tokens: MaxTokens = 64,
    n_ctx: ContextSize = 0,
    threads: Threads = 1,
    flash_attn: FlashAttention = False,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Run a decode script, or complete prompts in one KV cache."""
    run(context, script)


def run(context: typer.Context, script: Path | None, trace: Path | None = None) -> None:
    """Run a script or the prompts of a command's parameters; record it to ``trace`` if given."""
    given = context.params
    variant, model, prompt = given["variant"], given["model"], given["prompt"]
    if (script is None) == (not prompt):
        raise UsageError("pass a script, or --model and at least one --prompt")
    if script is not None:
        _check_options(context)
        _play(script, variant, model, trace, given["as_json"])
        return
    if not model:
        raise UsageError("--prompt needs --model, the path of a GGUF file")
    options: dict[str, Any] = {
        "n_threads": given["threads"],
        "flash_attn": given["flash_attn"],
        "trace": trace,
    }
    if given["temperature"]:
        options |= {"temperature": given["temperature"], "seed": given["seed"]}
    _complete_prompts(
        variant,
        model,
        list(prompt),
        max_tokens=given["max_tokens"],
        n_ctx=given["n_ctx"],
        json_=given["as_json"],
        **options,
    )


def _check_options(context: typer.Context) -> None:
    """Refuse options that a script contains itself, instead of ignoring them."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in _OF_PROMPTS
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        msg = f"{', '.join(given)}: only for --prompt; a script contains its settings"
        raise UsageError(msg)


def _play(path: Path, variant: str, model: str, trace: Path | None, as_json: bool) -> None:
    from contextlib import ExitStack, closing

    from pyllamakv.traces import script_player
    from pyllamakv.traces import trace as traces

    with ExitStack() as stack:
        played = stack.enter_context(variant_selection.open_run(path, variant, model))
        session, recorder = played.session, None
        if trace is not None:
            about = traces.current_head(played.variant, played.model, played.head.environment)
            recorder = stack.enter_context(closing(traces.Recorder(trace, about, session)))

        def observe(line: Line, result: dict[str, Any]) -> None:
            if recorder is not None:
                recorder.observe(line, result)
            if as_json:
                write_json({**line.to_json(), "result": result}, indent=None)
            else:
                _show(line, result, session)

        script_player.play(played.lines, session, observe)


def _show(line: Line, result: dict[str, Any], session: Any) -> None:
    from rich.console import Console

    from pyllamakv.view import cell_drawing

    words = " ".join(f"{key}={to_json(value)}" for key, value in line.arguments.items())
    found = " ".join(
        f"{key}={value}" for key, value in result.items() if key not in ("best", "picture")
    )
    write_lines([f"{line.number:>4} {line.op} {words}", f"       {found}"])
    sys.stdout.flush()
    snapshot = session.player.snapshot() if line.op == "snapshot" else None
    if snapshot is not None:
        label = str(line.arguments.get("label", ""))
        Console().print(cell_drawing.draw(cell_picture.Picture.of(snapshot, label)))


def _complete_prompts(
    variant: str,
    model: str,
    prompts: list[str],
    *,
    max_tokens: int,
    n_ctx: int,
    json_: bool,
    **options: Any,
) -> None:
    import pyllamakv
    from pyllamakv.scenarios import synthetic_models
    from pyllamakv.traces.completion import complete_prompts

    with (
        pyllamakv.open(variant or None) as library,
        library.load_model(synthetic_models.model(model)) as loaded,
    ):
        completions, stats = complete_prompts(
            loaded, prompts, max_tokens=max_tokens, n_ctx=n_ctx, **options
        )
    if json_:
        write_json({"completions": [asdict(each) for each in completions], "cache": stats})
        return
    for each in completions:
        write_lines([f"{each.prompt}{each.text}", ""])
    note(f"cache: {stats['used']} of {stats['size']} cells used")
