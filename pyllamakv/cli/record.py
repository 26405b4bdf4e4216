"""Run a decode script or prompts, and record a trace: `pyllamakv trace record`."""

from __future__ import annotations

import typer

from pyllamakv.cli import run
from pyllamakv.cli.options import Json, Model, Threads, TraceFile, VariantName

app = typer.Typer(add_completion=False)


@app.command()
def command(
    context: typer.Context,
    output: TraceFile,
    script: run.Script = None,
    variant: VariantName = "",
    model: Model = "",
    prompt: run.Prompts = None,
    max_tokens: run.MaxTokens = 64,
    n_ctx: run.ContextSize = 0,
    threads: Threads = 1,
    flash_attn: run.FlashAttention = False,
    temperature: run.Temperature = 0.0,
    seed: run.Seed = None,
    as_json: Json = False,
) -> None:
    """Run a decode script, or complete prompts, and record a trace.

    The trace includes an operation that fails.
    """
    run.run(context, script, output)
