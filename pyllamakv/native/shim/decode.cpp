// Decoding: checks batches, and undoes the changes of a failed decode if the release does not.
#include "groups.h"

namespace {

// Return the number of values of an embedding that the model reads; with deepstack, more than n_embd.
template <typename Model>
auto input_width(const Model *model, int32_t, int) -> decltype(llama_model_n_embd_inp(model)) {
    return llama_model_n_embd_inp(model);
}
template <typename Model> int32_t input_width(const Model *, int32_t n_embd, long) {
    return n_embd;
}

int check_embeddings(const plk_context &c, const plk_batch &batch) {
    if (c.guard) {
        return plk::refuse(PLK_EUNSUPPORTED, "a guarded context decodes no embeddings");
    }
    const llama_model *model = c.model->model;
    const int32_t width = input_width(model, c.model->info.n_embd, 0);
    const int32_t rows = plk::load::many_positions(model) ? 4 : 1;
    if (batch.n_embd != width || batch.n_pos != rows) {
        return plk::refuse(PLK_EINVAL,
                           "embeddings of %d values with %d positions, expected %d and %d",
                           batch.n_embd, batch.n_pos, width, rows);
    }
    return PLK_OK;
}

int check(const plk_context &c, const plk_batch &batch) {
    if (batch.n_tokens < 1 || static_cast<uint32_t>(batch.n_tokens) > c.n_batch) {
        return plk::refuse(PLK_EINVAL, "the batch has %d tokens, expected 1 to n_batch = %u",
                           batch.n_tokens, c.n_batch);
    }
    if ((batch.token == nullptr && batch.embd == nullptr) || batch.pos == nullptr ||
        batch.seq_id == nullptr) {
        return plk::refuse(PLK_EINVAL, "the batch lacks tokens, positions or sequences");
    }
    const bool embeds = batch.embd != nullptr;
    if (embeds && batch.token != nullptr) {
        return plk::refuse(PLK_EINVAL, "the batch has both tokens and embeddings");
    }
    if (const int wrong = embeds ? check_embeddings(c, batch) : PLK_OK) {
        return wrong;
    }
    if (!c.causal && static_cast<uint32_t>(batch.n_tokens) > c.n_ubatch) {
        return plk::refuse(PLK_EINVAL,
                           "attention is not causal: %d tokens need an n_ubatch of as many, not %u",
                           batch.n_tokens, c.n_ubatch);
    }
    const int32_t n_vocab = c.model->info.n_vocab;
    const int32_t *seq = batch.seq_id;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (!embeds && (batch.token[i] < 0 || batch.token[i] >= n_vocab)) {
            return plk::refuse(PLK_EINVAL, "invalid token: place %d holds %d, outside [0, %d)", i,
                               batch.token[i], n_vocab);
        }
        for (int32_t row = 0; row < (embeds ? batch.n_pos : 1); ++row) {
            const int32_t pos = batch.pos[static_cast<size_t>(row) * batch.n_tokens + i];
            if (pos < 0 || pos >= c.positions) {
                return plk::refuse(PLK_EINVAL, "place %d has the position %d, expected 0 to %d", i,
                                   pos, c.positions - 1);
            }
        }
        const int32_t count = batch.seq_count != nullptr ? batch.seq_count[i] : 1;
        if (count < 1 || static_cast<uint32_t>(count) > c.n_seq_max) {
            return plk::refuse(PLK_EINVAL, "place %d names %d sequences, expected 1 to %u", i,
                               count, c.n_seq_max);
        }
        const int32_t *first = seq;
        for (int32_t j = 0; j < count; ++j, ++seq) {
            if (*seq < 0 || static_cast<uint32_t>(*seq) >= c.n_seq_max) {
                return plk::refuse(PLK_EINVAL, "place %d names sequence %d, outside [0, %u)", i,
                                   *seq, c.n_seq_max);
            }
            if (std::find(first, seq, *seq) != seq) {
                return plk::refuse(PLK_EINVAL, "place %d names sequence %d twice", i, *seq);
            }
        }
        if (count > 1 && c.separate) {
            return plk::refuse(PLK_EINVAL,
                               "place %d names %d sequences, but each sequence has a stream of its own "
                               "cells, and a token cannot belong to several streams: decode it once "
                               "per sequence, or set kv_unified",
                               i, count);
        }
    }
    return PLK_OK;
}

bool mixes(const llama_batch &batch) {
    return std::any_of(batch.seq_id, batch.seq_id + batch.n_tokens,
                       [&](const llama_seq_id *seq) { return *seq != **batch.seq_id; });
}

