// Unit tests of llama-kv-compact-impl.h with stub caches of two streams, some with a mirror.

#define STUB_MEMORY

#include "groups.h"

#include "llama-kv-compact-impl.h"

#include <deque>

using namespace llama_kv_compaction;

static const uint32_t N_CELLS = 4096;

// a cache with one value per cell: its initial position
struct cache : llama_kv_cache {
    ggml_tensor                          t = {};
    std::unique_ptr<ggml_backend_buffer> buf;

    // n cells of each stream are used: every `step`-th, the last one at (n - 1)*step
    cache(uint32_t n, uint32_t step, uint32_t size = N_CELLS) : cells_(size) {
        cells.resize(2);
        t.type  = GGML_TYPE_I32;
        t.ne[0] = 1;
        t.ne[1] = size;
        t.ne[2] = 2;
        t.ne[3] = 1;
        t.nb[0] = t.nb[1] = sizeof(int32_t);
        t.nb[2] = t.nb[3] = size*sizeof(int32_t);
        t.nb[3] *= 2;
        buf = make_buffer(ggml_backend_cpu_buffer_type(), 2*size*sizeof(int32_t), 0);
        ggml_backend_tensor_alloc(buf.get(), &t, buf->base);
        tensors = { &t };
        for (uint32_t s = 0; s < 2; ++s) {
            cells[s].all.resize(size);
            for (uint32_t i = 0; i < n; ++i) {
                use(s, i*step, (int) i, { (int) s });
            }
        }
    }

    void use(uint32_t s, uint32_t i, int pos, std::set<int> seqs) {
        cells[s].all[i] = { pos, std::move(seqs) };
        value(s, i)     = pos;
    }

    int32_t & value(uint32_t s, uint32_t i) { return ((int32_t *) t.data)[s*cells_ + i]; }

    // true if exactly the first n cells of the stream are used, with their positions as values
    bool is_compact(uint32_t s, uint32_t n) {
        std::set<int> seen;
        for (uint32_t i = 0; i < cells_; ++i) {
            if (cells[s].is_empty(i) != (i >= n) || (i < n && value(s, i) != cells[s].pos_get(i))) {
                return false;
            }
            seen.insert(cells[s].all[i].pos);
        }
        return seen.size() == n + (n < cells_);
    }

    const uint32_t cells_;
};

// a type of memory that compaction does not support
struct unknown : cache {
    using cache::cache;
};

// the caches of the context under test
static std::vector<target> & targets() {
    static std::vector<target> all;
    return all;
}

bool llama_kv_compaction::get_targets(const llama_memory_i * memory, std::vector<target> & res) {
    if (as<llama_kv_cache>(memory) || !as<cache>(memory)) {
        return false;
    }
    res = targets();
    return true;
}

struct context : llama_context {
    std::vector<bool> requests; // of the updates, in their order
    bool fails  = false;
    bool throws = false;

    explicit context(std::vector<target> all) {
        targets() = std::move(all);
        memory  = targets().front().kv;
        update  = [this] {
            requests.push_back(compact_requested);
            if (throws && compact_requested) {
                throw std::bad_alloc();
            }
            for (const auto & t : targets()) {
                t.kv->do_compact = !fails && is_due(this, t.kv);
                if (t.kv->do_compact) {
                    CHECK(compact(this, t.kv) && !t.kv->do_compact);
                }
                CHECK(!t.mirror || !is_due(this, t.mirror));
            }
        };
    }
};

static bool contains(const char * reason, const char * word) {
    return reason && std::string(reason).find(word) != std::string::npos;
}

static void same() {
    cache left(8, 2, 32), right(8, 2, 32);
    auto & one = left.cells[0];
    auto & two = right.cells[0];
    const auto differ = [&] {
        CHECK(!has_same_cells(one, two) && !has_same_cells(two, one));
        CHECK(contains(get_refusal({ &left, &right }), "mirrors"));
        two = one;
    };
    CHECK(has_same_cells(one, two) && !get_refusal({ &left, &right }) && !get_refusal({ &left, nullptr }));
    two.all[31] = { 3, { 0 } };
    differ();
    two.all[4].pos = 9;
    differ();
    two.all[4].seqs = { 7 };
    differ();
    two.all[4].seqs = { 0, 7 };
    differ();
    two.all.pop_back();
    differ();
    right.cells[1].all[0].pos = 99;
    CHECK(contains(get_refusal({ &left, &right }), "mirrors"));
    right.cells.pop_back();
    CHECK(contains(get_refusal({ &left, &right }), "mirrors"));
}

