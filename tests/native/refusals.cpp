// Compaction refuses caches that share cells with another cache or differ from their mirror, and obeys its threshold.
// Usage: refusals MODEL INDEXED-MODEL
#include "llama-context.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache.h"
#include "llama-kv-compact.h"
#include "llama-model.h"
#include "llama.h"

#include "decode.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

struct Loaded {
    llama_model *model;
    llama_context *ctx;
};

Loaded load(const char *path) {
    llama_model_params wanted = llama_model_default_params();
    llama_model *model = llama_model_load_from_file(path, wanted);
    CHECK(model);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = params.n_ubatch = 256;
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    return {model, ctx};
}

void scatter(llama_context *ctx) {
    decode(ctx, 0, 0, 100);
    decode(ctx, 1, 0, 50);
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 20, -1);
}

bool has_holes(llama_kv_cache *cache) {
    const auto &cells = cache->get_compact_cells().front();
    return cells.used_max_p1() > cells.get_used();
}

void update(llama_context *ctx, bool optimize) {
    ctx->compact_requested = true;
    ctx->memory_update(optimize);
    ctx->compact_requested = false;
}

bool refusal_has(llama_context *ctx, const char *word) {
    const char *reason = llama_kv_compact_refusal(ctx);
    return reason != nullptr && std::strstr(reason, word) != nullptr;
}

void shared(const char *path) {
    const Loaded it = load(path);
    auto *cache = dynamic_cast<llama_kv_cache *>(it.ctx->get_memory());
    CHECK(cache && !llama_kv_compact_refusal(it.ctx));
    {
        const llama_kv_cache draft(*it.model, it.model->hparams, GGML_TYPE_F16, GGML_TYPE_F16, true,
                                   true, true, 512, 2, 1, 0, LLAMA_SWA_TYPE_NONE, cache, nullptr,
                                   nullptr, nullptr);
        scatter(it.ctx);
        CHECK(has_holes(cache));
        CHECK(refusal_has(it.ctx, "shared"));
        CHECK(llama_kv_compact(it.ctx) == -1);
        update(it.ctx, false);
        CHECK(has_holes(cache));
    }
    CHECK(!llama_kv_compact_refusal(it.ctx));
    // An update after a failed slot search does not compact, because that frees no cells.
    update(it.ctx, true);
    CHECK(has_holes(cache));
    CHECK(llama_kv_compact(it.ctx) == 0);
    CHECK(!has_holes(cache) && cache->defrag_stats.n_cells == 50);
    CHECK(llama_kv_compact(it.ctx) == 0);
    CHECK(cache->defrag_stats.n_cells == 50);
    llama_free(it.ctx);
    llama_model_free(it.model);
}

void mirrored(const char *path) {
    const Loaded it = load(path);
    scatter(it.ctx);
    auto *pair = dynamic_cast<llama_kv_cache_dsa *>(it.ctx->get_memory());
    CHECK(pair);
    CHECK(!llama_kv_compact_refusal(it.ctx));
    pair->get_lid()->seq_rm(1, 10, 11);
    CHECK(refusal_has(it.ctx, "mirrors"));
    CHECK(llama_kv_compact(it.ctx) == -1);
    CHECK(has_holes(pair->get_mla()));
    pair->get_mla()->seq_rm(1, 10, 11);
    CHECK(!llama_kv_compact_refusal(it.ctx));
    // The mirror has the same cells and positions with one more sequence, then with another sequence.
    pair->get_lid()->seq_cp(1, 0, 30, 31);
    CHECK(refusal_has(it.ctx, "mirrors"));
    pair->get_lid()->seq_rm(1, 30, 31);
    CHECK(refusal_has(it.ctx, "mirrors"));
    update(it.ctx, false);
    CHECK(has_holes(pair->get_mla()));
    pair->get_lid()->seq_cp(0, 1, 30, 31);
    pair->get_lid()->seq_rm(0, 30, 31);
    CHECK(llama_kv_compact(it.ctx) == 0);
    CHECK(pair->get_mla()->defrag_stats.n_cells == 49);
    CHECK(!has_holes(pair->get_mla()) && !has_holes(pair->get_lid()));
    llama_free(it.ctx);
    llama_model_free(it.model);
}

// A decode compacts first if the fraction of attended cells that are free reaches the threshold.
void threshold(const char *path) {
    llama_model *model = llama_model_load_from_file(path, llama_model_default_params());
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 4096;
    params.n_batch = params.n_ubatch = 512;
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.defrag_thold = 0.5f;
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    for (int i = 0; i < 6; ++i) {
        decode(ctx, 0, 500 * i, 500);
    }
    decode(ctx, 1, 0, 50);
    auto *cache = dynamic_cast<llama_kv_cache *>(ctx->get_memory());
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 2500, -1);
    decode(ctx, 1, 50, 1);
    CHECK(has_holes(cache) && !llama_kv_compact_due(ctx, 0.5f));
    llama_memory_seq_rm(llama_get_memory(ctx), 0, 1000, -1);
    CHECK(llama_kv_compact_due(ctx, 0.5f));
    decode(ctx, 1, 51, 1);
    CHECK(!has_holes(cache));
    CHECK(cache->defrag_stats.n_defrags == 1);
    decode(ctx, 1, 52, 1);
    CHECK(cache->defrag_stats.n_defrags == 1);
    llama_free(ctx);
    llama_model_free(model);
}

} // namespace

int main(int n, char **words) {
    CHECK(n == 3);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    shared(words[1]);
    mirrored(words[2]);
    threshold(words[1]);
    return 0;
}