// Check a batch whose embeddings are pooled. Releases through b5640 assert that the id of a sequence is
// below the number of tokens. All pool the tokens of each micro-batch alone.
int check_pooled(const plk_context &c, const llama_batch &batch) {
    if (static_cast<uint32_t>(batch.n_tokens) > c.n_ubatch) {
        return plk::refuse(PLK_EINVAL, "%d tokens to pool need an n_ubatch of as many, not %u",
                           batch.n_tokens, c.n_ubatch);
    }
    if (c.model->info.is_recurrent && !plk::memory::begins_beside && mixes(batch)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release cannot pool several sequences of a recurrent model in one "
                           "batch: decode a batch for each");
    }
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (batch.n_seq_id[i] != 1 || *batch.seq_id[i] >= batch.n_tokens) {
            return plk::refuse(PLK_EINVAL,
                               "place %d: a token to pool is in one sequence, whose id %d must be "
                               "below the number of tokens, %d",
                               i, *batch.seq_id[i], batch.n_tokens);
        }
    }
    return PLK_OK;
}

bool starts(const llama_batch &batch) {
    return std::find(batch.pos, batch.pos + batch.n_tokens, 0) != batch.pos + batch.n_tokens;
}

// Return whether every micro-batch has consecutive sequences in ascending order. llama.cpp takes the
// same number of tokens of each sequence into a micro-batch, until the shortest one ends.
bool in_order(const llama_batch &batch) {
    std::vector<std::pair<llama_seq_id, int32_t>> counts; // of tokens, by first appearance
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        const llama_seq_id seq = *batch.seq_id[i];
        auto found = std::find_if(counts.begin(), counts.end(),
                                  [&](const auto &each) { return each.first == seq; });
        if (found == counts.end()) {
            if (!counts.empty() && seq != counts.back().first + 1) {
                return false;
            }
            found = counts.insert(counts.end(), {seq, 0});
        }
        found->second += 1;
    }
    return counts.size() <= 2 ||
           std::all_of(counts.begin(), counts.end(),
                       [&](const auto &each) { return each.second == counts[0].second; });
}

struct Armed {
    plk_context &c;
    explicit Armed(plk_context &context) : c(context) {
        c.polls.store(0);
        if (!c.going) {
            c.cancel.store(false);
            plk::expect_interrupts(c);
        }
        const bool clean = plk::memory::ends_batches || !c.model->info.is_recurrent;
        c.armed.store(!c.guard || (plk::rollback::abortable && clean));
    }
    ~Armed() { c.armed.store(false); }
};

int decode(plk_context &c, const llama_batch &batch) {
    c.outputs.clear();
    c.places.clear();
    if (c.pooling > PLK_POOLING_NONE) {
        if (const int wrong = check_pooled(c, batch)) {
            return wrong;
        }
    }
    if ((c.guard || !plk::memory::restarts_states) && c.used_states && starts(batch)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release begins a recurrent state with what a removed sequence "
                           "left, or dies of it: clear the context before another begins");
    }
    if (c.guard && !plk::memory::begins_beside && c.model->info.is_recurrent && starts(batch) &&
        mixes(batch) && c.had_states) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release mixes up the states of a recurrent model when one begins "
                           "in a batch with others: begin each sequence in a batch of its own, or "
                           "clear the context before they begin together");
    }
    if (c.guard && mixes(batch) && plk::cells::needs_order(c.ctx) && !in_order(batch)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release cannot decode such a batch in a hybrid memory with a stream "
                           "per sequence: name one sequence, two consecutive ones, or consecutive "
                           "ones with equally many tokens, in ascending order; or share the cells");
    }
    c.had_states = c.model->info.is_recurrent;
    const bool waits = plk::cells::pending(c.ctx) != 0 || plk::defrag::threshold(c) > 0.0f;
    if (c.guard && plk::update::present && waits) {
        // Update before llama_decode: an abort during its update would lose a shift or a move, and
        // one release asserts afterwards.
        plk::update::run(c.ctx, true);
    }
    const std::unique_ptr<plk::rollback::Saved> saved =
        c.guard ? plk::rollback::save(c) : nullptr;
    int code = PLK_EEXCEPTION;
    {
        const Armed armed(c);
        plk::forget_logged();
        code = plk::guarded([&] { return llama_decode(c.ctx, batch); });
    }
    if (code == -3 && strstr(plk::logged(), "failed to prepare ubatch") != nullptr) {
        code = PLK_NO_SLOT; // b4980 returns -3 for a failed computation and for a missing slot
    }
    if (code == 0) {
        c.places.resize(batch.n_tokens);
        c.owners.resize(batch.n_tokens);
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            c.places[i] = batch.logits[i] != 0;
            c.owners[i] = batch.seq_id[i][0];
            if (batch.logits[i] != 0) {
                c.outputs.push_back(i);
            }
        }
    } else if (c.guard && c.assertion.empty()) {
        plk::rollback::undo(c, batch, code, saved.get());
    }
    if (plk::cells::watch != nullptr && code >= 0) {
        plk::cells::watch->applied(c.ctx); // llama_decode first applies pending changes
    }
    if (code == PLK_NO_SLOT && strstr(plk::logged(), "coupled sequences") != nullptr) {
        // Some releases report a batch that they cannot split as one without a slot.
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release cannot decode a token of several sequences in this memory: "
                           "decode it once per sequence");
    }
    return code;
}

