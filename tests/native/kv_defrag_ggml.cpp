// Unit tests of llama-kv-defrag-ggml.h with caches in host and device memory and backends of different capabilities: the
// bytes are compared with the expected result of the moves, and the operations with the expected ones.

#include "failing.h"
#include "groups.h"

#include <cstddef>

// maximum number of rows per ggml_get_rows()
static size_t max_rows = 65535;
#define LLAMA_KV_DEFRAG_MAX_ROWS max_rows

#include "llama-kv-defrag-ggml.h"

#include <algorithm>
#include <csignal>
#include <random>
#include <sys/wait.h>
#include <unistd.h>

using namespace llama_kv_defrag;
using llama_kv_defrag::move; // not std::move

static std::mt19937 generator(20261123);

static uint32_t below(uint32_t n) {
    return generator() % n;
}

// a machine with host memory, two devices and a remote device (RPC)
struct machine {
    ggml_backend_buffer_type other  = { "OTHER", false };
    ggml_backend_buffer_type device = { "DEVICE", false };
    ggml_backend_buffer_type remote = { "RPC[host:50052]", false };

    // supported operations of the devices; the CPU supports all
    bool copies = true, gathers = true, scatters = true;

    std::vector<ggml_backend> all;
    ggml_backend_sched        sched;
    graphs                    how;

    int n_calls = 0, fails_at = -1; // number of computed graphs, and index of the one that fails
    bool fails_late = false;        // the graph that fails is computed first

    explicit machine(size_t max_nodes = 4096) {
        auto * host = ggml_backend_cpu_buffer_type();
        const auto can = [this](const ggml_tensor * t) {
            return t->op == GGML_OP_SET_ROWS ? scatters : t->op == GGML_OP_GET_ROWS ? gathers : t->op == GGML_OP_CPY ? copies || of_words(t) : true;
        };
        all = {
            { "other", { &other }, can }, { "device", { &device }, can }, { "remote", { &remote }, can },
            { "cpu", { host }, [](const ggml_tensor *) { return true; } },
        };
        for (auto & each : all) {
            sched.backends.push_back(&each);
        }
        how.sched     = &sched;
        how.max_nodes = max_nodes;
        how.compute   = [this](ggml_cgraph * gf) {
            if (n_calls++ != fails_at) {
                return sched.compute(gf);
            }
            if (fails_late) {
                sched.compute(gf);
            }
            return false;
        };
    }

    ~machine() { schedulers().erase(&sched); }

    // gathered rows are written back by a copy of 32-bit words, which all backends support
    static bool of_words(const ggml_tensor * t) { return t->src[0]->op == GGML_OP_GET_ROWS || t->src[0]->op == GGML_OP_TRANSPOSE; }
};

// a tensor of a cache, its memory, and its initial bytes
struct cache_tensor {
    ggml_tensor t = {};
    std::unique_ptr<ggml_backend_buffer> buf;
    std::vector<char> before;
    bool transposed;

    // cells of `n_embd` values; the number of dimensions differs between releases
    cache_tensor(ggml_backend_buffer_type_t where, ggml_type type, int64_t n_embd, uint32_t n_cells, uint32_t n_stream = 1, bool trans = false)
        : transposed(trans) {
        switch (below(3)) {
            case 0: lay_out(t, type, n_embd*n_cells*n_stream); break;
            case 1: lay_out(t, type, n_embd, n_cells, n_stream); break;
            case 2: lay_out(t, type, n_embd, 1, n_cells, n_stream); break;
        }
        buf = make_buffer(where, ggml_nbytes(&t), 0);
        ggml_backend_tensor_alloc(buf.get(), &t, buf->base);
        uint32_t next = below(1 << 31);
        for (auto & byte : buf->memory) {
            next = 1664525*next + 1013904223;
            byte = (char) (next >> 24);
        }
        before = buf->memory;
    }

    // true if cell c of a stream has the initial bytes of cell `source`
    bool holds(uint32_t c, uint32_t source, uint32_t n_cells, uint32_t stream = 0, uint32_t n_stream = 1) const {
        const size_t size   = before.size()/n_stream;
        const size_t n_rows = transposed ? size/(ggml_type_size(t.type)*n_cells) : 1;
        const size_t stride = size/n_rows;
        const size_t n      = stride/n_cells;
        for (size_t row = 0; row < n_rows; ++row) {
            const size_t at = stream*size + row*stride;
            if (std::memcmp(buf->memory.data() + at + c*n, before.data() + at + source*n, n) != 0) {
                return false;
            }
        }
        return true;
    }
};

static std::vector<uint8_t> random_cells(uint32_t size) {
    std::vector<uint8_t> used(size);
    const uint32_t density = 5 + below(91);
    for (uint32_t i = 0; i < size; ++i) {
        used[i] = i > 0 && below(4) ? used[i - 1] : below(100) < density;
    }
    return used;
}

// every second cell of a cache is used
static std::vector<uint8_t> alternate(uint32_t size) {
    std::vector<uint8_t> used(size);
    for (uint32_t i = 1; i < size; i += 2) {
        used[i] = 1;
    }
    return used;
}

static plan planned(const std::vector<uint8_t> & used, order wanted = ORDER_FEWEST) {
    stats ignored;
    return make_plan(used.data(), used.size(), wanted, ignored);
}

