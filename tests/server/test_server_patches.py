"""Test that patches of a server are applied after those of its variant, or have a reason."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import projector_kit
import pytest
from patching_kit import SeriesSandbox, code, numbered

from pyllamakv.errors import NoPortApplies, NotBuilt, RequestFailed, UsageError
from pyllamakv.home import home
from pyllamakv.patching import apply, series
from pyllamakv.scenarios import synthetic_models
from pyllamakv.server import server_patches
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_client import ServerClient
from pyllamakv.server.server_lab import MODELS, complete, in_parallel
from pyllamakv.server.server_process import ServerProcess
from pyllamakv.source import lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pyllamakv.server.server_patches import ServerSources

STOCK = {"src/a.cpp": numbered(20), "tools/server/server.cpp": numbered(20)}
COUNTED = {**STOCK, "src/a.cpp": numbered(20, l9="count")}
SHOWN = {**COUNTED, "tools/server/server.cpp": numbered(20, l9="show")}


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return a patch of the library, and one of the server that requires it."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", STOCK)
    bench.add_patch("count", {"0.3.1": (STOCK, COUNTED)})
    bench.add_patch("other", {"0.3.1": (COUNTED, {**COUNTED, "src/b.cpp": b"other\n"})})
    bench.add_patch("show", {"0.3.1": (COUNTED, SHOWN)}, requires=("count",), target="server")
    return bench


def chosen(bench: SeriesSandbox, *names: str, release: str = "0.3.1") -> ServerSources:
    """Choose the patches of a server of a release."""
    found = series.load(bench.folder)
    return server_patches.choose(
        bench.releases[release], names or None, series=found, store=bench.store
    )


def read(bench: SeriesSandbox, tree: str) -> dict[str, bytes | None]:
    """Return the files of a tree."""
    return dict(bench.store.read_many(tree, ["src/a.cpp", "tools/server/server.cpp"]))


def test_patches_of_the_server_follow_those_of_the_variant(bench: SeriesSandbox) -> None:
    """The tree has the changes of both; nothing is omitted."""
    found = chosen(bench)
    assert found.patches == ("show",)
    assert not found.left_out
    assert read(bench, found.tree) == SHOWN


@pytest.mark.slow
def test_server_patch_without_its_required_patch_is_left_out(bench: SeriesSandbox) -> None:
    """The tree is that of the variant, and the reason names the required patch."""
    found = chosen(bench, "other")
    assert found.patches == ()
    assert found.left_out == {"show": "requires count, which is not applied here"}
    assert read(bench, found.tree) == STOCK


@pytest.mark.slow
def test_server_patch_without_a_port_is_left_out(bench: SeriesSandbox) -> None:
    """The server is built without the patch, with the reason."""
    bench.add_release("0.3.2", {**STOCK, "tools/server/server.cpp": b"rewritten\n"})
    found = chosen(bench, "count", release="0.3.2")
    assert found.patches == ()
    assert "server.cpp" in found.left_out["show"]
    assert read(bench, found.tree)["src/a.cpp"] == COUNTED["src/a.cpp"]


@pytest.mark.slow
def test_a_carried_patch_is_named(bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the base of its port; patches that apply strictly are not listed."""
    old = {**STOCK, "common/arg.cpp": code("first") + code("second")}
    new = {**COUNTED, "common/arg.cpp": code("first", "fix(a);") + code("second")}
    bench.add_release("0.3.4", old)
    near = old["common/arg.cpp"].replace(b"first_7();", b"first_7(a);")
    bench.add_release("0.3.5", {**old, "common/arg.cpp": near}, "2025-01-02")
    bench.add_patch("switch", {"0.3.4": ({**old, **COUNTED}, new)}, requires=("count",),
                    target="server", marker=("common/arg.cpp", "first_7"))  # fmt: skip
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    found = chosen(bench, release="0.3.5")
    assert found.patches == ("show", "switch")
    assert found.carried == {"switch": "0.3.4"}
    assert not chosen(bench, release="0.3.4").carried