// Return the place of `index` in the batch, or -1; negative values count from the last output.
int32_t place(const plk_context &c, int32_t index) {
    if (index < 0) {
        const auto count = static_cast<int32_t>(c.outputs.size());
        return count + index >= 0 ? c.outputs[count + index] : -1;
    }
    return static_cast<size_t>(index) < c.places.size() && c.places[index] ? index : -1;
}

} // namespace

extern "C" {

int plk_decode(plk_context *context, const plk_batch *batch) {
    return plk::guarded([&]() -> int {
        plk_batch mine{};
        int code = plk::need(context);
        if (code == PLK_OK) {
            code = plk::take(batch, mine, "plk_batch");
        }
        if (code == PLK_OK) {
            code = check(*context, mine);
        }
        if (code != PLK_OK) {
            return code;
        }
        plk_context &c = *context;
        const int32_t n = mine.n_tokens;
        c.counts.resize(n);
        c.rows.resize(n + 1);
        c.flags.resize(n);
        auto *seq = const_cast<int32_t *>(mine.seq_id);
        for (int32_t i = 0; i < n; ++i) {
            c.counts[i] = mine.seq_count != nullptr ? mine.seq_count[i] : 1;
            c.rows[i] = seq;
            seq += c.counts[i];
            c.flags[i] = mine.logits != nullptr ? mine.logits[i] != 0 : i == n - 1;
            c.flags[i] = c.flags[i] || c.asked.embeddings; // later releases require all outputs
        }
        c.rows[n] = nullptr;
        llama_batch theirs{};
        theirs.n_tokens = n;
        theirs.token = const_cast<int32_t *>(mine.token);
        theirs.embd = const_cast<float *>(mine.embd);
        theirs.pos = const_cast<int32_t *>(mine.pos);
        theirs.n_seq_id = c.counts.data();
        theirs.seq_id = c.rows.data();
        theirs.logits = c.flags.data();
        return decode(c, theirs);
    });
}

const float *plk_logits(plk_context *context, int32_t index) {
    const float *row = nullptr;
    plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        const int32_t at = place(*context, index);
        if (at < 0) {
            return plk::refuse(PLK_EINVAL, "the last decode kept no logits at place %d", index);
        }
        row = llama_get_logits_ith(context->ctx, at);
        return row ? PLK_OK : plk::refuse(PLK_EINVAL, "this context computes no logits");
    });
    return row;
}

const float *plk_logits_all(plk_context *context, int32_t *rows) {
    const float *first = nullptr;
    plk::guarded([&]() -> int {
        if (plk::need(context) != PLK_OK || rows == nullptr) {
            return plk::refuse(PLK_EINVAL, "the context or rows is NULL");
        }
        *rows = 0;
        const std::vector<int32_t> &outputs = context->outputs;
        const auto width = static_cast<size_t>(context->model->info.n_vocab);
        bool together = true;
        // Compare pointers: the order of rows depends on the release if sequences are split over
        // micro-batches.
        for (size_t i = 0; i < outputs.size(); ++i) {
            const float *row = llama_get_logits_ith(context->ctx, outputs[i]);
            if (row == nullptr) {
                first = nullptr;
                return plk::refuse(PLK_EINVAL, "this context computes no logits");
            }
            first = i == 0 ? row : first;
            together = together && row == first + i * width;
        }
        *rows = static_cast<int32_t>(outputs.size());
        first = together ? first : nullptr;
        return outputs.empty() ? plk::refuse(PLK_EINVAL, "the last decode kept no logits") : PLK_OK;
    });
    return first;
}

const float *plk_embeddings(plk_context *context, int32_t index) {
    const float *row = nullptr;
    plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        if (!context->asked.embeddings) {
            return plk::refuse(PLK_EINVAL, "the context was made without embeddings");
        }
        const std::vector<int32_t> &owners = context->owners;
        if (context->pooling > PLK_POOLING_NONE) {
            if (context->outputs.empty() ||
                std::find(owners.begin(), owners.end(), index) == owners.end()) {
                return plk::refuse(PLK_EINVAL, "the last decode had no token of sequence %d", index);
            }
            row = llama_get_embeddings_seq(context->ctx, index);
        } else {
            const int32_t at = place(*context, index);
            if (at < 0) {
                return plk::refuse(PLK_EINVAL, "the last decode kept no embedding at place %d", index);
            }
            row = llama_get_embeddings_ith(context->ctx, at);
        }
        return row ? PLK_OK : plk::refuse(PLK_EINVAL, "llama.cpp has no embedding there");
    });
    return row;
}

} // extern "C"
