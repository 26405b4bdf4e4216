// Contexts: parameters are checked before llama.cpp sees them, because it asserts on invalid ones.
#include "backing.h"
#include "fields.h"
#include "groups.h"

#include <memory>

#include <pthread.h>
#include <time.h>

namespace {

#ifdef CLOCK_MONOTONIC_COARSE
constexpr clockid_t cheap_clock = CLOCK_MONOTONIC_COARSE; // a tick is 1 to 10 ms
#else
constexpr clockid_t cheap_clock = CLOCK_MONOTONIC;
#endif
constexpr int64_t milliseconds = 1000000;

// The arguments of plk_interrupts.
std::atomic<int32_t (*)(void)> interrupts_check{nullptr};
std::atomic<uint64_t> interrupts_thread{0};

constexpr uint32_t max_sequences = 256; // maximum of all releases; some allow only 64
constexpr int32_t max_threads = 512;     // GGML_MAX_N_THREADS, which some releases do not define

// ggml types to which the CPU can copy single float rows; llama.cpp aborts on any other type.
constexpr int32_t cache_types[] = {0, 1, 2, 3, 6, 7, 8, 20, 30};

// Check a key or value type: it must be in cache_types, and a head must consist of whole blocks.
int check_type(const plk_context_params &asked, int32_t type, int32_t row, int32_t heads,
               const char *name) {
    const int32_t *end = cache_types + sizeof(cache_types) / sizeof(*cache_types);
    if (std::find(cache_types, end, type) == end) {
        return plk::refuse(PLK_EINVAL,
                           "%s: ggml type %d cannot be written row by row: expected f32 (0), f16 "
                           "(1), bf16 (30), q4_0 (2), q4_1 (3), q5_0 (6), q5_1 (7), q8_0 (8) or "
                           "iq4_nl (20)",
                           name, type);
    }
    const auto block = static_cast<int32_t>(ggml_blck_size(static_cast<ggml_type>(type)));
    const int32_t head = heads > 0 ? row / heads : 0;
    if (block > 1 && (row % block != 0 || head % block != 0)) {
        return plk::refuse(PLK_EINVAL,
                           "%s: blocks of %s hold %d values, but a head of this model has %d: use "
                           "a type without blocks, such as f16",
                           name, ggml_type_name(static_cast<ggml_type>(type)), block, head);
    }
    if (asked.flash_attn != 0 && type == GGML_TYPE_F32 && !plk::settings::flash_takes_f32) {
        return plk::refuse(PLK_EINVAL, "%s: this release has no flash attention on f32: use f16",
                           name);
    }
    return PLK_OK;
}

// Return false if the release aborts on a gemma2 with this number of layers: releases without
// llama_model_n_swa support only the numbers of the published models.
template <typename Model>
auto builds(Model *model, int32_t, int) -> decltype(llama_model_n_swa(model) == 0) {
    return true;
}
template <typename Model> bool builds(Model *model, int32_t n_layer, long) {
    return plk::fields::architecture(model) != "gemma2" || n_layer == 26 || n_layer == 42 ||
           n_layer == 46;
}

uint32_t n_ctx_of(const plk_model &model, const plk_context_params &asked) {
    return asked.n_ctx > 0 ? asked.n_ctx : static_cast<uint32_t>(model.info.n_ctx_train);
}

// Return the least number of cells that a cache has: llama.cpp rounds n_ctx up to a multiple of 32.
uint32_t least_cells(const plk_model &model, const plk_context_params &asked) {
    return (n_ctx_of(model, asked) + 31) / 32 * 32;
}

int check(const plk_model &model, const plk_context_params &asked) {
    if (asked.n_seq_max < 1 || asked.n_seq_max > max_sequences) {
        return plk::refuse(PLK_EINVAL, "n_seq_max is %u, expected 1 to %u", asked.n_seq_max,
                           max_sequences);
    }
    if (asked.n_batch < 1 || asked.n_threads < 1 || asked.n_threads_batch < 1) {
        return plk::refuse(PLK_EINVAL, "n_batch, n_threads and n_threads_batch must be positive");
    }
    if (asked.n_threads > max_threads || asked.n_threads_batch > max_threads) {
        return plk::refuse(PLK_EINVAL, "at most %d threads", max_threads);
    }
    if (asked.flash_attn < -1 || asked.flash_attn > 1) {
        return plk::refuse(PLK_EINVAL, "flash_attn is %d, expected 0 (off), 1 (on) or -1 (decided "
                           "by llama.cpp)", asked.flash_attn);
    }
    if (asked.defrag_plan < 0 || asked.defrag_plan > 2 || asked.defrag_mover < 0 ||
        asked.defrag_mover > 4 || asked.defrag_threads < 0 || asked.defrag_threads > max_threads) {
        return plk::refuse(PLK_EINVAL,
                           "defrag_plan is %d (0 to 2), defrag_mover %d (0 to 4), defrag_threads "
                           "%d (0 to %d)",
                           asked.defrag_plan, asked.defrag_mover, asked.defrag_threads,
                           max_threads);
    }
    if (asked.pooling < PLK_POOLING_MODEL || asked.pooling > PLK_POOLING_RANK) {
        return plk::refuse(PLK_EINVAL, "pooling is %d, expected -1 to 4", asked.pooling);
    }
    if (asked.pooling == PLK_POOLING_RANK && !plk::pooling::bits) {
        return plk::refuse(PLK_EUNSUPPORTED, "this release has no pooling by a classification head");
    }
    if (asked.embeddings && asked.pooling == PLK_POOLING_RANK &&
        !plk::pooling::has_head(model.model)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "the model has no classification head, which pooling \"rank\" needs: use "
                           "a reranker, or another pooling");
    }
    if (!plk::moving::bits &&
        (asked.defrag_plan == 1 || asked.defrag_mover || asked.defrag_threads)) {
        return plk::refuse(PLK_EUNSUPPORTED, "this build moves cells in its own way only");
    }
    if (const int wrong = plk::check_backing(model, asked)) {
        return wrong;
    }
    if (asked.n_ctx > (1u << 30) || asked.n_batch > (1u << 30) || asked.n_ubatch > (1u << 30)) {
        return plk::refuse(PLK_EINVAL, "n_ctx, n_batch or n_ubatch is beyond 2^30");
    }
    if (model.info.n_layer == 0 || model.info.n_params == 0) {
        return plk::refuse(PLK_ECONTEXT, "the model was loaded without weights (vocab_only)");
    }
    if (plk::load::has_encoder(model.model)) {
        return plk::refuse(PLK_EUNSUPPORTED, "models with an encoder are not supported");
    }
    if (plk::load::many_positions(model.model) && !plk::memory::expands_positions) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "tokens of this model have several positions each, which this release "
                           "reads from the batch: use a later one");
    }
    if (plk::cells::rounds_up && asked.n_seq_max > least_cells(model, asked)) {
        return plk::refuse(PLK_EINVAL,
                           "this release needs at least as many cells as sequences: n_seq_max is %u, "
                           "n_ctx %u",
                           asked.n_seq_max, n_ctx_of(model, asked));
    }
    const plk_model_info &info = model.info;
    if (!builds(static_cast<const llama_model *>(model.model), info.n_layer, 0)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release knows gemma2 with 26, 42 and 46 layers, not with %d: use "
                           "0.3.10 or later",
                           info.n_layer);
    }
    if (info.is_recurrent && !plk::memory::decodes_states) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release cannot decode a recurrent model: it would never end, or "
                           "end the process; use 0.3.5, 0.3.10, or 0.3.14 or later");
    }
    if (info.is_recurrent && asked.n_seq_max > 1 && !plk::memory::separates_states) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release mixes up the states of several sequences of a recurrent "
                           "model: use n_seq_max 1");
    }
    int code = check_type(asked, asked.type_k, info.n_embd_k_gqa, info.n_head_kv, "type_k");
    if (code == PLK_OK) {
        code = check_type(asked, asked.type_v, info.n_embd_v_gqa, info.n_head_kv, "type_v");
    }
    return code;
}

