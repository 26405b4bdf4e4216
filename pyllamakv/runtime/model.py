"""Load a model: its facts, its tokens, and the contexts made of it with checked parameters."""

from __future__ import annotations

import os
import secrets
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pyllamakv import content_digest
from pyllamakv.binding import arguments
from pyllamakv.binding.owner import LoadedModel, Owner, free_quietly
from pyllamakv.binding.protocol import (
    Capability,
    ContextParams,
    DefragMover,
    DefragPlan,
    ModelParams,
    Pooling,
)
from pyllamakv.closing import ClosedOnExit
from pyllamakv.cpus import usable_cpus
from pyllamakv.errors import ModelError, Unsupported, UsageError
from pyllamakv.runtime import adapter, chat_template, detokenizer, embedding, json_schema
from pyllamakv.runtime.backing import choose, leave, new_context, resume
from pyllamakv.runtime.batch import as_int32
from pyllamakv.runtime.context import Context
from pyllamakv.runtime.defrag_policy import DefragCosts, checked
from pyllamakv.runtime.ggml_types import cache_type
from pyllamakv.runtime.gguf_file import check_file
from pyllamakv.runtime.memory_estimate import check_memory, worker_pid
from pyllamakv.runtime.sampler import Sampler, params_from_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyllamakv.binding.protocol import ModelHandle, ModelInfo, Native
    from pyllamakv.runtime.adapter import Adapter
    from pyllamakv.runtime.backing import BackingChoice, KeepName
    from pyllamakv.runtime.defrag_policy import PolicyName
    from pyllamakv.runtime.embedding import PoolingName
    from pyllamakv.runtime.gguf_file import ModelFile
    from pyllamakv.runtime.sampler import LogitsProcessor

#: Environment variable with the default number of compute threads, and the maximum of ggml.
_THREADS = "PYLLAMAKV_THREADS"
_MOST_THREADS = 512