// model of one stream of a cache, which follows moves cell by cell
struct stream {
    const std::vector<std::unique_ptr<cache_tensor>> & tensors;
    const uint32_t n_cells, which, n_stream;
    std::vector<uint32_t> from; // initial index of the cell at this index, if it is not free
    std::vector<bool>     free;

    stream(const std::vector<std::unique_ptr<cache_tensor>> & all, const std::vector<uint8_t> & used, uint32_t s = 0, uint32_t n = 1)
        : tensors(all), n_cells(used.size()), which(s), n_stream(n), from(used.size()), free(used.size()) {
        for (uint32_t i = 0; i < n_cells; ++i) {
            from[i] = i;
            free[i] = !used[i];
        }
    }

    std::vector<cell_tensor> cells() const {
        std::vector<cell_tensor> res;
        for (const auto & each : tensors) {
            add_cells(res, &each->t, each->transposed, n_cells, which, n_stream);
        }
        return res;
    }

    void follow(const move * moves, size_t n) {
        for (size_t i = 0; i < n; ++i) {
            for (uint32_t k = 0; k < moves[i].len; ++k) {
                const uint32_t src = moves[i].src + k, dst = moves[i].dst + k;
                CHECK(free[dst] && !free[src]);
                from[dst] = from[src];
                free[dst] = false;
                free[src] = true;
            }
        }
    }

    // checks that used cells have their bytes, and that only cells of [0, n_used) were written
    void check(uint32_t n_used) const {
        for (const auto & each : tensors) {
            for (uint32_t s = 0; s < n_stream; ++s) {
                for (uint32_t c = 0; c < n_cells; ++c) {
                    const bool mine = s == which && !free[c];
                    CHECK(each->holds(c, mine ? from[c] : c, n_cells, s, n_stream) || (s == which && free[c] && c < n_used));
                }
            }
        }
    }
};

struct outcome {
    result res;
    stats  sum;
    size_t n_moved = 0; // moves reported to the callback
};

static outcome carried_out(stream & s, const plan & p, machine * m, mover wanted = MOVER_AUTO, order kept = ORDER_FEWEST, uint32_t n_threads = 1) {
    options how;
    how.mover = wanted;
    how.order = kept;
    outcome out;
    traffic() = { 0, 0 };
    out.res = carry_out(p, how, s.cells(), m ? &m->how : nullptr, n_threads, out.sum, [&](const move * moves, size_t n) {
        CHECK(n > 0);
        s.follow(moves, n);
        s.check(p.n_used);
        out.n_moved += n;
    });
    return out;
}

static std::vector<std::unique_ptr<cache_tensor>> single_tensor(ggml_backend_buffer_type_t where, ggml_type type, int64_t n_embd, uint32_t n_cells, bool trans = false) {
    std::vector<std::unique_ptr<cache_tensor>> res;
    res.emplace_back(new cache_tensor(where, type, n_embd, n_cells, 1, trans));
    return res;
}

static void test_cells() {
    const uint32_t n_cells = 6, n_stream = 3;
    std::vector<cell_tensor> res;
    add_cells(res, nullptr, false, n_cells);
    ggml_tensor empty = {};
    lay_out(empty, GGML_TYPE_F16, 0);
    add_cells(res, &empty, true, n_cells);
    CHECK(res.empty());

    const cache_tensor k(ggml_backend_cpu_buffer_type(), GGML_TYPE_Q8_0, 64, n_cells, n_stream);
    const cache_tensor v(ggml_backend_cpu_buffer_type(), GGML_TYPE_F16, 10, n_cells, n_stream, true);
    for (uint32_t s = 0; s < n_stream; ++s) {
        res.clear();
        add_cells(res, const_cast<ggml_tensor *>(&k.t), false, n_cells, s, n_stream);
        add_cells(res, const_cast<ggml_tensor *>(&v.t), true, n_cells, s, n_stream);
        CHECK(res.size() == 2 && res[0].t == &k.t && res[1].t == &v.t);
        CHECK(res[0].size == 68*n_cells && res[0].offs == s*res[0].size);
        CHECK(res[0].where.data == (uint8_t *) k.t.data + res[0].offs && res[0].where.cell == 68 && res[0].where.n_rows == 1);
        CHECK(res[1].size == 20*n_cells && res[1].offs == s*res[1].size && res[1].where.data == (uint8_t *) v.t.data + res[1].offs);
        CHECK(res[1].where.cell == 2 && res[1].where.n_rows == 10 && res[1].where.stride == 2*n_cells);
    }
}