// Return whether the keys are quantized and also serve as values without flash attention. Attention
// must then transpose the keys, and llama.cpp reads quantized ones as if they were floats.
bool shares_quantized(const plk_context &handle) {
    if (!(plk::cells::bits & PLK_CAP_CELLS) || plk::flash(handle) != 0 ||
        !ggml_is_quantized(static_cast<ggml_type>(handle.asked.type_k))) {
        return false;
    }
    for (int32_t cache = 0; cache < plk::cells::count(handle.ctx); ++cache) {
        plk_cells_info info{};
        if (plk::cells::info(handle.ctx, cache, info) == PLK_OK && info.bytes_k > 0 &&
            info.bytes_v == 0 && info.type_k >= 0) {
            return true;
        }
    }
    return false;
}

int64_t now() {
    timespec time{};
    clock_gettime(cheap_clock, &time);
    return time.tv_sec * (1000 * milliseconds) + time.tv_nsec;
}

bool in_thread() { return (uint64_t)pthread_self() == interrupts_thread.load(); }

// Call the check of plk_interrupts if it is due.
void check_interrupts(plk_context &context) {
    const int64_t due = context.check_at.load(std::memory_order_relaxed);
    if (due == INT64_MAX) {
        return;
    }
    const int64_t begin = now();
    const auto check = interrupts_check.load();
    if (begin < due || check == nullptr || !in_thread()) {
        return;
    }
    context.checking.store(true);
    const int32_t wanted = plk::call_out(check);
    context.checking.store(false);
    if (wanted != 0) {
        context.cancel.store(true);
    }
    // The check waits for Python's lock, which another thread may hold for 5 ms.
    const int64_t end = now();
    const int64_t pause = std::min(80 * milliseconds, 19 * (end - begin));
    context.check_at.store(end + std::max(20 * milliseconds, pause));
}