class Model(LoadedModel, ClosedOnExit):
    """A loaded model. `OpenLibrary.load_model` creates it."""

    _internal = frozenset(("handle", "native", "on_host", "origin", "owner", "schema_tokens"))

    def __init__(
        self,
        native: Native,
        handle: ModelHandle,
        file: ModelFile,
        parent: Owner[int],
        *,
        isolated: bool,
        on_host: bool = True,
    ) -> None:
        self.native = native
        #: The cache is in the memory of this machine, so its size can be checked.
        self.on_host = on_host
        self.handle = handle
        self.file = file
        self.isolated = isolated
        self.owner: Owner[Any] = Owner(
            handle, partial(free_quietly, native.model_free), "model", parent
        )
        #: A random name of this object, in what is saved and restored within it.
        self.origin = secrets.token_hex(8)
        self._digest: str | None = None
        #: The properties of the model.
        self.info: ModelInfo = native.model_info(handle)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._ends: dict[int, bool] = {}

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self.file.path

    def digest(self, progress: Callable[[str, int, int | None], None] | None = None) -> str:
        """Return the digest of all bytes of the model's files, 64 hexadecimal digits.

        Everything that is kept outside of this object (saved sequences, stores, kept files) has it.
        The first call reads the files, unless the data directory has their digest. ``progress`` is
        called with a description, the bytes done, and their total. Raises ModelUnverified if a file
        changed after the load; later calls, only if it changed in place.
        """
        if progress is not None and not callable(progress):
            raise arguments.wrong_type("progress", progress, "a function, or None")
        if self._digest is None:
            self._digest = content_digest.compute(self.file.records, progress)
        # The weights may be mapped: a change in place is a change of the model in use.
        content_digest.check_not_written(self.file.records)
        return self._digest

    def meta(self, key: str) -> str | None:
        """Return a metadata value of the file as text, or None."""
        _ = self.owner.raw
        return self.native.model_meta(self.handle, arguments.c_text("key", key))

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the tokens of a text. ``add_special`` adds the model's first token.

        With ``parse_special``, text that spells a control token becomes that token. Raises
        Unsupported if the model has no vocabulary.
        """
        arguments.text("text", text)
        add_special = arguments.flag("add_special", add_special)
        parse_special = arguments.flag("parse_special", parse_special)
        self._need_vocab()
        return self.native.tokenize(
            self.handle, detokenizer.encode(text), add_special, parse_special
        )

    def detokenize(self, tokens: Iterable[int], special: bool = False) -> str:
        """Return the text of tokens. Invalid UTF-8 becomes U+FFFD. Raises as `piece`."""
        numbers = as_int32(tokens, "tokens").tolist()
        special = arguments.flag("special", special)
        return detokenizer.decode(b"".join(self.piece(token, special) for token in numbers))

    @property
    def chat_template(self) -> str | None:
        """Return the Jinja template for chats in the model file, or None."""
        return self.meta(chat_template.KEY)

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a chat, as transformers renders it.

        A message has a ``role`` and a ``content``. ``tools`` are functions with JSON schemas, in
        the format of OpenAI. ``add_generation_prompt`` appends the start of a reply. ``template``
        replaces that of the model; ``variables`` are passed to it. Raises ChatTemplateError if the
        template is invalid, raises an error, or exceeds a limit; Unsupported if there is none.
        """
        return chat_template.render(
            self,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template=template,
            variables=variables,
        )

    def tokenize_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        *,
        template: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the tokens of a chat; the arguments are those of `apply_chat_template`.

        The template alone decides about special tokens: none is added.
        """
        text = self.apply_chat_template(messages, tools, template=template, **options)
        return self.tokenize(text, add_special=False, parse_special=True)

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of a token. ``special`` includes control tokens.

        Raises UsageError for an unknown token, and Unsupported if the model has no vocabulary.
        """
        if type(token) is not int:
            token = arguments.integer("token", token)
        if special is not False:
            special = arguments.flag("special", special)
        found = self._pieces.get((token, special))
        if found is None:
            self._need_vocab()
            self._check_token(token)
            found = self.native.token_piece(self.handle, token, special)
            self._pieces[token, special] = found
        return found

    def is_eog(self, token: int) -> bool:
        """Return whether a token ends a generation."""
        if type(token) is not int:
            token = arguments.integer("token", token)
        found = self._ends.get(token)
        if found is None:
            _ = self.owner.raw
            self._check_token(token)
            found = self.native.token_is_eog(self.handle, token)
            self._ends[token] = found
        return found

    def load_adapter(self, path: str | os.PathLike[str]) -> Adapter:
        """Load a LoRA adapter of this model from a GGUF file, for `Context.set_adapters`.

        Raises AdapterError if the file is damaged, no adapter, or of another model; Unsupported if
        the release has no adapters.
        """
        return adapter.load(self, path)

    def context(
        self,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int | None = None,
        *,
        n_threads_batch: int | None = None,
        flash_attn: FlashAttn = False,
        type_k: str | int = "f16",
        type_v: str | int = "f16",
        kv_unified: bool = True,
        swa_full: bool = False,
        offload_kqv: bool = True,
        embeddings: bool = False,
        pooling: PoolingName | None = None,
        defrag_thold: float = -1.0,
        defrag_policy: PolicyName = "never",
        defrag_costs: DefragCosts | None = None,
        defrag_plan: Plan | None = None,
        defrag_mover: Mover = "auto",
        defrag_threads: int | None = None,
        defrag_trim: bool = False,
        kv_backing: str | os.PathLike[str] = "heap",
        kv_keep: bool | KeepName = False,
        kv_huge: bool = False,
        adapters: Mapping[Adapter, float] | None = None,
        accept_unverified_model: bool = False,
        guard: Literal["on", "off"] = "on",
    ) -> Context:
        """Create a context.

        ``n_ctx`` is the number of cells, ``n_batch`` the maximum number of tokens per decode,
        ``n_ubatch`` that of a micro-batch, and ``n_seq_max`` the number of sequences. llama.cpp may
        raise or lower them, ``n_batch`` for example to ``n_ctx``: `Context.info` has the results.
        ``n_threads`` None is PYLLAMAKV_THREADS, else the number of CPUs that the process may use
        without those that other threads occupy, chosen again while decodes run; or 1 if contexts
        of this release compute wrong results with several threads each.
        ``flash_attn`` is True or "on", False or "off", or None or "auto" (llama.cpp decides).
        With ``embeddings``, decodes compute embeddings instead of logits. ``pooling`` combines
        those of a sequence: "mean", "cls" (the first token), "last", "rank" (the model's
        classification head), or "none"; None is what the model file names, else "none".
        ``defrag_policy`` defines when the cache is defragmented automatically: "never",
        "on_failure" (of a decode), "threshold" (of the costs in ``defrag_costs``) or "always".
        ``defrag_plan`` "ordered" keeps the order of cells, so that logits equal those of a fresh
        cache bit by bit; "fewest" moves fewer cells. ``defrag_mover`` selects the mover, for tests
        and benchmarks. ``defrag_threads`` limits the threads that move cells. The library
        defragments before a decode if more than the fraction ``defrag_thold`` of the cells is
        unnecessary; 0 is never, but always through 0.3.5. For each of these options, the default
        (None, "auto", -1) leaves the choice to the environment variables of docs/environment.md,
        and `Context.info` has the value in effect. ``defrag_trim`` returns memory that a
        defragmentation freed to the system.

        ``kv_backing`` is "heap", "mmap" or a path. ``kv_keep`` reuses the content of that file
        ("fresh": discards it). ``kv_huge`` requests huge pages. Errors about the file are
        subclasses of KVFileError. ``adapters`` maps LoRA adapters to their scales, and is part of
        the identity of a kept file: see `Context.set_adapters`. A kept file is of one model, which
        its digest identifies; with ``accept_unverified_model``, a file of an unverified model is
        used as well, and by a model that cannot be verified. ``guard``
        "off" disables all checks and the rollback of failed decodes, only in a library opened with
        ``isolated=True``. Raises UsageError or Unsupported (with the name of the parameter),
        ModelUnverified for a kept file, NotEnoughMemory before any allocation, or ContextError if
        the library refuses.
        """
        _ = self.owner.raw
        arguments.choice("guard", guard, ("on", "off"))
        if guard == "off" and not self.isolated:
            msg = (
                "with guard='off', the library may end the process: open the library with "
                "isolated=True"
            )
            raise UsageError(msg)
        policy = checked(defrag_policy)
        accept = arguments.flag("accept_unverified_model", accept_unverified_model)
        chosen = adapter.checked_adapters(self, {} if adapters is None else adapters)
        if defrag_costs is not None:
            arguments.instance("defrag_costs", defrag_costs, DefragCosts, "DefragCosts or None")
        if arguments.flag("defrag_trim", defrag_trim) and kv_backing == "heap":
            msg = "defrag_trim needs mapped memory: pass kv_backing='mmap' or a path"
            raise UsageError(msg)
        params = context_params(
            self.info,
            self.native.about.capabilities,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            n_threads=self._threads() if n_threads is None else n_threads,
            n_threads_batch=n_threads_batch,
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            kv_unified=kv_unified,
            swa_full=swa_full,
            offload_kqv=offload_kqv,
            embeddings=embeddings,
            pooling=embedding.checked_pooling(self, embeddings, pooling),
            defrag_thold=defrag_thold,
            defrag_plan=defrag_plan,
            defrag_mover=defrag_mover,
            defrag_threads=defrag_threads,
            guard=guard == "on",
            backing=choose(self, kv_backing, kv_keep, kv_huge, chosen, accept=accept),
        )
        if self.on_host:
            uneven = self.file.has_partial_layers
            check_memory(self.info, params, uneven=uneven, pid=worker_pid(self))
        adapts = n_threads is n_threads_batch is None and not os.environ.get(_THREADS)
        with self.owner as model:
            handle = new_context(self.native, model, params)
            try:
                context = Context(self, handle, params, adapt_threads=adapts)
            except BaseException:
                free_quietly(self.native.context_free, handle)
                raise
        try:
            if chosen:
                context.start_adapters(chosen)
            context.start_policy(policy, defrag_costs, trims=defrag_trim)
            if context.kv_file:
                resume(context)
            return context
        except BaseException:
            leave(context)
            raise

    def sampler(
        self,
        *,
        processors: Iterable[LogitsProcessor] = (),
        json_schema: Mapping[str, Any] | str | None = None,
        top_logprobs: int | None = None,
        **options: Any,
    ) -> Sampler:
        """Create a sampler in C with the options of `SamplerParams`; see `Sampler`.

        Raises UsageError for an unknown option.
        """
        return Sampler(
            self,
            params_from_options(options),
            processors=processors,
            json_schema=json_schema,
            top_logprobs=top_logprobs,
        )

    @cached_property
    def schema_tokens(self) -> Any:
        """Return the vocabulary in the form for JSON schemas, computed once."""
        return json_schema.compile_tokens(self)

    def close(self) -> None:
        """Free the model after its contexts. A second call does nothing."""
        self.owner.close()

    @property
    def closed(self) -> bool:
        """Whether this model or its library was closed."""
        return self.owner.closed

    def __enter__(self) -> Model:
        _ = self.owner.raw
        return self

    def __repr__(self) -> str:
        return f"<Model {self.file.path.name}{', closed' if self.closed else ''}>"

    def _threads(self) -> int:
        """Return the default number of compute threads."""
        named = os.environ.get(_THREADS, "")
        if named:
            if not (named.isascii() and named.isdigit() and 1 <= int(named) <= _MOST_THREADS):
                msg = f"{_THREADS} must be a number from 1 to {_MOST_THREADS}, not {named!r}"
                raise UsageError(msg)
            return int(named)
        # A worker runs one decode at a time, so its contexts share no counter at once.
        safe = self.isolated or Capability.THREADS in self.native.about.capabilities
        return min(usable_cpus(), _MOST_THREADS) if safe else 1

    def _need_vocab(self) -> None:
        _ = self.owner.raw
        if not self.info.has_vocab:
            msg = "this model has no vocabulary: pass tokens instead of text"
            raise Unsupported(msg, "vocabulary")

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.info.n_vocab:
            msg = (
                f"token {arguments.shown(token)} is out of range: this model has "
                f"0..{self.info.n_vocab - 1}"
            )
            raise UsageError(msg)