// the selected mover by memory, type and supported operations; the selection leaves no ggml_context
static void test_picks() {
    const plan p = planned(alternate(64)); // 16 moves of a cell each, 32 cells used
    struct {
        const char * about;
        char         where; // host, device or remote
        ggml_type    type;
        int64_t      n_embd;
        bool         trans;
        mover        wanted;
        int          able; // copies 1, gathers 2, scatters 4; -1: without graphs
        mover        expected;
    } cases[] = {
        { "host memory",                'h', GGML_TYPE_F16,  8,  false, MOVER_AUTO,   7,  MOVER_HOST },
        { "host memory",                'h', GGML_TYPE_F16,  8,  true,  MOVER_HOST,   7,  MOVER_HOST },
        { "gather in host memory",      'h', GGML_TYPE_F16,  8,  false, MOVER_GATHER, 7,  MOVER_GATHER },
        { "copy in host memory",        'h', GGML_TYPE_F16,  8,  true,  MOVER_GRAPH,  7,  MOVER_GRAPH },
        { "host memory, no graphs",     'h', GGML_TYPE_F16,  8,  false, MOVER_GATHER, -1, MOVER_HOST },
        { "host memory, no graphs",     'h', GGML_TYPE_F16,  8,  false, MOVER_GRAPH,  -1, MOVER_HOST },
        { "staged as requested",        'h', GGML_TYPE_F16,  8,  false, MOVER_STAGED, 7,  MOVER_STAGED },
        { "staged as requested",        'd', GGML_TYPE_F16,  8,  false, MOVER_STAGED, 7,  MOVER_STAGED },
        { "device, no graphs",          'd', GGML_TYPE_F16,  8,  false, MOVER_AUTO,   -1, MOVER_STAGED },
        { "device, no graphs",          'd', GGML_TYPE_F16,  8,  true,  MOVER_GATHER, -1, MOVER_STAGED },
        { "gather for many moves",      'd', GGML_TYPE_F16,  8,  false, MOVER_AUTO,   7,  MOVER_GATHER },
        { "no host mover on a device",  'd', GGML_TYPE_F16,  8,  false, MOVER_HOST,   7,  MOVER_GATHER },
        { "no set_rows",                'd', GGML_TYPE_F16,  8,  false, MOVER_AUTO,   3,  MOVER_GATHER },
        { "no copies",                  'd', GGML_TYPE_F16,  8,  false, MOVER_GRAPH,  6,  MOVER_GATHER },
        { "rows not of whole words",    'd', GGML_TYPE_F16,  7,  false, MOVER_GATHER, 7,  MOVER_GRAPH },
        { "not whole words, staged",    'd', GGML_TYPE_F16,  7,  false, MOVER_GATHER, 6,  MOVER_STAGED },
        { "blocks of whole words",      'd', GGML_TYPE_Q8_0, 1024, false, MOVER_AUTO, 7,  MOVER_GATHER },
        { "blocks not of whole words",  'd', GGML_TYPE_Q8_0, 32, false, MOVER_AUTO,   7,  MOVER_GRAPH },
        { "no get_rows",                'd', GGML_TYPE_F32,  8,  false, MOVER_GATHER, 1,  MOVER_GRAPH },
        { "no get_rows",                'd', GGML_TYPE_F32,  8,  true,  MOVER_AUTO,   1,  MOVER_GRAPH },
        { "no operations",              'd', GGML_TYPE_F32,  8,  false, MOVER_AUTO,   0,  MOVER_STAGED },
        { "no operations",              'd', GGML_TYPE_F32,  8,  true,  MOVER_GRAPH,  4,  MOVER_STAGED },
        { "transposed f16",             'd', GGML_TYPE_F16,  8,  true,  MOVER_AUTO,   7,  MOVER_GATHER },
        { "transposed f32",             'd', GGML_TYPE_F32,  7,  true,  MOVER_AUTO,   2,  MOVER_GATHER },
        { "odd number of f16 values",   'd', GGML_TYPE_F16,  7,  true,  MOVER_AUTO,   7,  MOVER_GRAPH },
        { "transposed i64",             'd', GGML_TYPE_I64,  8,  true,  MOVER_AUTO,   7,  MOVER_GRAPH },
        { "copies as requested",        'r', GGML_TYPE_F16,  8,  true,  MOVER_GRAPH,  7,  MOVER_GRAPH },
    };
    for (const auto & c : cases) {
        machine m;
        m.copies   = c.able & 1;
        m.gathers  = c.able & 2;
        m.scatters = c.able & 4;
        auto * where = c.where == 'h' ? ggml_backend_cpu_buffer_type() : c.where == 'd' ? &m.device : &m.remote;
        const auto tensors = single_tensor(where, c.type, c.n_embd, 64, c.trans);
        stream s(tensors, alternate(64));
        const mover found = pick_mover(s.cells()[0], c.wanted, c.able < 0 ? nullptr : &m.how, p, p.moves.size());
        if (found != c.expected) {
            std::printf("%s: %d, not %d\n", c.about, (int) found, (int) c.expected);
        }
        CHECK(found == c.expected && contexts().empty());

        const auto out = carried_out(s, p, c.able < 0 ? nullptr : &m, c.wanted);
        const int n_graphs = c.expected == MOVER_GATHER || c.expected == MOVER_GRAPH;
        CHECK(out.res == (n_graphs ? RESULT_GRAPHS : RESULT_HOST) && out.sum.n_graphs == n_graphs && m.sched.n_graphs == n_graphs);
        CHECK(m.sched.n_computed[GGML_OP_GET_ROWS] == (c.expected == MOVER_GATHER));
        CHECK(m.sched.n_computed[GGML_OP_SET_ROWS] == (c.expected == MOVER_GATHER && !c.trans && (c.able & 4 || c.where == 'h')));
        CHECK(m.sched.n_computed[GGML_OP_CPY] == (c.expected == MOVER_GRAPH ? 16 : c.expected == MOVER_GATHER && (c.trans || !(c.able & 4))));
        CHECK(traffic().n_get == (c.expected == MOVER_STAGED));
        CHECK(contexts().empty());
    }
}

