#ifndef LLAMA_KV_DEFRAG_GGML_H
#define LLAMA_KV_DEFRAG_GGML_H

// Executes a plan of llama-kv-defrag.h on the tensors of a KV cache, with the mover that fits each tensor's memory.
//
// This file uses only public types of ggml, none of llama.cpp, and is identical for all their versions.

#include "llama-kv-defrag.h"
#include "llama-kv-settings.h"

#include "ggml.h"
#include "ggml-backend.h"

#include <functional>
#include <memory>
#include <new>

namespace llama_kv_defrag {

// A tensor of a cache, or one stream of it, and the location of its cells.
struct cell_tensor {
    ggml_tensor * t;
    size_t offs;  // offset of the first cell, in bytes
    size_t size;  // size of all cells, in bytes
    layout where; // where.data is valid only in host memory
};

// Append one stream of a tensor to res. transposed: the tensor has one row per value instead of one per cell. Skips
// NULL and empty tensors: some layers have no K or V.
inline void add_cells(std::vector<cell_tensor> & res, ggml_tensor * t, bool transposed, size_t n_cells, size_t stream = 0, size_t n_stream = 1) {
    if (!t || ggml_nelements(t) == 0) {
        return;
    }

    const size_t n_embd = ggml_nelements(t)/(n_cells*n_stream);
    const size_t size   = ggml_nbytes(t)/n_stream;

    auto * data = (uint8_t *) t->data + stream*size;

    if (transposed) {
        res.push_back({ t, stream*size, size, { data, ggml_type_size(t->type), n_embd, ggml_row_size(t->type, n_cells) } });
    } else {
        res.push_back({ t, stream*size, size, { data, ggml_row_size(t->type, n_embd), 1, 0 } });
    }
}

// Access to the scheduler that computes graphs.
struct graphs {
    ggml_backend_sched_t sched;
    size_t max_nodes;
    std::function<bool(ggml_cgraph *)> compute; // computes an allocated graph; returns false on failure
};

enum result {
    RESULT_HOST,   // done without graphs
    RESULT_GRAPHS, // done, and the scheduler must be reserved again
    RESULT_FAILED, // a graph or an allocation failed; cells that were not reported as moved are unchanged
};

// The graph of one batch of moves, for as many tensors as fit.
// The scheduler keeps no reference to it outside of reserve() and compute().
class move_graph {
public:
    explicit move_graph(const graphs & which) : g(which) {
        ctx = ggml_init({ g.max_nodes*ggml_tensor_overhead() + ggml_graph_overhead_custom(g.max_nodes, false), nullptr, true });

        if (!ctx) {
            throw std::bad_alloc();
        }

        gf = ggml_new_graph_custom(ctx, g.max_nodes, false);
    }

    ~move_graph() {
        ggml_free(ctx);
    }

    move_graph(const move_graph &) = delete;
    move_graph & operator=(const move_graph &) = delete;

    // Return the input tensor for n cell indexes of a list. `values` must stay valid until the graph is computed.
    template <typename T>
    ggml_tensor * add_input(ggml_type type, const std::vector<T> & values, size_t begin, size_t n) {
        for (const auto & known : inputs) {
            if (known.data == values.data() + begin) {
                return known.t;
            }
        }

        auto * t = ggml_new_tensor_1d(ctx, type, n);

        ggml_set_input(t);

        inputs.push_back({ t, values.data() + begin });

        return t;
    }

    // Return a view of a tensor's bytes as rows of another type.
    ggml_tensor * add_view(ggml_tensor * t, ggml_type type, size_t offs, int64_t ne0, int64_t ne1, size_t nb1) const {
        auto * v = ggml_view_tensor(ctx, t);

        v->type = type;
        v->op   = GGML_OP_VIEW;

        v->src[0]     = t;
        v->view_offs += offs;
        v->data       = v->data ? (uint8_t *) v->data + offs : nullptr;

        v->ne[0] = ne0;
        v->ne[1] = ne1;
        v->ne[2] = 1;
        v->ne[3] = 1;

        v->nb[0] = ggml_type_size(type);
        v->nb[1] = nb1;
        v->nb[2] = nb1*ne1;
        v->nb[3] = nb1*ne1;

        return v;
    }

