// Unit tests of llama-kv-mmap-api-impl.h with contexts of zero to two mapped caches.

#include "groups.h"

#include "llama-kv-mmap-api-impl.h"

#include <algorithm>

using namespace llama_kv_mmap;

static const uint32_t N_CELLS = 600;

// K and V of one layer; only even cells up to the last used one are used
struct cache {
    std::shared_ptr<backing> mapped;
    uint32_t last;

    cache(const options & opts, uint32_t number, uint32_t last_used) : last(last_used) {
        std::vector<tensor> list(2);
        for (auto & t : list) {
            t.is_v    = &t == &list[1];
            t.name    = t.is_v ? "cache_v_l5" : "cache_k_l5";
            t.type    = "f16";
            t.layer   = 5;
            t.by_row  = true;
            t.n_cell  = 64;
            t.n_bytes = N_CELLS*t.n_cell;
        }
        mapped = std::make_shared<backing>(opts, number, list, N_CELLS, 1);
        mapped->attach(
            [this](uint32_t, int32_t * pos, uint64_t * seqs, uint32_t) {
                for (uint32_t i = 0; i < N_CELLS; ++i) {
                    pos[i]  = i <= last && i % 2 == 0 ? (int32_t) i : -1;
                    seqs[i] = pos[i] >= 0;
                }
                return 0u;
            },
            [](uint32_t, const int32_t *, const uint64_t *, uint32_t, uint32_t) {});
    }

    void fill() const {
        mapped->touch();
        for (const auto & t : mapped->get_tensors()) {
            std::fill_n(mapped->data() + t.offset, t.n_bytes, 1);
        }
    }
};

static options named(const char * name, enum keep keep = KEEP_IT) {
    options res;
    res.kind = keep == KEEP_NOT ? KIND_ANON : KIND_FILE;
    res.path = folder() + "/" + name;
    res.keep = keep;
    return res;
}

static void remove_file(const char * name) {
    ::unlink((folder() + "/" + name).c_str());
}

static void test_get() {
    cache one(named("a"), 0, 100);
    cache two(named("b"), 0, 100);
    llama_context ctx;
    ctx.kv_mappings = { one.mapped, two.mapped };
    one.fill();
    two.mapped->flush(nullptr);

    CHECK(llama_kv_mmap_count(&ctx) == 2);
    llama_kv_mmap_info info{};
    CHECK(!llama_kv_mmap_get(&ctx, -1, &info) && !llama_kv_mmap_get(&ctx, 2, &info) && info.n_cells == 0);
    CHECK(llama_kv_mmap_get(&ctx, 0, &info));
    CHECK(info.kind == KIND_FILE && info.n_tensors == 2 && info.n_cells == N_CELLS && info.n_stream == 1);
    CHECK(info.kept && !info.resumed && info.generation == 0);
    CHECK(info.n_reserved == one.mapped->reserved() && info.n_reserved >= 2*N_CELLS*64);
    CHECK(info.n_committed == one.mapped->committed() && info.n_committed >= 2*N_CELLS*64);
    CHECK(info.n_file == one.mapped->get_file_bytes() && info.n_file > 0);
    CHECK(llama_kv_mmap_get(&ctx, 1, &info) && info.generation == 1);

    llama_kv_mmap_tensor t{};
    for (const int32_t i : { -1, 2 }) {
        CHECK(!llama_kv_mmap_get_tensor(&ctx, i, 0, &t));
    }
    for (const int32_t j : { -1, 2, 1000 }) {
        CHECK(!llama_kv_mmap_get_tensor(&ctx, 0, j, &t) && t.n_reserved == 0);
    }
    llama_kv_mmap_get(&ctx, 0, &info);
    uint64_t committed = 0;
    for (const int32_t j : { 0, 1 }) {
        CHECK(llama_kv_mmap_get_tensor(&ctx, 0, j, &t));
        CHECK(t.layer == 5 && t.is_v == (j == 1) && t.n_reserved >= N_CELLS*64 && t.n_committed >= N_CELLS*64);
        committed += t.n_committed;
    }
    CHECK(committed == info.n_committed);

    const cache plain(named("", KEEP_NOT), 0, 0);
    ctx.kv_mappings = { plain.mapped };
    CHECK(llama_kv_mmap_get(&ctx, 0, &info) && info.kind == KIND_ANON && !info.kept && info.n_file == 0);
    remove_file("a");
    remove_file("b");
}

