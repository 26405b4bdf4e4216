// Operations on sequences. Each checks first what upstream would assert.
#include "groups.h"

#include <iterator>
#include <set>

namespace {

int check(const plk_context *c, int32_t seq, bool all = false) {
    if (const int wrong = plk::need(c)) {
        return wrong;
    }
    if (!plk::memory::exists(c->ctx)) {
        return plk::refuse(PLK_EUNSUPPORTED, "this model keeps no memory of its tokens");
    }
    if ((seq < 0 && !all) || (seq >= 0 && static_cast<uint32_t>(seq) >= c->n_seq_max)) {
        return plk::refuse(PLK_EINVAL, "sequence %d is outside [0, %u)", seq, c->n_seq_max);
    }
    return PLK_OK;
}

// Return 1 if the range is empty, 0 if it may contain positions, or a negative code.
int check_range(int32_t p0, int32_t p1) {
    if (p1 >= 0 && p0 > p1) {
        return plk::refuse(PLK_EINVAL, "the range [%d, %d) runs backwards", p0, p1);
    }
    return p1 >= 0 && std::max(p0, 0) == p1 ? 1 : 0;
}

bool has(const uint64_t *seqs, int32_t seq) { return seqs[seq / 64] >> (seq % 64) & 1; }

// Return whether a sequence has a recurrent state: the state of a sequence begins with their number.
// The buffer has no room for more: llama.cpp stops there and logs an error.
bool holds_state(const plk_context &c, int32_t seq) {
    uint32_t count = 0;
    const plk::Muted muted;
    llama_state_seq_get_data(c.ctx, reinterpret_cast<uint8_t *>(&count), sizeof(count), seq);
    return count > 0;
}

// Return the largest or smallest position of a sequence, -1 if it has none, or a negative code. Some
// releases do not report these positions, and report 0 for an empty sequence as for position 0.
int32_t seen(plk_context &c, int32_t seq, bool largest) {
    if (c.model->info.is_recurrent) {
        return holds_state(c, seq) ? std::max(plk::memory::pos_max(c.ctx, seq), 0) : -1;
    }
    std::vector<int32_t> found;
    if (!plk::take_positions(c, seq, found)) {
        return plk::refuse(PLK_EUNSUPPORTED, "this build cannot tell the positions of a sequence");
    }
    return found.empty() ? -1 : largest ? found.back() : found.front();
}

// Return whether the memory keeps one state per sequence, with or without cells in addition. A
// memory of an unknown class may: its operations on parts of a sequence may assert.
bool keeps_states(const plk_context &c) {
    plk_context_info info{};
    plk::cells::describe(c.ctx, info);
    const bool unknown = (plk::cells::bits & PLK_CAP_CELLS) && info.n_caches == 0 &&
                         info.memory == PLK_MEMORY_OTHER;
    return c.model->info.is_recurrent || info.memory == PLK_MEMORY_RECURRENT ||
           info.memory == PLK_MEMORY_HYBRID || unknown;
}

// Note that removing a sequence, or all if it is negative, may leave a recurrent state in the memory.
void note_removal(plk_context &c, int32_t seq) {
    c.used_states |= c.model->info.is_recurrent && !plk::memory::clears_states &&
                     (seq < 0 || plk_seq_pos_max(&c, seq) >= 0);
}

// Return whether a call on positions p0 to p1 would remove a part of the state of a sequence.
bool divides(plk_context &c, int32_t seq, int32_t p0, int32_t p1) {
    const int32_t last = plk_seq_pos_max(&c, seq);
    return p0 <= last && (p0 > 0 || (p1 >= 0 && p1 <= last));
}

int remove(plk_context &c, int32_t seq, int32_t p0, int32_t p1) {
    note_removal(c, seq);
    if (!plk::memory::seq_rm(c.ctx, seq, p0, p1)) {
        return plk::refuse(PLK_EREFUSED, "the memory refuses to remove a part of sequence %d", seq);
    }
    return PLK_OK;
}

// Remove positions from sequences first to last of a memory that keeps one state per sequence.
int remove_states(plk_context &c, int32_t first, int32_t last, int32_t p0, int32_t p1) {
    for (int32_t seq = first; c.guard && seq <= last; ++seq) {
        // Releases differ in which partial removals they refuse; one removes the whole state when
        // only its last token is to be removed.
        if (divides(c, seq, p0, p1)) {
            return plk::refuse(PLK_EREFUSED,
                               "the memory keeps one state per sequence: it cannot remove a part of "
                               "sequence %d",
                               seq);
        }
    }
    // One by one: later releases do not remove the states of all sequences at once completely, and
    // assert in the next decode.
    for (int32_t seq = first; seq <= last; ++seq) {
        if (const int wrong = remove(c, seq, p0, p1)) {
            return wrong;
        }
    }
    if (c.guard && c.used_states) {
        // Without any state, clearing the memory is enough to begin others.
        for (uint32_t seq = 0; seq < c.n_seq_max; ++seq) {
            if (plk_seq_pos_max(&c, static_cast<int32_t>(seq)) >= 0) {
                return PLK_OK;
            }
        }
        plk::memory::clear(c.ctx, true);
        c.used_states = c.had_states = false;
    }
    return PLK_OK;
}

// Copy a range, except positions whose cells both sequences share already: several releases count
// such a cell twice, and still report its position as the last one after the cell was removed.
int copy(plk_context &c, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    std::set<int32_t> shared, alone, other;
    plk::Picture picture;
    // A copy between streams replaces the whole sequence.
    if (c.guard && from != to && plk::cells::can_copy(c.ctx, from, to, 1, 2) &&
        plk::take_picture(c, picture)) {
        for (size_t i = 0; i < picture.pos.size(); ++i) {
            const uint64_t *seqs = picture.seqs.data() + i * picture.words;
            const int32_t pos = picture.pos[i];
            if (pos < std::max(p0, 0) || (p1 >= 0 && pos >= p1)) {
                continue;
            }
            if (has(seqs, from)) {
                (has(seqs, to) ? shared : alone).insert(pos);
            } else if (has(seqs, to)) {
                other.insert(pos);
            }
        }
    }
    // A second cell at such a position, or one of the other cache, is not shared yet. A range cannot
    // exclude the first one.
    std::set<int32_t> partly;
    std::set_intersection(shared.begin(), shared.end(), alone.begin(), alone.end(),
                          std::inserter(partly, partly.end()));
    for (const int32_t pos : partly) {
        if (other.count(pos) > 0) {
            return plk::refuse(PLK_EREFUSED,
                               "sequences %d and %d share some cells at position %d, and sequence %d "
                               "has others there: remove that position from sequence %d first",
                               from, to, pos, to, to);
        }
    }
    int32_t next = p0;
    for (const int32_t pos : shared) {
        if (partly.count(pos) > 0) {
            plk::memory::seq_rm(c.ctx, to, pos, pos + 1); // the copy shares all its cells
            continue;
        }
        if (std::max(next, 0) < pos) {
            plk::memory::seq_cp(c.ctx, from, to, next, pos);
        }
        next = pos + 1;
    }
    if (p1 < 0 || next < p1) {
        plk::memory::seq_cp(c.ctx, from, to, next, p1);
    }
    return PLK_OK;
}

int check_shift(const plk_context *c) {
    return plk::can_shift(*c) ? PLK_OK
                              : plk::refuse(PLK_EREFUSED, "the memory of this context cannot shift "
                                                          "positions");
}

// Return whether a shift moves the last position of a range out of the valid positions.
bool leaves(plk_context &c, int32_t seq, int32_t p1, int32_t delta) {
    if (delta <= 0) {
        return delta <= -plk::far_away;
    }
    const int32_t last = plk_seq_pos_max(&c, seq);
    return delta >= plk::far_away - std::max(p1 < 0 ? last : std::min(last, p1 - 1), 0);
}

// Divide positions with one shift each, in ascending order: no position moves onto one that is not
// divided yet.
int divide(plk_context &c, int32_t seq, int32_t p0, int32_t p1, int32_t divisor) {
    std::vector<int32_t> held;
    if (!plk::take_positions(c, seq, held)) {
        return plk::refuse(PLK_EUNSUPPORTED, "this build cannot tell the positions of a sequence");
    }
    const int32_t last = plk::memory::pos_max(c.ctx, seq);
    if (held.empty() || held.back() < last) {
        held.push_back(last); // the position of a state, which has no cells
    }
    for (const int32_t pos : held) {
        if (pos > 0 && pos >= p0 && (p1 < 0 || pos < p1)) {
            plk::memory::seq_add(c.ctx, seq, pos, pos + 1, pos / divisor - pos);
        }
    }
    return PLK_OK;
}

void repair(const plk_context &c) {
    if (c.guard) {
        plk::cells::repair(c.ctx);
    }
}

} // namespace