// copies are selected if a gather would move more bytes per copy
static void test_worth() {
    struct { bool remote; bool trans; size_t worth; } cases[] = {
        { true, false, 16384 }, { true, true, 2048 }, { false, false, 1 << 20 }, { false, true, 1 << 17 },
    };
    for (const auto & c : cases) {
        machine m;
        auto * where = c.remote ? &m.remote : &m.device;
        const auto tensors = single_tensor(where, GGML_TYPE_F32, 32, 64, c.trans); // 128 bytes per cell
        const stream s(tensors, std::vector<uint8_t>(64, 1));
        const auto ct = s.cells()[0];
        CHECK(copy_worth(ct) == c.worth);
        plan p;
        p.moves  = { { 20, 2, 1 }, { 22, 4, 1 } };
        p.n_used = 2*c.worth/128;
        CHECK(pick_mover(ct, MOVER_AUTO, &m.how, p, 2) == MOVER_GATHER);
        p.n_used += 1;
        CHECK(pick_mover(ct, MOVER_AUTO, &m.how, p, 2) == MOVER_GRAPH);
        CHECK(pick_mover(ct, MOVER_GATHER, &m.how, p, 2) == MOVER_GATHER);
        m.copies = false;
        CHECK(pick_mover(ct, MOVER_AUTO, &m.how, p, 2) == MOVER_GATHER);
    }
}

// a move that overlaps itself needs many copies, and the mover is selected by the number of copies
static void test_overlaps() {
    const uint32_t n_cells = 3600;
    std::vector<uint8_t> used(n_cells, 1);
    used[7] = 0;
    for (uint32_t i = 3592; i < n_cells; ++i) {
        used[i] = 0;
    }
    const plan p = planned(used, ORDER_KEPT);
    CHECK(p.moves.size() == 1 && p.moves[0].len == 3584 && count_without_overlaps(p.moves) == 3584);
    for (const bool remote : { false, true }) {
        for (const bool gathers : { false, true }) {
            machine m(16384);
            m.gathers = gathers;
            const auto tensors = single_tensor(remote ? &m.remote : &m.device, GGML_TYPE_F32, 32, n_cells);
            stream s(tensors, used);
            options how;
            how.order = ORDER_KEPT;
            stats sum;
            CHECK(carry_out(p, how, s.cells(), &m.how, 1, sum, [&](const move * moves, size_t n) { s.follow(moves, n); }) == RESULT_GRAPHS);
            s.check(p.n_used);
            CHECK(m.sched.n_computed[GGML_OP_CPY] == (gathers ? 0 : 3584) && m.sched.n_computed[GGML_OP_GET_ROWS] == gathers);
            CHECK(sum.n_graphs == 1 && sum.n_moves == (gathers ? 1 : 3584));
        }
    }
    // a move that overlaps itself less needs few copies
    machine m;
    const auto tensors = single_tensor(&m.device, GGML_TYPE_F32, 4096, 256);
    std::vector<uint8_t> far(256, 1);
    for (uint32_t i = 3; i < 103; ++i) {
        far[i] = 0;
    }
    const plan q = planned(far, ORDER_KEPT);
    CHECK(q.moves.size() == 1 && count_without_overlaps(q.moves) == 2);
    stream s(tensors, far);
    CHECK(carried_out(s, q, &m, MOVER_AUTO, ORDER_KEPT).res == RESULT_GRAPHS && m.sched.n_computed[GGML_OP_CPY] == 2);
}

// expected number of graphs to gather `n_parts` tensors: 12 nodes per tensor, and 12 for the row indices
static int64_t gathers_for(size_t n_parts, size_t max_nodes) {
    const size_t n_batch = std::max<size_t>(1, (max_nodes - 12)/12);
    return (n_parts + n_batch - 1)/n_batch;
}