    void add(ggml_tensor * node) {
        ggml_build_forward_expand(gf, node);
    }

    // Compute a node on the given backend instead of the one that the scheduler selects.
    void place(ggml_tensor * node, ggml_backend_t backend) {
        placed.push_back({ node, backend });
    }

    // Reserve the memory that compute() requires; return false if it cannot be allocated.
    // The scheduler changes the graph, so the caller must rebuild it before compute().
    bool reserve() {
        reset();

        const bool done = ggml_backend_sched_reserve(g.sched, gf);

        ggml_backend_sched_reset(g.sched);

        return done;
    }

    // Compute the graph; return false on failure. Sets started to true as soon as cells may have been written.
    bool compute(bool & started) {
        reset();

        bool done = ggml_backend_sched_alloc_graph(g.sched, gf);

        if (done) {
            started = true;

            try {
                for (const auto & each : inputs) {
                    if (each.t->buffer) { // NULL if no node uses it
                        ggml_backend_tensor_set(each.t, each.data, 0, ggml_nbytes(each.t));
                    }
                }

                done = g.compute(gf);
            } catch (const std::exception &) {
                done = false;
            }
        }

        // the graph may still be running, and the scheduler refers to its tensors
        ggml_backend_sched_synchronize(g.sched);
        ggml_backend_sched_reset(g.sched);

        return done;
    }

    ggml_context * ctx;

private:
    struct input {
        ggml_tensor * t;
        const void  * data;
    };

    struct place_of {
        ggml_tensor  * t;
        ggml_backend_t backend;
    };

    void reset() const {
        ggml_backend_sched_reset(g.sched);

        for (const auto & each : placed) {
            ggml_backend_sched_set_tensor_backend(g.sched, each.t, each.backend);
        }
    }

    const graphs & g;

    ggml_cgraph * gf;

    std::vector<input>    inputs;
    std::vector<place_of> placed;
};

// The graphs of one batch of moves.
typedef std::vector<std::unique_ptr<move_graph>> graph_list;

// Return the scheduler's first backend that supports the tensor's buffer type and all of `ops`, or nullptr.
inline ggml_backend_t backend_for(const graphs & g, const ggml_tensor * t, const std::vector<ggml_tensor *> & ops) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(g.sched); ++i) {
        auto * backend = ggml_backend_sched_get_backend(g.sched, i);

        if (ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(t->buffer)) &&
            std::all_of(ops.begin(), ops.end(), [=](const ggml_tensor * op) { return ggml_backend_supports_op(backend, op); })) {
            return backend;
        }
    }

    return nullptr;
}

//
// one copy per move and tensor
//

inline ggml_tensor * copy(const move_graph & mg, const cell_tensor & ct, const move & m) {
    const auto view = [&](uint32_t cell) {
        const size_t offs = ct.offs + cell*ct.where.cell;

        return ct.where.n_rows > 1
            ? ggml_view_2d(mg.ctx, ct.t, m.len, ct.where.n_rows, ct.where.stride, offs)
            : ggml_view_2d(mg.ctx, ct.t, ct.where.cell/ggml_type_size(ct.t->type)*ggml_blck_size(ct.t->type), m.len, ct.where.cell, offs);
    };

    auto * src = view(m.src);
    auto * dst = view(m.dst);

    return ggml_cpy(mg.ctx, src, dst);
}

// Return false if no backend supports the copy: some cannot copy quantized rows to quantized rows.
inline bool copies_fit(const graphs & g, const cell_tensor & ct, const plan & p) {
    move_graph mg(g);

    return backend_for(g, ct.t, { copy(mg, ct, p.moves[0]) });
}

inline void add_copies(graph_list & res, const graphs & g, const std::vector<cell_tensor> & tensors, const move * moves, size_t n_moves) {
    std::unique_ptr<move_graph> mg(new move_graph(g));

    for (const auto & ct : tensors) {
        for (size_t i = 0; i < n_moves; ++i) {
            mg->add(copy(*mg, ct, moves[i]));
        }
    }

    res.push_back(std::move(mg));
}

