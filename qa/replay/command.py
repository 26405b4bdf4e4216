"""`python -m qa replay`: compare the eviction policies of `PrefixCache` on traffic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, get_args

import typer

from pyllamakv.cache.eviction_policy import EvictionPolicyName, checked
from pyllamakv.errors import UsageError
from qa import summary
from qa.replay import agent_workload, replay_figures, shifting_workload
from qa.replay.agent_workload import AgentTraffic
from qa.replay.replayed_request import BLOCK, ReplayedRequest, read_trace
from qa.replay.shifting_workload import ShiftingTraffic

if TYPE_CHECKING:
    from qa.bench.figure import Figure

app = typer.Typer(add_completion=False)

#: Variable with the path of a trace, if ``--trace`` is not given.
VARIABLE: Final = "PYLLAMAKV_REQUEST_TRACE"
_NAMES: Final = ", ".join(get_args(EvictionPolicyName))
_PERCENT: Final = ", ".join(map(str, replay_figures.CAPACITIES))


@app.command()
def replay(
    policies: Annotated[
        list[str] | None,
        typer.Argument(metavar="[POLICY]…", help=f"{_NAMES}; default: all."),
    ] = None,
    *,
    trace: Annotated[
        Path | None, typer.Option(help=f"Trace of requests; default: ${VARIABLE}.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Maximum requests of the trace; default: all.")
    ] = 0,
    skip: Annotated[int, typer.Option(min=0, help="Requests of the trace to skip.")] = 0,
    capacity: Annotated[
        list[int] | None,
        typer.Option(min=1, max=100, help=f"Percent of the unique cells; default: {_PERCENT}."),
    ] = None,
    agents: Annotated[int, typer.Option(min=1, help="Number of generated agents.")] = 160,
    shifting: Annotated[
        int, typer.Option(min=0, help="Prompts over documents whose popularity shifts; 0: none.")
    ] = ShiftingTraffic.requests,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of both.")] = 1,
    write: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay generated traffic, and a trace if there is one, through `PrefixCache`.

    Agents repeat their history; prompts over documents shift in popularity.

    No model is evaluated, and host memory has no pages. Exits with 1 if the default policy reuses
    less than 0.98 of LRU, or than 1.4 or 1.05 times as much in small caches of a trace.
    """
    from pyllamakv.cli import progress_bar

    chosen = tuple(map(checked, policies or get_args(EvictionPolicyName)))
    path = trace or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    traffic = AgentTraffic(agents=agents, seed=seed)
    workloads: dict[str, tuple[list[ReplayedRequest], int]] = {
        "agents": (agent_workload.generate(traffic), agent_workload.CELL)
    }
    if shifting:
        documents = ShiftingTraffic(requests=shifting, seed=seed)
        workloads["shifting"] = shifting_workload.generate(documents), shifting_workload.CELL
    if path is not None:
        workloads[path.stem] = read_trace(path, requests, skip), BLOCK
    elif requests or skip:
        msg = f"--requests and --skip limit a trace: name one with --trace or ${VARIABLE}"
        raise UsageError(msg)
    found: list[Figure] = []
    percents = tuple(capacity or replay_figures.CAPACITIES)
    with progress_bar.progress() as progress:
        for name, (many, tokens) in workloads.items():
            total = len(many) * (len({"lru", *chosen}) * len(percents) + 1)
            done = 0

            def tick(name: str = name, total: int = total) -> None:
                nonlocal done
                done += 1
                # A replay that lacks sequences is repeated.
                progress(name, min(done, total), total)

            found += replay_figures.figures(
                name,
                many,
                tokens,
                policies=chosen,
                capacities=percents,
                least=replay_figures.LEAST_OF_TRACE if path and name == path.stem else None,
                tick=tick,
            )
    words = ["python -m qa replay", *(policies or [])]
    words += [f"--trace {path.name}"] if path is not None else []
    words += [f"--requests {requests}"] if requests else []
    words += [f"--skip {skip}"] if skip else []
    words += [f"--capacity {each}" for each in capacity or ()]
    words += [f"--agents {agents}"] if agents != AgentTraffic.agents else []
    words += [f"--shifting {shifting}"] if shifting != ShiftingTraffic.requests else []
    words += [f"--seed {seed}"] if seed != AgentTraffic.seed else []
    dated = [each.dated(" ".join(words)) for each in found]
    summary.report(dated, write, as_json=as_json)
    if any(each.met is False for each in dated):
        raise typer.Exit(1)