static void test_moves() {
    for (int round = 0; round < 400; ++round) {
        const uint32_t n_cells = 1 + below(48), n_stream = 1 + below(3), which = below(n_stream);
        machine m(4*(16 + below(40)));
        m.copies   = below(4);
        m.gathers  = below(4);
        m.scatters = below(2);
        ggml_backend_buffer_type_t places[] = { ggml_backend_cpu_buffer_type(), &m.device, &m.other, &m.remote };
        const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0 };

        std::vector<std::unique_ptr<cache_tensor>> tensors;
        for (uint32_t i = 1 + below(5); i > 0; --i) {
            const auto type = types[below(3)];
            const bool quantized = type == GGML_TYPE_Q8_0;
            tensors.emplace_back(new cache_tensor(places[below(4)], type, quantized ? 32*(1 + below(4)) : 1 + below(40), n_cells, n_stream, !quantized && below(2)));
        }
        const auto used  = random_cells(n_cells);
        const auto kept  = below(2) ? ORDER_KEPT : ORDER_FEWEST;
        const plan p     = planned(used, kept);
        const bool alone = below(4) == 0;
        const auto wanted = (mover) below(MOVER_STAGED + 1);

        stream s(tensors, used, which, n_stream);
        // an earlier computation that is pending, and must be complete before cells move
        auto & late = tensors[0]->before[0];
        late ^= 1;
        m.sched.pending.push_back([&] { tensors[0]->buf->memory[0] ^= 1; });
        m.sched.is_clean = false;
        if (alone || p.moves.empty()) {
            ggml_backend_sched_synchronize(&m.sched);
        }
        const auto out = carried_out(s, p, alone ? nullptr : &m, wanted, kept, 1 + below(3));
        s.check(p.n_used);
        CHECK(contexts().empty() && m.sched.pending.empty() && m.sched.placed.empty());
        CHECK(m.sched.is_clean == (m.sched.n_graphs > 0)); // without graphs the scheduler is not reset

        if (p.moves.empty()) {
            CHECK(out.res == RESULT_HOST && out.n_moved == 0 && out.sum.n_defrags == 0 && out.sum.n_scratch == 0);
            continue;
        }
        size_t n_bytes = 0;
        for (const auto & each : tensors) {
            n_bytes += each->before.size()/n_stream/n_cells*p.n_cells;
        }
        CHECK(out.sum.n_defrags == 1 && out.sum.n_cells == p.n_cells && out.sum.n_bytes == (int64_t) n_bytes);
        CHECK(out.sum.n_moves == (int64_t) out.n_moved && out.n_moved >= p.moves.size());
        CHECK(out.sum.n_graphs == m.sched.n_graphs && out.res == (m.sched.n_graphs ? RESULT_GRAPHS : RESULT_HOST));
        CHECK(!alone || m.sched.n_graphs == 0);
        CHECK(out.n_moved == p.moves.size() || m.sched.n_computed[GGML_OP_CPY] > 0);
    }
}

// graphs are split by the maximum number of nodes and by memory
static void test_graphs() {
    const auto used = alternate(40); // 10 moves
    const plan p = planned(used);
    for (const size_t max_nodes : { 8, 16, 32, 64, 256 }) {
        for (const bool both : { false, true }) {
            machine m(max_nodes);
            auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 40);
            tensors.emplace_back(new cache_tensor(both ? &m.other : &m.device, GGML_TYPE_F16, 6, 40, 1, true));
            stream s(tensors, used);
            const auto out = carried_out(s, p, &m, MOVER_GRAPH);
            const size_t n_each  = both ? 1 : 2;
            const size_t n_batch = (max_nodes - n_each)/(3*n_each);
            CHECK(out.sum.n_graphs == (int64_t) ((p.moves.size() + n_batch - 1)/n_batch*(both ? 2 : 1)));
            CHECK(m.sched.n_computed[GGML_OP_CPY] == 2*(int) p.moves.size() && out.res == RESULT_GRAPHS);
        }
    }
    for (const size_t max_nodes : { 23, 24, 35, 36, 48, 60, 4096 }) {
        machine m(max_nodes);
        std::vector<std::unique_ptr<cache_tensor>> tensors;
        for (int i = 0; i < 5; ++i) {
            tensors.emplace_back(new cache_tensor(&m.device, GGML_TYPE_F16, 4, 40, 1, i % 2));
        }
        tensors.emplace_back(new cache_tensor(&m.remote, GGML_TYPE_F16, 4, 40));
        stream s(tensors, used);
        const auto out = carried_out(s, p, &m, MOVER_GATHER);
        CHECK(out.sum.n_graphs == gathers_for(5, max_nodes) + 1 && out.n_moved == p.moves.size());
        CHECK(out.sum.n_graphs == m.sched.n_graphs && m.sched.n_computed[GGML_OP_GET_ROWS] == 6);
    }
    // staged tensors move in the batches of the copies
    for (const order kept : { ORDER_FEWEST, ORDER_KEPT }) {
        machine m(16); // 5 moves per graph
        m.all[1].can = [](const ggml_tensor * op) { return op->op == GGML_OP_CPY && op->type != GGML_TYPE_Q8_0; };
        auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 40);
        tensors.emplace_back(new cache_tensor(&m.device, GGML_TYPE_Q8_0, 32, 40));
        stream s(tensors, used);
        const plan q = planned(used, kept);
        const auto out = carried_out(s, q, &m, MOVER_GRAPH, kept);
        CHECK(out.sum.n_graphs == (int64_t) (q.moves.size() + 4)/5 && out.sum.n_graphs > 1);
        CHECK(traffic().n_get == out.sum.n_graphs && traffic().n_set == out.sum.n_graphs);
    }
}

