// Stubs of llama_kv_cache, as far as compaction uses it, and of llama_kv_cells: a position and a set of sequences per cell.
#pragma once

#include "ggml.h"
#include "llama-kv-defrag-ggml.h"

#include <set>
#include <vector>

#define GGML_PAD(x, n) (((x) + (n) - 1)/(n)*(n))

struct llama_memory_i {
    virtual ~llama_memory_i() = default;
};

struct llama_kv_cells {
    struct cell {
        int           pos = -1;
        std::set<int> seqs;
    };

    std::vector<cell> all;

    // fails for an index out of range
    const cell & at(uint32_t i) const {
        GGML_ASSERT(i < all.size());
        return all[i];
    }

    uint32_t size() const { return (uint32_t) all.size(); }

    bool is_empty(uint32_t i) const { return at(i).pos < 0; }

    int pos_get(uint32_t i) const {
        GGML_ASSERT(!is_empty(i));
        return at(i).pos;
    }

    int  seq_count(uint32_t i) const { return (int) at(i).seqs.size(); }
    bool seq_has(uint32_t i, int s) const {
        GGML_ASSERT(s >= 0 && s < 8);
        return at(i).seqs.count(s) > 0;
    }

    uint32_t get_used() const {
        uint32_t res = 0;
        for (const auto & each : all) {
            res += each.pos >= 0;
        }
        return res;
    }

    uint32_t used_max_p1() const {
        uint32_t res = size();
        while (res > 0 && is_empty(res - 1)) {
            --res;
        }
        return res;
    }

    llama_kv_cells cp(const std::vector<uint32_t> & cells) const {
        llama_kv_cells res;
        for (const uint32_t i : cells) {
            res.all.push_back(at(i));
        }
        return res;
    }

    void rm(uint32_t i) {
        GGML_ASSERT(!is_empty(i));
        all[i] = {};
    }

    void set(const std::vector<uint32_t> & cells, const llama_kv_cells & other) {
        GGML_ASSERT(cells.size() == other.all.size());
        for (size_t i = 0; i < cells.size(); ++i) {
            GGML_ASSERT(is_empty(cells[i]));
            all[cells[i]] = other.all[i];
        }
    }
};

struct llama_kv_cache : llama_memory_i {
    std::vector<llama_kv_cells> cells;   // per stream
    std::vector<ggml_tensor *>  tensors; // of all streams

    bool is_shared  = false;
    bool do_compact = false;

    llama_kv_defrag::stats   defrag_stats;
    llama_kv_defrag::options defrag_options;

    bool get_has_shared_cells() const { return is_shared; }

    std::vector<llama_kv_cells> & get_compact_cells() { return cells; }

    void get_compact_tensors(uint32_t strm, std::vector<llama_kv_defrag::cell_tensor> & res) const {
        for (auto * t : tensors) {
            llama_kv_defrag::add_cells(res, t, false, cells[strm].size(), strm, cells.size());
        }
    }
};