bool plk::can_shift(const plk_context &c) {
    const auto type_k = static_cast<ggml_type>(c.asked.type_k);
    if (c.model->info.is_recurrent) {
        return true; // a state has no keys that a shift would rotate
    }
    if (c.pooling == PLK_POOLING_MEAN && !plk::update::reserves_means) {
        return false;
    }
    return plk::memory::exists(c.ctx) && plk::memory::can_shift(c.ctx) &&
           plk::cells::limits(c.ctx).shifts && !plk::load::many_positions(c.model->model) && type_k != GGML_TYPE_BF16 &&
           (!ggml_is_quantized(type_k) ||
            (plk::memory::shifts_quantized && plk::cells::shifts_quantized(c.ctx)));
}

extern "C" {

int plk_clear(plk_context *context, int32_t data) {
    return plk::guarded([&]() -> int {
        const int code = check(context, 0);
        if (code == PLK_OK) {
            if (context->guard && plk::update::present && plk::cells::pending(context->ctx) != 0) {
                plk::update::run(context->ctx, true); // some releases keep shifts of removed cells
            }
            plk::memory::clear(context->ctx, data != 0);
            context->used_states = context->had_states = false;
        }
        return code;
    });
}

int plk_seq_rm(plk_context *context, int32_t seq, int32_t p0, int32_t p1) {
    return plk::guarded([&]() -> int {
        int code = check(context, seq, true);
        if (code == PLK_OK) {
            code = check_range(p0, p1);
        }
        if (code != PLK_OK) {
            return code > 0 ? PLK_OK : code;
        }
        p0 = std::max(p0, -1);
        p1 = std::max(p1, -1);
        if (keeps_states(*context)) {
            const auto last = static_cast<int32_t>(context->n_seq_max) - 1;
            return remove_states(*context, std::max(seq, 0), seq < 0 ? last : seq, p0, p1);
        }
        return remove(*context, std::max(seq, -1), p0, p1);
    });
}

int plk_seq_cp(plk_context *context, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    return plk::guarded([&]() -> int {
        int code = check(context, from);
        if (code == PLK_OK) {
            code = check(context, to);
        }
        if (code == PLK_OK) {
            code = check_range(p0, p1);
        }
        if (code != PLK_OK) {
            return code > 0 ? PLK_OK : code;
        }
        if (keeps_states(*context)) {
            if (p0 > 0 || (p1 >= 0 && p1 <= plk_seq_pos_max(context, from))) {
                return plk::refuse(PLK_EREFUSED,
                                   "the memory keeps one state per sequence: only the whole of "
                                   "sequence %d can be copied",
                                   from);
            }
            p0 = p1 = -1;
            if (context->guard && from != to && !context->model->info.is_recurrent) {
                // The copy replaces the state of `to`: cells of its tokens must not remain. One
                // memory asserts that no part is copied, as copy() does with shared cells.
                plk::memory::seq_rm(context->ctx, to, -1, -1);
            }
        }
        if (!plk::cells::can_copy(context->ctx, from, to, p0, p1) &&
            p0 <= plk_seq_pos_min(context, from) &&
            (p1 < 0 || p1 > plk_seq_pos_max(context, from))) {
            p0 = p1 = -1; // the only range that upstream accepts between streams
        }
        if (!plk::cells::can_copy(context->ctx, from, to, p0, p1)) {
            return plk::refuse(PLK_EREFUSED,
                               "sequences %d and %d lie in separate streams, between which only a "
                               "whole sequence can be copied: use kv_unified",
                               from, to);
        }
        code = copy(*context, from, to, std::max(p0, -1), std::max(p1, -1));
        if (code == PLK_OK && context->guard && plk::update::present && plk::cells::limits(context->ctx).compressed) {
            // Compressed rows are copied by the next update, and a removal clears them at once.
            plk::update::run(context->ctx, true);
        }
        return code;
    });
}

int plk_seq_keep(plk_context *context, int32_t seq) {
    return plk::guarded([&]() -> int {
        const int code = check(context, seq);
        if (code != PLK_OK) {
            return code;
        }
        for (uint32_t other = 0; other < context->n_seq_max; ++other) {
            if (static_cast<int32_t>(other) != seq) {
                note_removal(*context, static_cast<int32_t>(other));
            }
        }
        plk::memory::seq_keep(context->ctx, seq);
        // Upstream removes the others only from the stream of this sequence.
        for (uint32_t other = 0; context->guard && other < context->n_seq_max; ++other) {
            if (static_cast<int32_t>(other) != seq) {
                plk::memory::seq_rm(context->ctx, static_cast<int32_t>(other), -1, -1);
            }
        }
        return code;
    });
}

int plk_seq_add(plk_context *context, int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
    return plk::guarded([&]() -> int {
        int code = check(context, seq);
        if (code == PLK_OK) {
            code = check_range(p0, p1);
        }
        if (code == PLK_OK && leaves(*context, seq, p1, delta)) {
            code = plk::refuse(PLK_EINVAL,
                               "a shift by %d leaves the range of positions, 0 to 2^30 - 1", delta);
        }
        if (code == PLK_OK) {
            code = check_shift(context);
        }
        if (code != PLK_OK || delta == 0) {
            return code > 0 ? PLK_OK : code;
        }
        if (plk::cells::watch != nullptr) {
            plk::cells::watch->shifting(context->ctx, seq, p0, p1);
        }
        plk::memory::seq_add(context->ctx, seq, std::max(p0, -1), std::max(p1, -1), delta);
        repair(*context);
        return PLK_OK;
    });
}

int plk_seq_div(plk_context *context, int32_t seq, int32_t p0, int32_t p1, int32_t divisor) {
    return plk::guarded([&]() -> int {
        int code = check(context, seq);
        if (code == PLK_OK && divisor < 1) {
            code = plk::refuse(PLK_EINVAL, "the divisor is %d, expected 1 or more", divisor);
        }
        if (code == PLK_OK) {
            code = check_range(p0, p1);
        }
        if (code == PLK_OK) {
            code = check_shift(context);
        }
        if (code != PLK_OK || divisor == 1) {
            return code > 0 ? PLK_OK : code;
        }
        if (plk::cells::watch != nullptr) {
            plk::cells::watch->shifting(context->ctx, seq, p0, p1);
        }
        p0 = std::max(p0, -1);
        p1 = std::max(p1, -1);
        code = plk::memory::seq_div(context->ctx, seq, p0, p1, divisor)
            ? PLK_OK
            : divide(*context, seq, p0, p1, divisor);
        repair(*context);
        return code;
    });
}

int32_t plk_seq_pos_min(plk_context *context, int32_t seq) {
    return plk::guarded([&]() -> int {
        const int code = check(context, seq);
        if (code != PLK_OK) {
            return code;
        }
        const int32_t pos = plk::memory::pos_min(context->ctx, seq);
        return pos >= -1 ? pos : seen(*context, seq, false);
    });
}

int32_t plk_seq_pos_max(plk_context *context, int32_t seq) {
    return plk::guarded([&]() -> int {
        const int code = check(context, seq);
        if (code != PLK_OK) {
            return code;
        }
        const int32_t pos = plk::memory::pos_max(context->ctx, seq);
        return pos >= -1 ? pos : seen(*context, seq, true);
    });
}

} // extern "C"