//
// cells collected by index: a few nodes per tensor, independent of the number of moves
//

// Maximum number of rows of one ggml_get_rows: CUDA kernels of 0.3.9 abort with more, because each row is a block in the
// second dimension of their grid. Tests set another value.
#ifndef LLAMA_KV_DEFRAG_MAX_ROWS
#define LLAMA_KV_DEFRAG_MAX_ROWS 65535
#endif

// Copies values bit for bit, as 32-bit words or, in transposed tensors, as a float type of the same size.
class gather {
public:
    // maximum bytes for collected cells; a tensor that needs more is moved in slices of its values
    static constexpr size_t MAX_SCRATCH = 32*1024*1024;

    gather(const graphs & which, const move * moves, size_t n_moves) : g(which), first(moves[0].dst) {
        const auto & last = moves[n_moves - 1];

        n_span = last.src + last.len - first;

        for (uint32_t i = 0; i < last.dst + last.len - first; ++i) {
            kept.push_back(i);
        }

        for (size_t i = 0; i < n_moves; ++i) {
            for (uint32_t k = 0; k < moves[i].len; ++k) {
                src.push_back(moves[i].src + k - first);
                dst.push_back(moves[i].dst + k - first);

                kept[dst.back()] = src.back();
            }
        }
    }

    // Return false if no backend supports the operations for this tensor.
    bool fits(const cell_tensor & ct) const {
        const size_t bytes = ct.where.cell;

        if (n_nodes() > g.max_nodes) {
            return false;
        }

        if (ct.where.n_rows > 1 ? (bytes != 2 && bytes != 4) || ct.where.n_rows*bytes % 4 != 0 : bytes % 4 != 0) {
            return false;
        }

        move_graph mg(g);

        return add(mg, ct, 0, std::min(n_slice(ct), n_values(ct)));
    }

    void add_graphs(graph_list & res, const std::vector<cell_tensor> & tensors) const {
        std::vector<slice> todo;

        for (const auto & ct : tensors) {
            for (size_t i = 0; i < n_values(ct); i += n_slice(ct)) {
                todo.push_back({ &ct, i, std::min(n_slice(ct), n_values(ct) - i) });
            }
        }

        const size_t n_batch = std::max<size_t>(1, (g.max_nodes - n_nodes())/n_nodes());

        for (size_t i = 0; i < todo.size(); i += n_batch) {
            std::unique_ptr<move_graph> mg(new move_graph(g));

            for (size_t k = i; k < std::min(i + n_batch, todo.size()); ++k) {
                add(*mg, *todo[k].ct, todo[k].first, todo[k].n);
            }

            res.push_back(std::move(mg));
        }
    }

    // Return the maximum bytes that this uses at a time in addition to the cache.
    size_t n_scratch(const std::vector<cell_tensor> & tensors) const {
        size_t res = 0;

        for (const auto & ct : tensors) {
            res = std::max(res, n_slice(ct)*n_bytes(ct));
        }

        return res + kept.size()*sizeof(int32_t) + src.size()*(sizeof(int32_t) + sizeof(int64_t));
    }

private:
    struct slice {
        const cell_tensor * ct;
        size_t first;
        size_t n;
    };

    // A part of a list of rows that one ggml_get_rows can collect.
    struct piece {
        size_t begin;
        size_t n;
    };

    static std::vector<piece> get_pieces(size_t n_rows) {
        const size_t n_max = LLAMA_KV_DEFRAG_MAX_ROWS;

        std::vector<piece> res;

        for (size_t i = 0; i < n_rows; i += n_max) {
            res.push_back({ i, std::min(n_max, n_rows - i) });
        }

        return res;
    }

    // Return the maximum number of graph nodes of a slice: views, operations, the tensor and the indexes.
    size_t n_nodes() const {
        return 12*get_pieces(kept.size()).size();
    }

    // Return the number of units that a slice consists of: words of a cell, or rows if transposed.
    static size_t n_values(const cell_tensor & ct) {
        return ct.where.n_rows > 1 ? ct.where.n_rows : ct.where.cell/4;
    }

