// Unit tests of llama-kv-mmap-ggml.h: allocation of tensors in mapped memory, and conversion of cells.

#include "groups.h"

#include "llama-kv-mmap-ggml.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <set>

using namespace llama_kv_mmap;

static const uint32_t N_CELLS  = 256;
static const uint32_t N_STREAM = 2;

static ggml_tensor named(const char * name, ggml_type type, size_t n_bytes, ggml_tensor * view_src = nullptr) {
    ggml_tensor res = {};
    std::snprintf(res.name, sizeof(res.name), "%s", name);
    lay_out(res, type, n_bytes/ggml_type_size(type)*ggml_blck_size(type));
    res.view_src = view_src;
    return res;
}

// K of 68 bytes per cell, V of 3 values, and a view of each stream of K
struct graph {
    std::list<ggml_tensor> all;
    ggml_context ctx = { nullptr };

    graph() {
        auto * k = add(named("cache_k_l0", GGML_TYPE_Q8_0, (size_t) N_STREAM*N_CELLS*68));
        add(named("cache_k_l0 (view)", GGML_TYPE_Q8_0, (size_t) N_CELLS*68, k));
        add(named("cache_v_l0", GGML_TYPE_F16, (size_t) N_STREAM*N_CELLS*6));
        add(named("cache_k_l0 (view)", GGML_TYPE_Q8_0, (size_t) N_CELLS*68, k));
    }

    ggml_tensor * add(ggml_tensor t) {
        auto ** last = &ctx.first;
        while (*last) {
            last = &(*last)->next;
        }
        all.push_back(t);
        *last = &all.back();
        return *last;
    }
};

// sets the options of this thread, and resets them at the end of its scope
struct thread_options {
    explicit thread_options(enum kind kind, enum keep keep = KEEP_NOT) {
        current() = options();
        current().kind = kind;
        current().keep = keep;
        current().path = folder() + "/cache";
    }
    ~thread_options() {
        current() = options();
        take_made();
    }
};

static std::shared_ptr<ggml_backend_buffer> allocated(std::shared_ptr<backing> & mapped, graph & g,
        ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type()) {
    return std::shared_ptr<ggml_backend_buffer>(alloc(mapped, &g.ctx, buft, N_CELLS, N_STREAM, true));
}

static void test_describe() {
    const auto v = named("cache_v_l17", GGML_TYPE_F16, (size_t) N_STREAM*N_CELLS*6);
    const auto k = named("cache_idx_k_l7", GGML_TYPE_Q8_0, (size_t) N_STREAM*N_CELLS*68);
    auto t = describe(&v, N_CELLS, N_STREAM, true);
    CHECK(t.name == "cache_v_l17" && t.type == "f16" && t.layer == 17 && t.is_v && !t.by_row);
    CHECK(t.n_bytes == ggml_nbytes(&v) && t.n_cell == 2);
    t = describe(&v, N_CELLS, N_STREAM, false);
    CHECK(t.is_v && t.by_row && t.n_cell == 6);
    for (const bool v_trans : { false, true }) {
        t = describe(&k, N_CELLS, N_STREAM, v_trans);
        CHECK(t.type == "q8_0" && t.layer == 7 && !t.is_v && t.by_row && t.n_cell == 68);
    }
    for (const char * name : { "something", "_l3 and so on, beyond what fits into a short string", "v", "" }) {
        const auto other = named(name, GGML_TYPE_F16, (size_t) N_STREAM*N_CELLS*4);
        t = describe(&other, N_CELLS, N_STREAM, true);
        CHECK(t.layer == (std::strncmp(name, "_l3", 3) == 0 ? 3 : -1) && !t.is_v && t.by_row && t.n_cell == 4);
    }
}

static void test_alloc() {
    std::shared_ptr<backing> mapped;
    {
        graph g;
        const thread_options nothing(KIND_HEAP);
        CHECK(allocated(mapped, g)->is_upstream && !mapped);
    }
    {
        graph g;
        const thread_options memory(KIND_ANON);
        const auto buf = allocated(mapped, g);
        CHECK(mapped && !buf->is_upstream && buf->base == mapped->get_buffer() && buf->size == mapped->get_buffer_size());
        const auto & list = mapped->get_tensors();
        CHECK(list.size() == 2 && list[0].name == "cache_k_l0" && list[1].name == "cache_v_l0" && !list[1].by_row);
        CHECK(mapped->get_n_cells() == N_CELLS && mapped->get_n_stream() == N_STREAM);
        size_t n = 0;
        for (const auto & t : g.all) {
            CHECK(t.buffer == buf.get() && t.data == (t.view_src ? t.view_src->data : mapped->data() + list[n++].offset));
        }
        CHECK(n == list.size());
    }
    // without tensors, or if no buffer can wrap the memory: upstream's allocation
    {
        graph g;
        g.ctx.first = nullptr;
        const thread_options memory(KIND_ANON);
        mapped.reset();
        CHECK(allocated(mapped, g)->is_upstream && !mapped);
    }
    {
        graph g;
        const thread_options memory(KIND_ANON);
        wraps() = false;
        CHECK(allocated(mapped, g)->is_upstream);
        wraps() = true;
    }
}