bool poll(void *data) {
    auto *context = static_cast<plk_context *>(data);
    if (!context->armed.load(std::memory_order_relaxed)) {
        return false;
    }
    // One thread polls, so the sum need not be atomic, which would take longer.
    const int64_t count = context->polls.load(std::memory_order_relaxed) + 1;
    context->polls.store(count, std::memory_order_relaxed);
    check_interrupts(*context);
    const int64_t limit = context->limit.load(std::memory_order_relaxed);
    return context->cancel.load(std::memory_order_relaxed) || (limit >= 0 && count >= limit);
}

// Return the n_ubatch to request: lower than what is asked if creating the context could abort.
uint32_t fitting_ubatch(const plk_model &model, const plk_context_params &asked) {
    const uint32_t n_ubatch = asked.n_ubatch > 0 ? asked.n_ubatch : asked.n_batch;
    const uint32_t cells = least_cells(model, asked);
    return plk::cells::rounds_up ? std::min(n_ubatch, cells - cells % asked.n_seq_max) : n_ubatch;
}

llama_context_params fill(const plk_model &model, const plk_context_params &asked,
                          plk_context *handle) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = asked.n_ctx;
    params.n_batch = asked.n_batch;
    params.n_ubatch = fitting_ubatch(model, asked);
    params.n_seq_max = asked.n_seq_max;
    params.n_threads = asked.n_threads;
    params.n_threads_batch = asked.n_threads_batch;
    params.type_k = static_cast<ggml_type>(asked.type_k);
    params.type_v = static_cast<ggml_type>(asked.type_v);
    params.offload_kqv = asked.offload_kqv != 0;
    params.embeddings = asked.embeddings != 0;
    PLK_SET(pooling_type, params, asked.pooling);
    params.abort_callback = poll;
    params.abort_callback_data = handle;
    // A release with a bool cannot decide: -1 becomes false, which never fails.
    PLK_SET(flash_attn, params, asked.flash_attn > 0);
    PLK_SET(flash_attn_type, params, asked.flash_attn);
    PLK_SET(kv_unified, params, asked.kv_unified != 0);
    PLK_SET(swa_full, params, asked.swa_full != 0);
    PLK_SET(no_perf, params, true);
    PLK_SET(seed, params, 0u);
    // 0 means n_batch; 0.3.36 asserts that n_outputs_max is at least n_seq_max.
    if (asked.n_seq_max > asked.n_batch || asked.n_seq_max > asked.n_ctx) {
        PLK_SET(n_outputs_max, params, asked.n_seq_max);
    }
    // 0 means "always" through 0.3.5 and "never" later; -1 means "never" in all releases.
    PLK_SET(defrag_thold, params, asked.defrag_thold < 0.0f ? -1.0f : asked.defrag_thold);
    return params;
}

} // namespace