    // Return the bytes of scratch memory per value.
    size_t n_bytes(const cell_tensor & ct) const {
        return ct.where.n_rows > 1 ? ct.where.cell*(n_span + kept.size()) : 4*kept.size();
    }

    size_t n_slice(const cell_tensor & ct) const {
        return std::max<size_t>(16, std::min(n_values(ct), MAX_SCRATCH/n_bytes(ct)) & ~(size_t) 15);
    }

    // Add values [v0, v0 + n) of a tensor to a graph; return false if no backend supports the operations. All pieces are
    // collected before the first one is written: a cell may be the source of one piece and the destination of another.
    bool add(move_graph & mg, const cell_tensor & ct, size_t v0, size_t n) const {
        std::vector<ggml_tensor *> found; // in scratch memory
        std::vector<ggml_tensor *> moved; // in the cache

        const size_t cell = ct.where.cell;
        const size_t offs = ct.offs + first*cell;

        if (ct.where.n_rows > 1) {
            const auto type = cell == 2 ? GGML_TYPE_F16 : GGML_TYPE_F32;

            const auto rows = [&](size_t begin, size_t n_cells) {
                return mg.add_view(ct.t, type, offs + begin*cell + v0*ct.where.stride, n_cells, n, ct.where.stride);
            };

            // ggml_get_rows needs one row per cell, so transpose, collect, and transpose back
            auto * cells = ggml_cont(mg.ctx, ggml_transpose(mg.ctx, rows(0, n_span)));
            auto * words = mg.add_view(cells, GGML_TYPE_F32, 0, n*cell/4, n_span, n*cell);

            found.push_back(cells);

            for (const auto & each : get_pieces(kept.size())) {
                found.push_back(ggml_get_rows(mg.ctx, words, mg.add_input(GGML_TYPE_I32, kept, each.begin, each.n)));

                auto * back = ggml_transpose(mg.ctx, mg.add_view(found.back(), type, 0, n, each.n, n*cell));

                moved.push_back(ggml_cpy(mg.ctx, back, rows(each.begin, each.n)));
            }
        } else {
            auto * words = mg.add_view(ct.t, GGML_TYPE_F32, offs + 4*v0, n, n_span, cell);

            // copy only the cells that move if the backend has ggml_set_rows
            for (const auto & each : get_pieces(src.size())) {
                auto * rows = ggml_get_rows(mg.ctx, words, mg.add_input(GGML_TYPE_I32, src, each.begin, each.n));
                auto * set  = scatter(mg.ctx, words, rows, mg.add_input(GGML_TYPE_I64, dst, each.begin, each.n), 0);

                if (!set || !backend_for(g, ct.t, { rows, set })) {
                    found.clear();
                    moved.clear();
                    break;
                }

                found.push_back(rows);
                moved.push_back(set);
            }

            if (moved.empty()) {
                for (const auto & each : get_pieces(kept.size())) {
                    found.push_back(ggml_get_rows(mg.ctx, words, mg.add_input(GGML_TYPE_I32, kept, each.begin, each.n)));

                    auto * to = mg.add_view(ct.t, GGML_TYPE_F32, offs + each.begin*cell + 4*v0, n, each.n, cell);

                    moved.push_back(ggml_cpy(mg.ctx, found.back(), to));
                }
            }
        }

        auto ops = found;

        ops.insert(ops.end(), moved.begin(), moved.end());

        auto * backend = backend_for(g, ct.t, ops);

        if (!backend) {
            return false;
        }

        for (auto * op : ops) {
            mg.place(op, backend);
            mg.add(op);
        }

        return true;
    }

    // The first overload exists only if the release declares ggml_set_rows; the second one returns nullptr.
    template <typename ctx_t>
    static auto scatter(ctx_t * ctx, ggml_tensor * to, ggml_tensor * rows, ggml_tensor * numbers, int) -> decltype(ggml_set_rows(ctx, to, rows, numbers)) {
        return ggml_set_rows(ctx, to, rows, numbers);
    }

    template <typename ctx_t>
    static ggml_tensor * scatter(ctx_t *, ggml_tensor *, ggml_tensor *, ggml_tensor *, long) {
        return nullptr;
    }

    const graphs & g;

    // all cell indexes are relative to this cell
    const uint32_t first;