// No ggml_get_rows() exceeds the maximum number of rows of a kernel, and split gathers move the same cells.
static void test_rows() {
    const auto rows_of = [](const ggml_tensor * t) { return (size_t) t->src[1]->ne[0]; };

    for (const size_t limit : { (size_t) 1, (size_t) 3, (size_t) 30, (size_t) 65535 }) {
        max_rows = limit;
        for (int variant = 0; variant < 8; ++variant) {
            const bool trans = variant & 1;
            const order kept = variant & 4 ? ORDER_KEPT : ORDER_FEWEST;
            machine m;
            m.scatters = variant & 2;
            const auto can = m.all[1].can;
            m.all[1].can = [&](const ggml_tensor * t) {
                CHECK(t->op != GGML_OP_GET_ROWS || rows_of(t) <= limit);
                return can(t);
            };
            const auto used = limit == 65535 ? alternate(140000) : alternate(181);
            const auto tensors = single_tensor(&m.device, GGML_TYPE_F32, trans ? 2 : 1, used.size(), trans);
            stream s(tensors, used);
            const plan p = planned(used, kept);
            CHECK(carried_out(s, p, &m, MOVER_GATHER, kept).res == RESULT_GRAPHS);
            s.check(p.n_used);
            const auto & last = p.moves.back();
            const size_t n_rows = m.scatters && !trans ? p.n_cells : last.dst + last.len - p.moves[0].dst;
            CHECK(m.sched.n_computed[GGML_OP_GET_ROWS] == (int) ((n_rows + limit - 1)/limit));
            CHECK(limit != 65535 || p.n_used > limit);
        }
    }
    // more parts than nodes of a graph: uses copies instead
    max_rows = 1;
    machine m(100);
    const auto tensors = single_tensor(&m.device, GGML_TYPE_F32, 1, 181);
    const auto used = alternate(181);
    stream s(tensors, used);
    CHECK(carried_out(s, planned(used), &m, MOVER_GATHER).res == RESULT_GRAPHS);
    CHECK(m.sched.n_computed[GGML_OP_GET_ROWS] == 0 && m.sched.n_computed[GGML_OP_CPY] > 0);
    max_rows = 65535;
}

// Reserving graphs takes time, so only several graphs of an ordered plan are reserved: a single graph is allocated before
// it writes, and moves that do not overlap can be repeated.
static void test_reservations() {
    const auto used = alternate(40);
    for (const order kept : { ORDER_FEWEST, ORDER_KEPT }) {
        for (const bool both : { false, true }) {
            machine m;
            auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 40);
            if (both) {
                tensors.emplace_back(new cache_tensor(&m.other, GGML_TYPE_F16, 4, 40));
            }
            stream s(tensors, used);
            CHECK(carried_out(s, planned(used, kept), &m, MOVER_GATHER, kept).res == RESULT_GRAPHS);
            CHECK(m.sched.n_graphs == 1 + both && m.sched.n_reserved == (kept == ORDER_KEPT && both ? 2 : 0));
        }
    }
}

// the maximum scratch memory of each mover
static void test_scratch() {
    const auto used = alternate(40); // 20 used cells: 10 stay, 10 move
    const plan p = planned(used);
    const auto & last = p.moves.back();
    const int64_t n_kept = last.dst + last.len - p.moves[0].dst, n_span = last.src + last.len - p.moves[0].dst;
    const int64_t numbers = 4*n_kept + (4 + 8)*p.n_cells;

    machine m;
    auto rows = single_tensor(&m.device, GGML_TYPE_F32, 32, 40);
    rows.emplace_back(new cache_tensor(&m.device, GGML_TYPE_F32, 16, 40));
    stream a(rows, used);
    CHECK(carried_out(a, p, &m, MOVER_GATHER).sum.n_scratch == 32*4*n_kept + numbers);

    const auto transposed = single_tensor(&m.device, GGML_TYPE_F16, 48, 40, true);
    stream b(transposed, used);
    CHECK(carried_out(b, p, &m, MOVER_GATHER).sum.n_scratch == 48*2*(n_kept + n_span) + numbers);

    // the maximum of the tensors, not their sum, and not the last one
    for (const bool swapped : { false, true }) {
        auto two = single_tensor(&m.device, GGML_TYPE_F16, swapped ? 4 : 8, 40);
        two.emplace_back(new cache_tensor(&m.device, GGML_TYPE_F16, swapped ? 8 : 4, 40));
        stream c(two, used);
        CHECK(carried_out(c, p, &m, MOVER_STAGED).sum.n_scratch == 16*40);
    }
    const auto in_rows = single_tensor(&m.device, GGML_TYPE_F16, 4, 40, true);
    stream d(in_rows, used);
    const int64_t n_list = host_moves(p.moves.data(), p.moves.size(), p.moves.size(), true).n_scratch();
    CHECK(n_list > 0);
    CHECK(carried_out(d, p, &m, MOVER_STAGED).sum.n_scratch == 8*40 + n_list);

    const auto here = single_tensor(ggml_backend_cpu_buffer_type(), GGML_TYPE_F16, 4, 40, true);
    stream e(here, used);
    CHECK(carried_out(e, p, &m).sum.n_scratch == n_list);
    const auto rows_here = single_tensor(ggml_backend_cpu_buffer_type(), GGML_TYPE_F16, 4, 40);
    stream g(rows_here, used);
    CHECK(carried_out(g, p, &m).sum.n_scratch == 0);
    const auto copied = single_tensor(&m.device, GGML_TYPE_F16, 4, 40);
    stream f(copied, used);
    const auto out = carried_out(f, p, &m, MOVER_GRAPH);
    CHECK(out.sum.n_scratch == 0);

    // the maximum of several defragmentations
    stats sum;
    for (const int64_t before : { (int64_t) 1, (int64_t) 1 << 40 }) {
        sum.n_scratch = before;
        options how;
        how.mover = MOVER_STAGED;
        carry_out(p, how, f.cells(), nullptr, 1, sum, [](const move *, size_t) {});
        CHECK(sum.n_scratch == std::max<int64_t>(before, 8*40));
    }
}