static void sparse() {
    cache full(4096, 1), half(2048, 2), few(1024, 2), one(1, 1);
    CHECK(!has_holes(&full) && has_holes(&half) && has_holes(&few) && !has_holes(&one));
    CHECK(get_sparsity(&full) == 0.0f && get_sparsity(&half) == 0.5f && get_sparsity(&one) == 0.0f);
    // 2048 attended cells reach the minimum (LLAMA_KV_DEFRAG_MIN_CELLS), 1792 do not
    CHECK(get_sparsity(&few) == 0.5f);
    few.cells[0] = few.cells[1] = cache(896, 2).cells[0];
    CHECK(get_sparsity(&few) == 0.0f);
    // the stream with the highest sparsity decides, in any order
    half.cells[0] = full.cells[0];
    CHECK(get_sparsity(&half) == 0.5f);
    std::swap(half.cells[0], half.cells[1]);
    CHECK(get_sparsity(&half) == 0.5f && has_holes(&half));
}

static void due() {
    cache sparse(1024, 4), dense(1024, 1);
    context ctx({ { &dense, nullptr }, { &sparse, nullptr } });
    const auto none = [&] { return !is_due(&ctx, &dense) && !is_due(&ctx, &sparse); };
    CHECK(llama_kv_compact_due(&ctx, 0.5f) && !llama_kv_compact_due(&ctx, 0.75f));
    CHECK(none());
    for (const float thold : { 0.0f, 0.75f, 0.9f }) {
        ctx.defrag_thold = thold;
        CHECK(none());
    }
    ctx.defrag_thold = 0.5f;
    CHECK(is_due(&ctx, &sparse) && !is_due(&ctx, &dense));
    sparse.is_shared = true;
    CHECK(none());
    sparse.is_shared = false;
    cache other(1024, 4);
    CHECK(!is_due(&ctx, &other));
    llama_kv_cache plain;
    ctx.memory = &plain;
    CHECK(!llama_kv_compact_due(&ctx, 0.1f) && none());
    ctx.compact_requested = true;
    CHECK(none());
    ctx.memory = &sparse;
    CHECK(is_due(&ctx, &sparse) && !is_due(&ctx, &dense));
}

static void thold() {
    cache kv(1024, 4);
    context ctx({ { &kv, nullptr } });
    setenv("LLAMA_KV_DEFRAG_THOLD", "0.25", 1);
    // the variable overrides the built-in default
    CHECK(llama_kv_compact_thold(&ctx) == 0.25f && is_due(&ctx, &kv));
    // the default of the process overrides the variable; a negative one disables compaction
    llama_kv_compact_set_default_thold(0.9f);
    CHECK(llama_kv_compact_thold(&ctx) == 0.9f && !is_due(&ctx, &kv));
    llama_kv_compact_set_default_thold(-1.0f);
    CHECK(llama_kv_compact_thold(&ctx) == 0.0f && !is_due(&ctx, &kv));
    // the threshold of the context overrides both
    ctx.defrag_thold = 0.5f;
    CHECK(llama_kv_compact_thold(&ctx) == 0.5f && is_due(&ctx, &kv));
    llama_kv_compact_set_default_thold(0.1f);
    ctx.defrag_thold = 0.0f;
    CHECK(llama_kv_compact_thold(&ctx) == 0.0f && !is_due(&ctx, &kv));
}

static void refused() {
    cache kv(8, 2, 32), mirror(8, 2, 32), next(8, 2, 32);
    context ctx({ { &next, nullptr }, { &kv, &mirror } });
    CHECK(!llama_kv_compact_refusal(&ctx));
    mirror.cells[1].all[0].pos = 5;
    CHECK(contains(llama_kv_compact_refusal(&ctx), "mirrors"));
    CHECK(llama_kv_compact(&ctx) == -1 && ctx.requests.empty() && has_holes(&next));
    mirror.cells[1] = kv.cells[1];
    kv.is_shared    = true;
    CHECK(contains(llama_kv_compact_refusal(&ctx), "shared"));
    kv.is_shared = false;
    unknown kind(1, 1);
    ctx.memory = &kind;
    CHECK(contains(llama_kv_compact_refusal(&ctx), "kind of memory"));
    ctx.memory = nullptr;
    CHECK(contains(llama_kv_compact_refusal(&ctx), "no memory"));
}