void plk::expect_interrupts(plk_context &context) {
    const bool expected = interrupts_check.load() != nullptr && in_thread();
    context.check_at.store(expected ? now() + 20 * milliseconds : INT64_MAX);
}

plk_context::~plk_context() {
    if (ctx != nullptr) {
        if (plk::cells::watch != nullptr) {
            plk::cells::watch->closed(ctx);
        }
        llama_free(ctx);
    }
    for (plk_adapter *adapter : adapters) {
        plk::release(adapter);
    }
    plk::release(model);
}

int32_t plk::flash(const plk_context &context) {
    const int32_t decided = plk::settings::read(context.ctx).flash;
    if (decided >= 0) {
        return decided;
    }
    if (PLK_HAS(flash_attn, llama_context_params)) {
        return context.asked.flash_attn > 0 ? 1 : 0; // with a bool, llama.cpp uses the given value
    }
    return context.asked.flash_attn == 0 ? 0 : -1;
}

extern "C" {

int plk_context_new(plk_model *model, const plk_context_params *params, plk_context **out) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || out == nullptr) {
            return plk::refuse(PLK_EINVAL, "model or out is NULL");
        }
        *out = nullptr;
        plk_context_params asked{};
        asked.n_ctx = asked.n_batch = asked.n_ubatch = 512;
        asked.n_seq_max = asked.n_threads = asked.n_threads_batch = 1;
        asked.type_k = asked.type_v = GGML_TYPE_F16;
        asked.kv_unified = asked.offload_kqv = asked.guard = 1;
        asked.defrag_thold = -1.0f;
        asked.pooling = PLK_POOLING_MODEL;
        int code = plk::take(params, asked, "plk_context_params");
        if (code == PLK_OK) {
            code = check(*model, asked);
        }
        if (code != PLK_OK) {
            return code;
        }
        auto handle = std::make_unique<plk_context>();
        handle->asked = asked;
        handle->guard = asked.guard != 0;
        plk::forget_logged();
        {
            const plk::Backed backed(asked);
            try {
                handle->ctx = plk::context::open(model->model, fill(*model, asked, handle.get()));
            } catch (const std::exception &error) {
                return plk::refuse(backed.code(), "%s", error.what());
            }
            if (handle->ctx == nullptr) {
                return plk::refuse(backed.code(), "llama.cpp made no context: %s", plk::logged());
            }
        }
        handle->asked.kv_path = handle->asked.kv_model = nullptr; // owned by the caller
        code = plk::mapping::check(handle->ctx, asked);
        if (code == PLK_OK && asked.kv_keep != 0 && plk::strays(*handle)) {
            code = plk::refuse(PLK_EDAMAGED, "the kept cache has positions of 2^30 and more");
        }
        if (code != PLK_OK) {
            return code;
        }
        if (shares_quantized(*handle)) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "this release keeps no values of this model beside its keys, and "
                               "cannot read quantized ones without flash attention: use type_k "
                               "f16, or flash attention");
        }
        const int64_t width = asked.embeddings ? plk::pooling::width(handle->ctx) : 0;
        if (width > 0 && width < model->info.n_embd_out) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "this release computes embeddings of %lld values for this model and "
                               "reads %d of them, beyond their end: use a context without embeddings",
                               static_cast<long long>(width), model->info.n_embd_out);
        }
        if (asked.n_seq_max > 1 && !plk::cells::limits(handle->ctx).separates_sequences) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "this release clears the compressed rows of all sequences when one "
                               "is removed: use n_seq_max 1, or a later release");
        }
        plk::moving::choose(handle->ctx, asked);
        handle->n_batch = llama_n_batch(handle->ctx);
        handle->n_ubatch = llama_n_ubatch(handle->ctx);
        const plk::settings::Settings decided = plk::settings::read(handle->ctx);
        handle->n_seq_max = decided.n_seq_max > 0 ? static_cast<uint32_t>(decided.n_seq_max)
                                                  : asked.n_seq_max;
        handle->causal = decided.causal != 0;
        handle->positions = plk::cells::limits(handle->ctx).positions;
        plk_context_info found{};
        plk::cells::describe(handle->ctx, found);
        handle->separate = found.n_streams > 1;
        handle->graph_nodes = plk::logged_nodes();
        if (asked.embeddings) {
            handle->pooling = static_cast<int32_t>(llama_pooling_type(handle->ctx));
        }
        handle->model = model;
        model->users.fetch_add(1);
        *out = handle.release();
        return PLK_OK;
    });
}