// tensors that would need more than the maximum scratch memory are gathered in slices of rows or words
static void test_slices() {
    const uint32_t n_cells = 1 << 17;
    std::vector<uint8_t> used(n_cells, 0);
    used[1] = used[n_cells - 3] = used[n_cells - 1] = 1;
    const plan p = planned(used);
    {
        machine m;
        const auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 132, n_cells, true);
        stream s(tensors, used);
        const auto out = carried_out(s, p, &m, MOVER_GATHER);
        // a row takes more than 256 KiB, so that 127 rows fit, rounded down to 112
        CHECK(m.sched.n_computed[GGML_OP_GET_ROWS] == 2 && out.sum.n_graphs == 1);
        const int64_t n_span = n_cells - p.moves[0].dst, n_kept = 3 - p.moves[0].dst;
        CHECK(out.sum.n_scratch == 112*2*(n_span + n_kept) + 4*n_kept + 12*p.n_cells);
    }
    // 512 Ki cells, so that one word of all cells takes 2 MiB; the two holes are far apart
    const uint32_t n_full = 1 << 19;
    std::vector<uint8_t> full(n_full, 1);
    full[0] = full[n_full - 4] = 0;
    const plan far = planned(full);
    for (const bool scatters : { false, true }) {
        machine m;
        m.scatters = scatters;
        const auto tensors = single_tensor(&m.device, GGML_TYPE_F32, 20, n_full);
        stream s(tensors, full);
        const auto out = carried_out(s, far, &m, MOVER_GATHER);
        // without ggml_set_rows(), 524,285 rows take nine parts
        CHECK(m.sched.n_computed[GGML_OP_GET_ROWS] == (scatters ? 2 : 2*9) && out.sum.n_graphs == 1 && far.n_cells == 2);
        CHECK(out.sum.n_scratch == 16*4*(n_full - 3) + 4*(n_full - 3) + 12*2);
    }
}

// a failed graph returns RESULT_FAILED, and all cells whose moves were not reported keep their data
static void test_failures() {
    const auto used = alternate(48); // 12 moves
    const plan p = planned(used);
    for (const mover wanted : { MOVER_GRAPH, MOVER_GATHER }) {
        for (const bool fails_late : { false, true }) {
            for (int at = 0; at < 6; ++at) {
                machine m(16); // 5 moves per graph
                m.fails_late = fails_late;
                m.fails_at   = at;
                auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 48);
                tensors.emplace_back(new cache_tensor(&m.other, GGML_TYPE_F16, 4, 48));
                tensors.emplace_back(new cache_tensor(ggml_backend_cpu_buffer_type(), GGML_TYPE_F16, 4, 48));
                stream s(tensors, used);
                const auto out = carried_out(s, p, &m, wanted);
                const int n_graphs = wanted == MOVER_GRAPH ? 9 : 3;
                CHECK(out.res == (at < n_graphs ? RESULT_FAILED : RESULT_GRAPHS));
                CHECK(out.sum.n_defrags == (at < n_graphs ? 0 : 1));
                CHECK(out.n_moved == (at >= n_graphs ? p.moves.size() : wanted == MOVER_GRAPH ? 5*(at/3) : 0));
                // destinations may have been written, sources have not
                for (uint32_t c = 0; c < s.n_cells; ++c) {
                    for (const auto & each : tensors) {
                        CHECK(s.free[c] || each->holds(c, s.from[c], s.n_cells));
                    }
                }
                CHECK(contexts().empty() && m.sched.placed.empty());
            }
        }
    }
    // no memory for a graph: nothing is computed
    for (const mover wanted : { MOVER_GRAPH, MOVER_GATHER }) {
        for (const order kept : { ORDER_FEWEST, ORDER_KEPT }) {
            machine m;
            m.sched.n_until_full = 0;
            const auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 48);
            stream s(tensors, used);
            const auto out = carried_out(s, planned(used, kept), &m, wanted, kept);
            CHECK(out.res == RESULT_FAILED && out.n_moved == 0 && m.n_calls == 0 && tensors[0]->buf->memory == tensors[0]->before);
        }
    }
}

// one tensor per letter: host, device, other or remote memory
static std::vector<std::unique_ptr<cache_tensor>> spread(machine & m, const std::string & where, uint32_t n_cells) {
    std::vector<std::unique_ptr<cache_tensor>> res;
    for (const char each : where) {
        auto * type = each == 'h' ? ggml_backend_cpu_buffer_type() : each == 'o' ? &m.other : each == 'r' ? &m.remote : &m.device;
        res.emplace_back(new cache_tensor(type, GGML_TYPE_F16, 4, n_cells, 1, res.size() % 2));
    }
    return res;
}