@pytest.mark.slow
def test_server_patch_is_applied_after_its_required_one(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied by name with the required one, and carried after it."""
    server = "tools/server/server.cpp"
    near = {**STOCK, server: numbered(20, l14="upstream")}
    bench.add_release("0.3.2", near, "2025-01-02")
    both = {**SHOWN, server: numbered(20, l9="show", l11="more")}
    bench.add_patch("more", {"0.3.1": (SHOWN, both)}, requires=("show",), target="server")
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    found = apply.apply(
        bench.releases["0.3.1"], ["more"], series=series.load(bench.folder), store=bench.store
    )
    assert found.patches == ("count", "show", "more")
    carried = chosen(bench, release="0.3.2")
    assert (carried.patches, carried.carried) == (("show", "more"), {"more": "0.3.1"})
    assert read(bench, carried.tree)[server] == numbered(20, l9="show", l11="more", l14="upstream")


@pytest.mark.slow
def test_server_patch_for_other_releases_is_not_reported(bench: SeriesSandbox) -> None:
    """It is not mentioned."""
    toml = bench.folder / "show" / "patch.toml"
    toml.write_text(toml.read_text("utf-8").replace('releases = ""', 'releases = ">0.3.1"'))
    found = chosen(bench)
    assert (found.patches, found.left_out) == ((), {})


@pytest.mark.slow
def test_stock_gets_no_patch_of_the_server(bench: SeriesSandbox) -> None:
    """One without requirements is not applied either."""
    bench.add_patch("alone", {"0.3.1": (STOCK, {**STOCK, "src/c.cpp": b"c\n"})}, target="server")
    found = server_patches.choose(
        bench.releases["0.3.1"], (), series=series.load(bench.folder), store=bench.store
    )
    assert found.patches == ()
    assert found.tree == bench.store.tree_of(bench.releases["0.3.1"])


@pytest.mark.slow
def test_inapplicable_library_patch_raises_no_port_applies(bench: SeriesSandbox) -> None:
    """Errors of applying are not converted."""
    bench.add_release("0.3.3", {"src/a.cpp": b"rewritten\n"})
    with pytest.raises(NoPortApplies):
        chosen(bench, release="0.3.3")


@pytest.mark.slow
def test_the_digest_changes_with_ports_and_shared_files(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not change with the patches of the libraries."""
    shared = {**SHOWN, "tools/server/h.h": b"h\n"}
    bench.add_patch(
        "more", {"0.3.1": (SHOWN, {**shared, "src/d.cpp": b"d\n"})},
        shared=("tools/server/h.h",), target="server",
    )  # fmt: skip
    load = series.load
    monkeypatch.setattr(server_patches.series_module, "load", lambda: load(bench.folder))
    digests = [server_patches.digest()]
    with bench.file("count", "0.3.1").open("ab") as file:
        file.write(b"\n")
    assert server_patches.digest() == digests[0]
    with (bench.folder / "shared" / "tools" / "server" / "h.h").open("ab") as file:
        file.write(b"more\n")
    digests.append(server_patches.digest())
    toml = bench.folder / "show" / "patch.toml"
    toml.write_text(toml.read_text("utf-8").replace("Because", "Since"))
    digests.append(server_patches.digest())
    assert len(set(digests)) == 3


def test_shipped_server_patches_change_only_the_server() -> None:
    """They are listed separately from those of the libraries, and change only the server."""
    found = series.load()
    assert [patch.id for patch in found.server] == [
        "server-metrics",
        "server-defrag-thold",
        "server-park",
        "server-safety",
        "server-reuse",
    ]
    assert not set(found.order) & {patch.id for patch in found.server}
    paths = {path for patch in found.server for port in patch.ports for path in port.patch.paths}
    assert all(path.startswith(("tools/server/", "common/")) for path in paths)


def metrics(url: str) -> dict[str, float]:
    """Return the metrics of a server by name."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def serve(folder: Path, spec: str, *arguments: str, **variables: str) -> ServerProcess:
    """Start a server of a variant with two slots that share 4096 cells, or skip."""
    pytest.importorskip("httpx")
    try:
        built = find_server(spec)
    except NotBuilt as error:
        pytest.skip(str(error))
    words = ["-m", str(synthetic_models.model("bytes")), "--host", "127.0.0.1", "--port", "0"]
    words += ["-t", "1", "-np", "2", "-c", "4096", "-ub", "512", "--metrics", "--slots"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    return ServerProcess(
        built.program, [*words, "--slot-save-path", str(folder), *arguments], env=kept | variables
    )


def decode_beside_a_gap(client: ServerClient) -> None:
    """Leave 130 used cells after 1990 freed ones, and decode one token with them."""
    options = {"cache_prompt": True}
    client.complete([70] * 1990, 1, id_slot=0, **options)
    client.complete([80] * 130, 1, id_slot=1, **options)
    client.post("/slots/0?action=erase", {})
    client.complete([*[80] * 130, 90], 1, id_slot=1, **options)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.3.9", "0.3.36", "b11549"])
def test_server_metrics_count_one_search_per_micro_batch(tmp_path: Path, release: str) -> None:
    """Each decode of one micro-batch searches for cells once, and no search fails."""
    with serve(tmp_path, f"{release}+patched") as server, ServerClient(server.url) as client:
        before = metrics(server.url)
        found = complete(client, [70] * 50, 20, ignore_eos=True)
        after = metrics(server.url)
    assert len(found.tokens) == 20
    done = {name: after[name] - before.get(name, 0) for name in after}
    assert done["llamacpp:n_decode_total"] == done["llamacpp:kv_slot_searches_total"] == 20
    assert after["llamacpp:kv_slot_failures_total"] == 0
    assert after["llamacpp:kv_defragmentation_cells_total"] == 0
    assert after["llamacpp:kv_defragmentation_seconds_total"] >= 0


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "moved"),
    [
        ((), {}, 0),
        ((), {"LLAMA_KV_DEFRAG_THOLD": "0.5"}, 130),
        (("--defrag-thold", "0.5"), {}, 130),
        ((), {"LLAMA_ARG_DEFRAG_THOLD": "0.5"}, 130),
        # The option is a choice of the program, even if it means never.
        (("--defrag-thold", "-1"), {"LLAMA_KV_DEFRAG_THOLD": "0.5"}, 0),
    ],
    ids=["default", "variable", "option", "variable of the option", "option and variable"],
)
def test_server_defragments_at_its_threshold(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], moved: int
) -> None:
    """The option works again, and the metrics have the moved cells."""
    words = ("--kv-unified", "--cache-ram", "0", *arguments)
    with serve(tmp_path, "0.3.36+patched", *words, **variables) as server:
        with ServerClient(server.url) as client:
            decode_beside_a_gap(client)
        found = metrics(server.url)
    assert found["llamacpp:kv_defragmentation_cells_total"] == moved
    assert found["llamacpp:kv_defragmentations_total"] == (moved > 0)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("value", ["50%", "nan", "1.5"])
def test_an_invalid_threshold_is_refused(tmp_path: Path, value: str) -> None:
    """It would never be reached."""
    with (
        pytest.raises(UsageError, match="expected a number up to 1"),
        serve(tmp_path, "0.3.36+patched", "--defrag-thold", value),
    ):
        pass


@pytest.mark.native
@pytest.mark.slow
def test_the_server_of_an_old_release_defragments(tmp_path: Path) -> None:
    """Through 0.3.16, its threshold is 0.1 by default; the update before the next decode moves."""
    with serve(tmp_path, "0.3.9+patched") as server, ServerClient(server.url) as client:
        decode_beside_a_gap(client)
        client.complete([*[80] * 130, 90, 91], 1, id_slot=1, cache_prompt=True)
        found = metrics(server.url)
    assert found["llamacpp:kv_defragmentations_total"] == 1
    assert found["llamacpp:kv_defragmentation_cells_total"] == 130


@pytest.mark.native
@pytest.mark.slow
def test_stock_server_has_no_cell_metrics(tmp_path: Path) -> None:
    """Its server is upstream's."""
    with serve(tmp_path, "0.3.9+stock") as server:
        assert not any("kv_slot" in name or "kv_defrag" in name for name in metrics(server.url))


@pytest.mark.native
@pytest.mark.slow
def test_a_model_without_cells_has_no_cell_metrics(tmp_path: Path) -> None:
    """Its memory is a state of each slot."""
    with (
        serve_few_cells(tmp_path, model="recurrent") as server,
        ServerClient(server.url) as client,
    ):
        client.complete([70] * 50, 4)
        found = metrics(server.url)
    assert not any("kv_" in name for name in found)
    assert found["llamacpp:parks_total"] == 0


def serve_few_cells(
    folder: Path, *arguments: str, model: str = "full", cells: int = 512, **variables: str
) -> ServerProcess:
    """Start a patched server whose four slots share a cache, or skip."""
    path = synthetic_models.generate(MODELS[model], home() / "models")
    words = ("-m", str(path), "-np", "4", "-c", str(cells), "--kv-unified", *arguments)
    return serve(folder, "b11549+patched", *words, **variables)


def ask_together(url: str, count: int = 8, n_predict: int = 440) -> list[int]:
    """Send requests that nearly fill the cache at the same time; return the status of each."""

    def ask(client: ServerClient, token: int) -> int:
        found = complete(client, [token] * 40, n_predict, ignore_eos=True)
        assert len(found.tokens) == n_predict
        return 200

    found = in_parallel(url, range(70, 70 + count), 4, ask)
    assert all(isinstance(each, int | RequestFailed) for each in found), found
    return [each if isinstance(each, int) else getattr(each, "code", 0) for each in found]


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("value", ["-1", "many", "1.5", "9999999999999"])
def test_an_invalid_limit_of_parked_requests_is_ignored(tmp_path: Path, value: str) -> None:
    """The log names the variable and the value; requests are parked as by default."""
    with serve_few_cells(tmp_path, LLAMA_SERVER_PARK_MIB=value) as server:
        assert f"LLAMA_SERVER_PARK_MIB is '{value}', which is ignored; expected a number" in (
            "\n".join(server.log)
        )
        assert ask_together(server.url) == [200] * 8
        assert metrics(server.url)["llamacpp:parks_total"] > 0


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ((), {"LLAMA_SERVER_PARK_MIB": "0"}),
        (("--cache-ram", "0"), {}),
        (("--swa-full",), {}),
        (("--context-shift",), {}),
    ],
    ids=["limit", "default limit", "all cells of a window", "shifts of a window"],
)
def test_requests_that_are_not_parked_end_as_on_stock(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    """Those at the same time end with the error of upstream; the limit is --cache-ram if unset."""
    with serve_few_cells(tmp_path, *arguments, model="sliding", **variables) as server:
        assert 500 in ask_together(server.url)
        assert metrics(server.url)["llamacpp:parks_total"] == 0


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft model", "n-grams", "projector"])
def test_servers_that_evaluate_more_than_tokens_park_nothing(tmp_path: Path, kind: str) -> None:
    """Requests that do not fit together end with the error of upstream."""
    if kind == "draft model":
        draft = synthetic_models.generate(MODELS["other"], home() / "models")
        words = ["-md", str(draft), "--spec-type", "draft-simple"]
    elif kind == "n-grams":
        words = ["--spec-type", "ngram-simple"]
    else:
        words = ["--mmproj", str(projector_kit.write(tmp_path / "mm.gguf", MODELS["full"].n_embd))]
    with serve_few_cells(tmp_path, *words) as server:
        assert 500 in ask_together(server.url)
        assert metrics(server.url)["llamacpp:parks_total"] == 0


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
def test_embeddings_without_cells_begin_again(tmp_path: Path, pooling: str) -> None:
    """All that fit alone are answered, and nothing of them remains in host memory."""

    def embed(client: ServerClient, token: int) -> int:
        return len(client.post("/embeddings", {"content": [token] * 262}))

    words = ("--embeddings", "--pooling", pooling)
    with serve_few_cells(tmp_path, *words) as server:
        found = in_parallel(server.url, range(70, 102), 4, embed)
        after = metrics(server.url)
    assert found == [1] * 32
    assert after["llamacpp:park_failures_total"] == 0
    assert after["llamacpp:parked_slots"] == after["llamacpp:parked_bytes"] == 0


@pytest.mark.native
@pytest.mark.slow
def test_a_request_above_the_limit_fails_alone(tmp_path: Path) -> None:
    """With status 503, while others are answered; 1 MiB is less than two sequences."""
    wide = ("-ctk", "f32", "-ctv", "f32", "-fa", "off", "-ub", "32")
    with serve_few_cells(
        tmp_path, *wide, model="sliding", cells=1024, LLAMA_SERVER_PARK_MIB="1"
    ) as server:
        found = ask_together(server.url, n_predict=800)
        assert set(found) == {200, 503}, found
        after = metrics(server.url)
        assert after["llamacpp:park_failures_total"] == found.count(503)
        assert after["llamacpp:parked_slots"] == after["llamacpp:parked_bytes"] == 0
        # The server is as before.
        assert ask_together(server.url, count=1) == [200]


@pytest.mark.native
@pytest.mark.slow
def test_ten_thousand_parks_keep_the_resident_memory(tmp_path: Path) -> None:
    """It stays the same after the first tenth, and no request remains parked."""
    sizes: dict[int, int] = {}

    def ask(client: ServerClient, token: int) -> None:
        client.complete([token] * 10, 240, n_probs=0)

    words = ("--cache-ram", "0")
    with serve_few_cells(tmp_path, *words, cells=256, LLAMA_SERVER_PARK_MIB="64") as server:
        while (parks := max(sizes, default=0)) < 10_000:
            assert set(in_parallel(server.url, range(70, 110), 4, ask)) == {None}
            after = metrics(server.url)
            status = Path(f"/proc/{server.pid}/status").read_text("utf-8")
            sizes[int(after["llamacpp:parks_total"])] = int(
                re.findall(r"VmRSS:\s+(\d+) kB", status)[0]
            )
            assert max(sizes) > parks
    assert after["llamacpp:parks_total"] == after["llamacpp:resumes_total"]
    assert after["llamacpp:parked_slots"] == after["llamacpp:parked_bytes"] == 0
    assert max(sizes.values()) - max(size for at, size in sizes.items() if at < 1_000) < 4096


@pytest.mark.native
@pytest.mark.slow
def test_a_server_with_parked_requests_is_closed(tmp_path: Path) -> None:
    """No process remains; `/slots` showed the parked request, and its client gets an error."""
    with serve_few_cells(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_parallel, server.url, [70, 71, 72, 73] * 50, 4, _ask_long)
        until = time.monotonic() + 60
        with ServerClient(server.url) as client:
            parked: list[dict[str, Any]] = []
            while not parked and time.monotonic() < until:
                parked = [slot["park"] for slot in client.slots() if slot["park"]["is_parked"]]
        assert parked and parked[0]["n_tokens"] > 0 and parked[0]["n_bytes"] > 0
        assert parked[0]["n_parks"] > 0
        server.close()
        assert isinstance(waiting.result()[-1], Exception)
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)


def _ask_long(client: ServerClient, token: int) -> None:
    complete(client, [token] * 40, 440, ignore_eos=True)