static void test_devices() {
    ggml_backend_buffer_type device = { "device", false };
    std::shared_ptr<backing> mapped;
    for (const auto kind : { KIND_ANON, KIND_FILE }) {
        graph g;
        const thread_options memory(kind);
        CHECK(allocated(mapped, g, &device)->is_upstream && !mapped);
        CHECK(current().failed == FAILURE_NONE);
    }
    graph g;
    const thread_options kept(KIND_FILE, KEEP_IT);
    std::string message;
    try {
        allocated(mapped, g, &device);
    } catch (const error & e) {
        CHECK(e.why == FAILURE_UNSUPPORTED);
        message = e.what();
    }
    CHECK(message.find("(device)") != std::string::npos);
    CHECK(current().failed == FAILURE_UNSUPPORTED && !mapped);
}

static void test_clear() {
    std::shared_ptr<backing> mapped;
    ggml_backend_buffer other = { nullptr, 0, 0, true };
    clear(mapped, &other);
    CHECK(other.n_cleared == 1);

    graph g;
    const thread_options memory(KIND_ANON);
    const auto buf = allocated(mapped, g);
    mapped->attach(
        [](uint32_t, int32_t * pos, uint64_t *, uint32_t) { std::fill_n(pos, N_CELLS, -1); return 0u; },
        [](uint32_t, const int32_t *, const uint64_t *, uint32_t, uint32_t) {});
    char & byte = *(mapped->data() + mapped->get_tensors()[1].offset);
    byte = 7;
    clear(mapped, &other);
    CHECK(other.n_cleared == 2 && byte == 7);
    clear(mapped, buf.get());
    CHECK(buf->n_cleared == 0 && byte == 0);
}

// Upstream's tests write to the whole buffer of a cache, and to the first and last bytes of its tensors.
static void test_contract() {
    for (const auto kind : { KIND_ANON, KIND_TEMP, KIND_FILE }) {
        std::shared_ptr<backing> mapped;
        graph g;
        const thread_options memory(kind);
        if (kind == KIND_TEMP) {
            current().path = folder();
        }
        const auto buf = allocated(mapped, g);
        for (const char byte : { 5, 0 }) {
            ggml_backend_buffer_clear(buf.get(), byte);
            for (const auto & t : g.all) {
                const char * data = (const char *) t.data;
                CHECK(data >= buf->base && data + ggml_nbytes(&t) <= buf->base + buf->size);
                CHECK(data[0] == byte && data[ggml_nbytes(&t) - 1] == byte);
            }
        }
        CHECK(mapped->get_generation() == 0); // the header of a file is not in the buffer
    }
}

// log messages about the memory of a cache and about invalid variables
static void test_log() {
    const auto line = [](const std::string & where) { return "log_backing: KV cache (host) is in " + where + "\n"; };
    const auto logs = [](enum kind kind, enum keep keep = KEEP_NOT) {
        std::shared_ptr<backing> mapped;
        graph g;
        const thread_options memory(kind, keep);
        logged().clear();
        allocated(mapped, g);
        return logged();
    };
    CHECK(logs(KIND_HEAP) == line("upstream's memory"));
    CHECK(logs(KIND_ANON) == line("anonymous mapped memory"));
    CHECK(logs(KIND_FILE) == line("the file " + folder() + "/cache"));
    CHECK(logs(KIND_FILE, KEEP_IT) == line("the kept file " + folder() + "/cache"));

    ::setenv("LLAMA_KV_BACKING", folder().c_str(), 1);
    CHECK(logs(KIND_HEAP) == line("a temporary file in " + folder()));
    ::setenv("LLAMA_KV_BACKING", "mmpa", 1);
    const std::string ignored =
        "LLAMA_KV_BACKING is 'mmpa', which is ignored; expected heap, mmap, a directory, or a file whose path contains a '/'\n";
    CHECK(logs(KIND_HEAP) == ignored + line("upstream's memory"));
    CHECK(logs(KIND_ANON) == ignored + line("anonymous mapped memory"));
    ::unsetenv("LLAMA_KV_BACKING");
}

// caches of releases without and with extra data of cells, which files do not contain
struct plain_cache {};
struct ext_cache {
    bool more;
    bool has_cell_ext() const { return more; }
};