void plk_context_free(plk_context *context) {
    plk::guarded([&] {
        delete context;
        return PLK_OK;
    });
}

int plk_context_read(const plk_context *context, plk_context_info *out) {
    return plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        plk_context_info info{};
        info.size = sizeof(info);
        info.n_ctx = llama_n_ctx(context->ctx);
        info.n_batch = context->n_batch;
        info.n_ubatch = context->n_ubatch;
        info.n_seq_max = context->n_seq_max;
        info.can_shift = plk::can_shift(*context) ? 1 : 0;
        info.can_remove_partly = info.contiguous_slots = info.v_transposed = -1;
        info.n_streams = -1;
        info.flash_attn = plk::flash(*context);
        plk::cells::describe(context->ctx, info);
        // If the cells cannot be read, the context may still show that there is only one stream.
        if (info.n_streams < 0 &&
            (info.n_seq_max == 1 || plk::settings::read(context->ctx).unified > 0 ||
             !PLK_HAS(kv_unified, llama_context_params))) {
            info.n_streams = 1;
        }
        info.defrag = plk::defrag::refusal(context->ctx, info) == nullptr ? 1 : 0;
        info.defrag_thold = plk::defrag::threshold(*context);
        info.pooling = context->pooling;
        info.n_threads = static_cast<int32_t>(llama_n_threads(context->ctx));
        info.n_threads_batch = static_cast<int32_t>(llama_n_threads_batch(context->ctx));
        plk::moving::describe(context->asked, info);
        if (info.v_transposed < 0 && info.flash_attn >= 0) {
            info.v_transposed = info.flash_attn ? 0 : 1;
        }
        return plk::give(info, out, "plk_context_info");
    });
}

int plk_threads(plk_context *context, int32_t n_threads, int32_t n_threads_batch) {
    return plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        if (n_threads < 1 || n_threads_batch < 1 || n_threads > max_threads ||
            n_threads_batch > max_threads) {
            return plk::refuse(PLK_EINVAL, "threads must be 1 to %d", max_threads);
        }
        llama_set_n_threads(context->ctx, n_threads, n_threads_batch);
        return PLK_OK;
    });
}

void plk_synchronize(plk_context *context) {
    plk::guarded([&] {
        if (context != nullptr) {
            llama_synchronize(context->ctx);
        }
        return PLK_OK;
    });
}

void plk_cancel(plk_context *context) {
    if (context != nullptr) {
        context->cancel.store(true);
    }
}

void plk_cancel_after(plk_context *context, int64_t polls) {
    if (context != nullptr) {
        context->limit.store(polls);
    }
}

int64_t plk_cancel_polls(const plk_context *context) {
    return context != nullptr ? context->polls.load() : -1;
}

void plk_interrupts(int32_t (*check)(void), uint64_t thread) {
    interrupts_check.store(nullptr); // until both are set
    interrupts_thread.store(thread);
    interrupts_check.store(check);
}

} // extern "C"