    size_t n_span; // number of cells from `first` to the end of the last source

    std::vector<int32_t> kept; // source cell of each destination, including cells that do not move
    std::vector<int32_t> src;
    std::vector<int64_t> dst;
};

//
// selection of the movers and execution
//

// Return the number of bytes that gather moves in the time of one copy node.
inline size_t copy_worth(const cell_tensor & ct) {
    const auto * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(ct.t->buffer));

    // a remote (RPC) device usually computes on CPUs; other devices launch a kernel for each copy
    const size_t worth = std::strncmp(name, "RPC", 3) == 0 ? 16*1024 : 1024*1024;

    // gather transposes a transposed tensor twice
    return ct.where.n_rows > 1 ? worth/8 : worth;
}

// Group the tensors by buffer type. A graph over several buffer types may copy a view to another tensor's device.
inline std::vector<std::vector<cell_tensor>> by_memory(const std::vector<cell_tensor> & tensors) {
    std::vector<std::vector<cell_tensor>> res;

    for (const auto & ct : tensors) {
        const auto type = ggml_backend_buffer_get_type(ct.t->buffer);

        auto it = std::find_if(res.begin(), res.end(), [=](const std::vector<cell_tensor> & known) {
            return ggml_backend_buffer_get_type(known[0].t->buffer) == type;
        });

        if (it == res.end()) {
            it = res.insert(it, std::vector<cell_tensor>());
        }

        it->push_back(ct);
    }

    return res;
}

// Select the mover of a tensor. n_copies: the result of count_without_overlaps().
inline mover pick_mover(const cell_tensor & ct, mover wanted, const graphs * g, const plan & p, size_t n_copies) {
    if (wanted == MOVER_STAGED) {
        return wanted;
    }

    if (ggml_backend_buffer_is_host(ct.t->buffer) && (wanted == MOVER_AUTO || wanted == MOVER_HOST || !g)) {
        return MOVER_HOST;
    }

    if (!g) {
        return MOVER_STAGED;
    }

    const size_t n_bytes = p.n_used*ct.where.cell*ct.where.n_rows;

    // n_copies counts a move that overlaps itself as several copies
    const bool few = n_bytes/n_copies > copy_worth(ct);

    const bool copies = copies_fit(*g, ct, p);

    if (copies && (wanted == MOVER_GRAPH || (few && wanted != MOVER_GATHER))) {
        return MOVER_GRAPH;
    }

    if (gather(*g, p.moves.data(), p.moves.size()).fits(ct)) {
        return MOVER_GATHER;
    }

    return copies ? MOVER_GRAPH : MOVER_STAGED;
}