static void test_refusals() {
    const auto why = [](enum keep keep, const std::function<void(const backing &)> & check) {
        std::shared_ptr<backing> mapped;
        graph g;
        const thread_options memory(keep == KEEP_NOT ? KIND_ANON : KIND_FILE, keep);
        const auto buf = allocated(mapped, g);
        try {
            check(*mapped);
        } catch (const error & e) {
            CHECK(current().failed == e.why && std::strstr(e.what(), "n-gram"));
            return e.why;
        }
        return FAILURE_NONE;
    };
    for (const auto keep : { KEEP_IT, KEEP_FRESH }) {
        CHECK(why(keep, [](const backing & b) { check_cells(b, ext_cache{ true }, false); }) == FAILURE_UNSUPPORTED);
        CHECK(why(keep, [](const backing & b) { check_cells(b, plain_cache(), true); }) == FAILURE_UNSUPPORTED);
        CHECK(why(keep, [](const backing & b) { check_cells(b, ext_cache{ false }, false); }) == FAILURE_NONE);
        CHECK(why(keep, [](const backing & b) { check_cells(b, plain_cache(), false); }) == FAILURE_NONE);
    }
    CHECK(why(KEEP_NOT, [](const backing & b) { check_cells(b, ext_cache{ true }, true); }) == FAILURE_NONE);
}

// a cell of the releases that have no class for cells
struct cell {
    int32_t           pos = -1;
    std::set<int32_t> seq_id;
};

static void test_sets() {
    const uint32_t n_words = 2;
    std::vector<cell> cells(9);
    cells[0] = { 0, { 0 } };
    cells[3] = { 7, { 0, 63, 64, 127 } };
    cells[4] = { 9, {} };                  // free, because it has no sequence
    cells[5] = { 5, { 1, 128, -1 } };      // sequences out of range are omitted
    std::vector<int32_t>  pos(cells.size(), 77);
    std::vector<uint64_t> seqs(cells.size()*n_words, 77);
    read_sets(cells, pos.data(), seqs.data(), n_words);
    CHECK((pos == std::vector<int32_t>{ 0, -1, -1, 7, -1, 5, -1, -1, -1 }));
    std::vector<uint64_t> expected(seqs.size(), 0);
    expected[0] = 1;
    expected[6] = expected[7] = 1 | 1ull << 63;
    expected[10] = 2;
    CHECK(seqs == expected);

    std::vector<cell> again(cells.size());
    pos[2] = 4; // a position without a sequence
    CHECK(write_sets(again, pos.data(), seqs.data(), n_words) == 3);
    CHECK(again[0].pos == 0 && again[0].seq_id == cells[0].seq_id);
    CHECK(again[3].pos == 7 && again[3].seq_id == cells[3].seq_id);
    CHECK(again[5].pos == 5 && again[5].seq_id == std::set<int32_t>{ 1 });
    for (const size_t i : { 1, 2, 4, 6, 7, 8 }) {
        CHECK(again[i].pos == -1 && again[i].seq_id.empty());
    }
}

// cells as a class that requires a position before sequences, and each sequence once
struct cell_class {
    std::vector<cell> all;

    explicit cell_class(size_t n) : all(n) {}

    uint32_t size() const { return (uint32_t) all.size(); }
    bool     is_empty(uint32_t i) const { return all[i].pos < 0; }
    int32_t  pos_get(uint32_t i) const { CHECK(all[i].pos >= 0); return all[i].pos; }
    bool     seq_has(uint32_t i, int32_t seq) const { CHECK(all[i].pos >= 0); return all[i].seq_id.count(seq) > 0; }
    void     pos_set(uint32_t i, int32_t pos) { CHECK(all[i].pos < 0 && pos >= 0); all[i].pos = pos; }
    void     seq_add(uint32_t i, int32_t seq) { CHECK(all[i].pos >= 0 && all[i].seq_id.insert(seq).second); }
};

static void test_cells() {
    const uint32_t n_words = 2;
    cell_class cells(6);
    cells.all[0] = { 0, { 0 } };
    cells.all[2] = { 7, { 0, 63, 64, 127 } };
    cells.all[5] = { 5, { 1 } };
    std::vector<int32_t>  pos(cells.size(), 77);
    std::vector<uint64_t> seqs((size_t) cells.size()*n_words, 77);
    read_cells(cells, pos.data(), seqs.data(), n_words);
    CHECK((pos == std::vector<int32_t>{ 0, -1, 7, -1, -1, 5 }));
    CHECK((seqs == std::vector<uint64_t>{ 1, 0, 0, 0, 1 | 1ull << 63, 1 | 1ull << 63, 0, 0, 0, 0, 2, 0 }));

    cell_class again(6);
    pos[1] = 4; // a position without a sequence
    write_cells(again, pos.data(), seqs.data(), n_words);
    for (size_t i = 0; i < 6; ++i) {
        CHECK(again.all[i].pos == cells.all[i].pos && again.all[i].seq_id == cells.all[i].seq_id);
    }
}

int main(int argc, char ** argv) {
    return run_group(argc, argv, {
        { "alloc", test_alloc }, { "cells", test_cells }, { "clear", test_clear }, { "contract", test_contract },
        { "describe", test_describe }, { "devices", test_devices }, { "log", test_log }, { "refusals", test_refusals },
        { "sets", test_sets },
    });
}