static void test_gone() {
    llama_context ctx;
    {
        const cache one(named("", KEEP_NOT), 0, 10);
        ctx.kv_mappings = { one.mapped };
    }
    // the cache was destroyed before its context
    llama_kv_mmap_info   info{};
    llama_kv_mmap_tensor t{};
    CHECK(llama_kv_mmap_count(&ctx) == 1 && !llama_kv_mmap_get(&ctx, 0, &info));
    CHECK(!llama_kv_mmap_get_tensor(&ctx, 0, 0, &t) && !llama_kv_mmap_get_tensor(&ctx, 0, -1, &t));
    CHECK(llama_kv_mmap_trim(&ctx) == 0 && llama_kv_mmap_tokens(&ctx, 0) == nullptr);
    CHECK(llama_kv_mmap_flush(&ctx, nullptr, 0));
    const int32_t token = 0;
    CHECK(!llama_kv_mmap_flush(&ctx, &token, 1));
}

static void test_trim() {
    const cache one(named("", KEEP_NOT), 0, 100);
    const cache two(named("", KEEP_NOT), 0, 300);
    llama_context ctx;
    ctx.kv_mappings = { one.mapped, two.mapped };
    CHECK(llama_kv_mmap_trim(&ctx) == 0);
    one.fill();
    two.fill();
    const size_t before = one.mapped->committed() + two.mapped->committed();
    const size_t back   = llama_kv_mmap_trim(&ctx);
    CHECK(back == before - one.mapped->committed() - two.mapped->committed());
    CHECK(back >= 2*64*(2*N_CELLS - 101 - 301) - 4*page_size());
    CHECK(llama_kv_mmap_trim(&ctx) == 0);
}

static void test_flush() {
    const cache one(named("a"), 0, 100);
    const cache two(named("b"), 0, 100);
    const cache plain(named("", KEEP_NOT), 0, 100);
    llama_context ctx;
    ctx.kv_mappings = { one.mapped, two.mapped };
    std::vector<int32_t> tokens(2*N_CELLS);
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = (int32_t) i;
    }
    // the number of tokens must be the number of cells of both caches
    for (const size_t n : { (size_t) 0, tokens.size() - 1, tokens.size() + 1, (size_t) N_CELLS }) {
        logged().clear();
        CHECK(!llama_kv_mmap_flush(&ctx, tokens.data(), n));
        CHECK(logged().find("there are 1200 cells") != std::string::npos);
        CHECK(one.mapped->get_generation() == 0);
    }
    CHECK(llama_kv_mmap_flush(&ctx, tokens.data(), tokens.size()));
    CHECK(one.mapped->get_generation() == 1 && two.mapped->get_generation() == 1);
    CHECK(std::equal(tokens.begin(), tokens.begin() + N_CELLS, llama_kv_mmap_tokens(&ctx, 0)));
    CHECK(std::equal(tokens.begin() + N_CELLS, tokens.end(), llama_kv_mmap_tokens(&ctx, 1)));
    CHECK(llama_kv_mmap_tokens(&ctx, -1) == nullptr && llama_kv_mmap_tokens(&ctx, 2) == nullptr);

    CHECK(llama_kv_mmap_flush(&ctx, nullptr, 7)); // without tokens, their number is ignored
    CHECK(*llama_kv_mmap_tokens(&ctx, 0) == -1 && *llama_kv_mmap_tokens(&ctx, 1) == -1);

    // a cache that is not kept has no tokens and cannot be flushed
    ctx.kv_mappings = { plain.mapped };
    CHECK(llama_kv_mmap_tokens(&ctx, 0) == nullptr);
    logged().clear();
    CHECK(!llama_kv_mmap_flush(&ctx, nullptr, 0));
    CHECK(logged().find("not kept") != std::string::npos);

    ctx.kv_mappings.clear();
    CHECK(llama_kv_mmap_count(&ctx) == 0 && llama_kv_mmap_flush(&ctx, nullptr, 0));
    remove_file("a");
    remove_file("b");
}

int main(int argc, char ** argv) {
    return run_group(argc, argv, {
        { "flush", test_flush }, { "get", test_get }, { "gone", test_gone }, { "trim", test_trim },
    });
}