// Implement carry_out(). Throws std::bad_alloc only between batches, after the finished moves were reported.
template <typename moved_t>
inline result carry_out_batches(
        const plan & p,
        const options & wanted,
        const std::vector<cell_tensor> & tensors,
        const graphs * g,
        uint32_t n_threads,
        stats & sum,
        moved_t & moved) {
    std::vector<cell_tensor> by[MOVER_STAGED + 1];

    const size_t n_copies = count_without_overlaps(p.moves);

    for (const auto & ct : tensors) {
        by[pick_mover(ct, wanted.mover, g, p, n_copies)].push_back(ct);
    }

    const auto copied   = by_memory(by[MOVER_GRAPH]);
    const auto gathered = by_memory(by[MOVER_GATHER]);

    const auto moves = copied.empty() ? p.moves : without_overlaps(p.moves);

    size_t n_batch = moves.size();

    for (const auto & device : copied) {
        n_batch = std::min(n_batch, moves_per_graph(g->max_nodes, device.size()));
    }

    // allocate all host memory here: an allocation must not fail after the first byte has moved
    bool transposed = false;

    std::vector<layout> host;

    for (const auto & ct : by[MOVER_HOST]) {
        host.push_back(ct.where);

        transposed = transposed || ct.where.n_rows > 1;
    }

    size_t n_buf = 0;

    for (const auto & ct : by[MOVER_STAGED]) {
        n_buf = std::max(n_buf, ct.size);

        transposed = transposed || ct.where.n_rows > 1;
    }

    std::vector<uint8_t> buf(n_buf);

    host_mover in_place(host, wanted.n_threads ? wanted.n_threads : n_threads);

    std::vector<host_mover> in_buf;

    for (const auto & ct : by[MOVER_STAGED]) {
        auto where = ct.where;

        where.data = buf.data();

        in_buf.emplace_back(std::vector<layout>(1, where), 1);
    }

    host_moves ready(moves.data(), moves.size(), n_batch, transposed);

    if (g) {
        // the last ubatch may still be writing to the cache
        ggml_backend_sched_synchronize(g->sched);
    }

    const int64_t n_graphs = sum.n_graphs;

    size_t n_scratch = 0;

    // noexcept: a batch must be reported exactly once
    const auto report = [&](const move * batch, size_t n) noexcept { moved(batch, n); };

    for (size_t i = 0; i < moves.size(); i += n_batch) {
        const auto * batch = moves.data() + i;
        const size_t n     = std::min(n_batch, moves.size() - i);

        std::unique_ptr<gather> numbers;

        if (!gathered.empty()) {
            numbers.reset(new gather(*g, batch, n));

            n_scratch = std::max(n_scratch, numbers->n_scratch(by[MOVER_GATHER]));
        }

        const auto build = [&](graph_list & res) {
            res.clear();

            for (const auto & device : copied) {
                add_copies(res, *g, device, batch, n);
            }

            for (const auto & device : gathered) {
                numbers->add_graphs(res, device);
            }
        };

        graph_list todo;

        build(todo);

        // overlapping moves cannot be resumed or undone: reserve all graphs before the first one writes
        if (wanted.order == ORDER_KEPT && todo.size() > 1) {
            for (const auto & each : todo) {
                if (!each->reserve()) {
                    return RESULT_FAILED;
                }
            }

            build(todo);
        }

        bool started = false;

        for (const auto & each : todo) {
            sum.n_graphs++;

            if (!each->compute(started)) {
                GGML_ASSERT(!(started && wanted.order == ORDER_KEPT) && "a graph failed in the middle of an ordered plan");

                return RESULT_FAILED;
            }
        }

        ready.start(batch, n);

        in_place.run(ready);

        for (size_t k = 0; k < in_buf.size(); ++k) {
            const auto & ct = by[MOVER_STAGED][k];

            ggml_backend_tensor_get(ct.t, buf.data(), ct.offs, ct.size);

            in_buf[k].run(ready);

            ggml_backend_tensor_set(ct.t, buf.data(), ct.offs, ct.size);
        }

        report(batch, n);
    }

    sum.n_defrags++;
    sum.n_moves += moves.size();
    sum.n_cells += p.n_cells;

    for (const auto & ct : tensors) {
        sum.n_bytes += p.n_cells*ct.where.cell*ct.where.n_rows;
    }

    sum.n_scratch = std::max<int64_t>(sum.n_scratch, n_scratch + buf.size() + ready.n_scratch());

    return sum.n_graphs > n_graphs ? RESULT_GRAPHS : RESULT_HOST;
}

// Execute a plan on the tensors of a cache, or of one stream of it.
// Without graphs, or if no backend supports them, tensors outside host memory are moved through a host buffer.
// A plan without moves returns RESULT_HOST immediately.
// Calls moved(moves, n) once per batch, in order, after the data of these moves has moved; moved() must not throw or
// allocate memory. All other memory is allocated before the first byte of a batch is written; if an allocation fails,
// the result is RESULT_FAILED. Without MOVER_GRAPH there is one batch.
template <typename moved_t>
inline result carry_out(
        const plan & p,
        const options & wanted,
        const std::vector<cell_tensor> & tensors,
        const graphs * g,
        uint32_t n_threads,
        stats & sum,
        moved_t moved) {
    if (p.moves.empty()) {
        return RESULT_HOST;
    }

    try {
        return carry_out_batches(p, wanted, tensors, g, n_threads, sum, moved);
    } catch (const std::bad_alloc &) {
        return RESULT_FAILED;
    }
}

} // namespace llama_kv_defrag

#endif // LLAMA_KV_DEFRAG_GGML_H