// Fault injection into each allocation and each thread start. Cells and data stay consistent: without graphs, all moves or
// none are made; with graphs, the reported ones. The scheduler does not refer to freed tensors.
static void test_faults() {
    const auto used = alternate(48);
    const char * const places[] = { "hh", "dd", "dor", "hdohd" };
    for (const order kept : { ORDER_FEWEST, ORDER_KEPT }) {
        const plan p = planned(used, kept);
        for (const mover wanted : { MOVER_AUTO, MOVER_HOST, MOVER_GATHER, MOVER_GRAPH, MOVER_STAGED }) {
            for (const char * where : places) {
                for (const size_t max_nodes : { 32, 4096 }) {
                    if (max_nodes != 32 && where != places[3]) {
                        continue;
                    }
                    bool hit = true;
                    long at  = 0;
                    int n_failed = 0;
                    for (; hit; ++at) {
                        machine m(max_nodes);
                        const auto tensors = spread(m, where, 48);
                        stream s(tensors, used);
                        const auto cells = s.cells();
                        options how;
                        how.mover = wanted;
                        how.order = kept;
                        stats  sum;
                        size_t n_moved = 0;
                        arm(at);
                        const auto res = carry_out(p, how, cells, &m.how, 3, sum, [&](const move * moves, size_t n) {
                            const long n_seen = faults().n_seen;
                            s.follow(moves, n);
                            n_moved += n;
                            CHECK(faults().n_seen == n_seen);
                        });
                        hit = disarm();
                        n_failed += res == RESULT_FAILED;
                        CHECK(hit || res != RESULT_FAILED);
                        // used cells have their data, whether they have moved or not
                        for (uint32_t c = 0; c < s.n_cells; ++c) {
                            for (const auto & each : tensors) {
                                CHECK(s.free[c] || each->holds(c, s.from[c], s.n_cells));
                            }
                        }
                        CHECK(sum.n_defrags == (res != RESULT_FAILED) && sum.n_cells == (res == RESULT_FAILED ? 0 : p.n_cells));
                        if (res != RESULT_FAILED) {
                            CHECK(sum.n_moves == (int64_t) n_moved);
                            s.check(p.n_used);
                        } else if (n_moved == 0 && (kept == ORDER_KEPT || sum.n_graphs == 0)) {
                            for (const auto & each : tensors) {
                                CHECK(each->buf->memory == each->before);
                            }
                        }
                        // only copies in graphs have more than one batch
                        CHECK(res != RESULT_FAILED || n_moved == 0 || wanted == MOVER_GRAPH);
                        CHECK(contexts().empty() && m.sched.pending.empty() && m.sched.placed.empty());
                    }
                    CHECK(n_failed >= 4 && at > n_failed);
                }
            }
        }
    }
    // enough data for threads; a failed thread start reduces their number
    for (const order kept : { ORDER_FEWEST, ORDER_KEPT }) {
        const auto few = alternate(16);
        const plan p = planned(few, kept);
        uint32_t n_least = 8, n_most = 0;
        bool hit = true;
        for (long at = 0; hit; ++at) {
            std::vector<std::unique_ptr<cache_tensor>> tensors;
            for (int i = 0; i < 3; ++i) {
                tensors.emplace_back(new cache_tensor(ggml_backend_cpu_buffer_type(), GGML_TYPE_F32, 1 << 18, 16));
            }
            stream s(tensors, few);
            const auto cells = s.cells();
            options how;
            how.order = kept;
            stats sum;
            const uint32_t before = n_started;
            arm(at);
            const auto res = carry_out(p, how, cells, nullptr, 3, sum, [&](const move * moves, size_t n) { s.follow(moves, n); });
            hit = disarm();
            if (res == RESULT_FAILED) {
                CHECK(hit && n_started == before && sum.n_defrags == 0 && tensors[0]->buf->memory == tensors[0]->before);
            } else {
                n_least = std::min(n_least, n_started - before);
                n_most  = std::max(n_most, n_started - before);
            }
            for (uint32_t c = 0; c < 16; ++c) {
                for (const auto & each : tensors) {
                    CHECK(s.free[c] || each->holds(c, s.from[c], 16));
                }
            }
        }
        CHECK(n_least == 0 && n_most == 2);
    }
}

// an exception in a computation is handled as a failed graph
static void test_throws() {
    const auto used = alternate(48);
    machine m;
    m.how.compute = [](ggml_cgraph *) -> bool { throw std::bad_alloc(); };
    const auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 48);
    stream s(tensors, used);
    const auto out = carried_out(s, planned(used), &m);
    CHECK(out.res == RESULT_FAILED && out.n_moved == 0 && out.sum.n_graphs == 1 && tensors[0]->buf->memory == tensors[0]->before);
    CHECK(contexts().empty() && m.sched.is_clean && m.sched.placed.empty());
}

// moves of an ordered plan overlap, so that a failure between them can be neither resumed nor undone: the process aborts
static void test_middle() {
    const auto used = alternate(48);
    for (const order kept : { ORDER_FEWEST, ORDER_KEPT }) {
        const pid_t child = fork();
        if (child == 0) {
            std::signal(SIGABRT, SIG_DFL);
            machine m;
            m.fails_at = 0;
            const auto tensors = single_tensor(&m.device, GGML_TYPE_F16, 4, 48);
            stream s(tensors, used);
            _exit(carried_out(s, planned(used, kept), &m, MOVER_GATHER, kept).res == RESULT_FAILED ? 0 : 1);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(kept == ORDER_KEPT ? WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

int main(int argc, char ** argv) {
    return run_group(argc, argv, {
        { "cells", test_cells }, { "failures", test_failures }, { "faults", test_faults }, { "graphs", test_graphs },
        { "middle", test_middle }, { "moves", test_moves }, { "overlaps", test_overlaps }, { "picks", test_picks },
        { "reservations", test_reservations }, { "rows", test_rows }, { "scratch", test_scratch }, { "slices", test_slices }, { "throws", test_throws },
        { "worth", test_worth },
    });
}