static void moves() {
    cache kv(9, 3, 64), mirror(9, 3, 64), next(5, 1, 64);
    next.use(1, 40, 77, { 1, 2 });
    context ctx({ { &kv, &mirror }, { &next, nullptr } });
    CHECK(llama_kv_compact(&ctx) == 0 && ctx.n_reserved == 1);
    // pending updates run before the compaction
    CHECK(ctx.requests == (std::vector<bool>{ false, true }) && !ctx.compact_requested);
    for (uint32_t s = 0; s < 2; ++s) {
        CHECK(kv.is_compact(s, 9) && mirror.is_compact(s, 9) && next.is_compact(s, 5 + s));
        CHECK(has_same_cells(kv.cells[s], mirror.cells[s]));
    }
    CHECK(next.cells[1].all[5].seqs == (std::set<int>{ 1, 2 }));
    CHECK(kv.defrag_stats.n_defrags == 2 && next.defrag_stats.n_defrags == 1 && mirror.defrag_stats.n_defrags == 0);
    CHECK(next.defrag_stats.n_cells == 1 && next.defrag_stats.n_graphs == 0);
    CHECK(llama_kv_compact(&ctx) == 0 && kv.defrag_stats.n_defrags == 2);
}

static void failed() {
    cache kv(9, 3, 64);
    context ctx({ { &kv, nullptr } });
    ctx.fails = true;
    CHECK(llama_kv_compact(&ctx) == -2 && has_holes(&kv) && !ctx.compact_requested);
    // an exception leaves no request for the next update
    ctx.throws = true;
    try {
        llama_kv_compact(&ctx);
        CHECK(false);
    } catch (const std::bad_alloc &) {
        CHECK(!ctx.compact_requested);
    }
}

// after a failed graph, the compaction stops before the next stream
static void failed_graph() {
    cache kv(9, 3, 64);
    context ctx({ { &kv, nullptr } });
    ggml_backend processor = { "processor", { ggml_backend_cpu_buffer_type() }, [](const ggml_tensor *) { return true; } };
    ctx.sched.backends     = { &processor };
    ctx.sched.n_until_full = 0;
    kv.defrag_options.mover = llama_kv_defrag::MOVER_GRAPH;
    CHECK(llama_kv_compact(&ctx) == -2 && has_holes(&kv) && !ctx.compact_requested);
    CHECK(kv.defrag_stats.n_graphs == 1 && kv.defrag_stats.n_defrags == 0);
}

// exactly the cells of the computed graphs have moved, in both caches
static void some_graphs() {
    for (const auto order : { llama_kv_defrag::ORDER_FEWEST, llama_kv_defrag::ORDER_KEPT }) {
        cache kv(9, 3, 64), mirror(9, 3, 64);
        const auto before = kv.cells[0];
        context ctx({ target{ &kv, &mirror } });
        ggml_backend processor = { "processor", { ggml_backend_cpu_buffer_type() }, [](const ggml_tensor *) { return true; } };
        ctx.sched.backends     = { &processor };
        ctx.sched.n_until_full = 1;
        ctx.reserved.max_nodes = 12;
        kv.defrag_options.mover = llama_kv_defrag::MOVER_GRAPH;
        kv.defrag_options.order = order;
        CHECK(llama_kv_compact(&ctx) == -2 && has_holes(&kv));
        CHECK(kv.cells[0].get_used() == 9 && !has_same_cells(kv.cells[0], before));
        CHECK(has_same_cells(kv.cells[0], mirror.cells[0]));
        for (uint32_t i = 0; i < kv.cells_; ++i) {
            if (!kv.cells[0].is_empty(i)) {
                CHECK(kv.value(0, i) == kv.cells[0].pos_get(i) && mirror.value(0, i) == kv.value(0, i));
            }
        }
        CHECK(kv.cells[1].get_used() == 9 && kv.cells[1].used_max_p1() == 25);
    }
}

int main(int argc, char ** argv) {
    return run_group(argc, argv, {
        { "due", due }, { "failed", failed }, { "failed-graph", failed_graph }, { "moves", moves }, { "refused", refused }, { "same", same },
        { "some-graphs", some_graphs }, { "sparse", sparse }, { "thold", thold },
    });
}