def load(
    native: Native,
    path: str | os.PathLike[str],
    parent: Owner[int],
    params: ModelParams,
    *,
    isolated: bool,
    kind: type[Model] = Model,
) -> Model:
    """Load a GGUF file after checking that it is complete; ``kind`` is the class to create.

    Raises ModelError with the reason.
    """
    _ = parent.raw
    file = check_file(path)
    try:
        # The other files of a split model are next to a link, not next to what it points to.
        handle = native.model_load(str(file.path.absolute()), params)
    except ModelError as error:
        msg = f"{error} (architecture {file.architecture!r})"
        raise ModelError(
            msg, code=error.code, log=error.log, architecture=file.architecture
        ) from error
    try:
        on_host = params.n_gpu_layers == 0 and not params.rpc_servers
        return kind(native, handle, file, parent, isolated=isolated, on_host=on_host)
    except BaseException:
        free_quietly(native.model_free, handle)
        raise


#: The names of `DefragPlan` and `DefragMover`.
Plan = Literal["fewest", "ordered"]
Mover = Literal["auto", "host", "gather", "graph", "staged"]
#: True equals "on", False equals "off", and None equals "auto".
FlashAttn = bool | Literal["auto", "on", "off"] | None


def context_params(
    info: ModelInfo,
    capabilities: Capability,
    *,
    n_ctx: int,
    n_batch: int,
    n_ubatch: int,
    n_seq_max: int,
    n_threads: int,
    n_threads_batch: int | None,
    flash_attn: FlashAttn,
    type_k: str | int,
    type_v: str | int,
    kv_unified: bool,
    swa_full: bool,
    offload_kqv: bool,
    embeddings: bool,
    pooling: Pooling,
    defrag_thold: float,
    defrag_plan: Plan | None,
    defrag_mover: Mover,
    defrag_threads: int | None,
    guard: bool,
    backing: BackingChoice,
) -> ContextParams:
    """Return the parameters, or raise UsageError or Unsupported naming the one at fault."""
    n_ctx, n_batch = _count("n_ctx", n_ctx), _count("n_batch", n_batch)
    n_ubatch, n_seq_max = _count("n_ubatch", n_ubatch), _count("n_seq_max", n_seq_max)
    n_threads = _count("n_threads", n_threads)
    if n_threads_batch is not None:
        n_threads_batch = _count("n_threads_batch", n_threads_batch)
    flash_attn = arguments.flash_attn(flash_attn)
    kv_unified = arguments.flag("kv_unified", kv_unified)
    kind_k, kind_v = cache_type(type_k, "K"), cache_type(type_v, "V")
    if not info.is_recurrent:
        kind_k.row_bytes(info.n_embd_k_gqa)
        kind_v.row_bytes(info.n_embd_v_gqa)
    if kind_v.quantized and flash_attn is False:
        msg = (
            f"a V cache of {kind_v.name} needs flash attention, because V is stored by "
            "columns without it; pass flash_attn=True or type_v='f16'"
        )
        raise UsageError(msg)
    embeddings = arguments.flag("embeddings", embeddings)
    n_ubatch = min(n_ubatch, n_batch)
    if embeddings and pooling is Pooling.MEAN:
        n_ubatch = embedding.even_ubatch(min(n_ubatch, n_ctx), n_seq_max)
    if flash_attn is None and Capability.FLASH_AUTO not in capabilities:
        msg = "this build cannot choose flash attention automatically; pass True or False"
        raise Unsupported(msg, "FLASH_AUTO")
    if not kv_unified and n_seq_max > 1 and Capability.KV_UNIFIED not in capabilities:
        msg = "all sequences share the cells in this build; pass kv_unified=True"
        raise Unsupported(msg, "KV_UNIFIED")
    plan = DefragPlan.UNKNOWN
    if defrag_plan is not None:
        plan = DefragPlan[arguments.choice("defrag_plan", defrag_plan, get_args(Plan)).upper()]
    mover = DefragMover[arguments.choice("defrag_mover", defrag_mover, get_args(Mover)).upper()]
    if defrag_threads is not None:
        defrag_threads = _count("defrag_threads", defrag_threads)
    chosen = plan == DefragPlan.ORDERED or mover or defrag_threads
    if Capability.DEFRAG_OPTIONS not in capabilities and chosen:
        msg = (
            "this build has a fixed way to move cells: defrag_plan, defrag_mover and "
            "defrag_threads need a patched variant (full-defrag or compaction)"
        )
        raise Unsupported(msg, "DEFRAG_OPTIONS")
    return ContextParams(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_seq_max=n_seq_max,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch or n_threads,
        flash_attn=flash_attn,
        type_k=kind_k.number,
        type_v=kind_v.number,
        kv_unified=kv_unified,
        swa_full=swa_full,
        offload_kqv=offload_kqv,
        embeddings=embeddings,
        pooling=int(pooling),
        defrag_thold=defrag_thold,
        guard=guard,
        defrag_plan=plan,
        defrag_mover=mover,
        defrag_threads=defrag_threads or 0,
        kv_backing=int(backing.kind),
        kv_path=backing.path,
        kv_keep=backing.keep,
        kv_huge=backing.huge,
        kv_model=backing.model,
    )


def _count(name: str, value: int) -> int:
    return arguments.integer(name, value, 1, arguments.INT32)
