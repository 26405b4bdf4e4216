// Save and restore the state of one sequence, in upstream's format.
#include "groups.h"

namespace {

int check(const plk_context *c, int32_t seq) {
    if (const int wrong = plk::need(c)) {
        return wrong;
    }
    if (seq < 0 || static_cast<uint32_t>(seq) >= c->n_seq_max) {
        return plk::refuse(PLK_EINVAL, "sequence %d is outside [0, %u)", seq, c->n_seq_max);
    }
    if (!plk::cells::saves_sequences(c->ctx)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "this release cannot save or restore a sequence of a hybrid model: "
                           "use a later one");
    }
    return PLK_OK;
}

// Apply a pending shift: until then, positions are new and keys are old, and a restored state would
// never be correct.
void flush(const plk_context &c) {
    if (c.guard && plk::update::present && plk::cells::pending(c.ctx) != 0) {
        plk::update::run(c.ctx, true);
    }
}

// Run `work` under guarded(), whose result is an int: the size of a state may not fit.
template <typename Work> int64_t sized(Work work) {
    int64_t size = 0;
    const int code = plk::guarded([&] {
        size = work();
        return PLK_OK;
    });
    return code == PLK_OK ? size : code;
}

} // namespace

extern "C" {

int64_t plk_state_size(plk_context *context, int32_t seq) {
    return sized([&]() -> int64_t {
        const int code = check(context, seq);
        if (code != PLK_OK) {
            return code;
        }
        flush(*context);
        return static_cast<int64_t>(llama_state_seq_get_size(context->ctx, seq));
    });
}

int64_t plk_state_save(plk_context *context, int32_t seq, uint8_t *data, int64_t room) {
    return sized([&]() -> int64_t {
        const int code = check(context, seq);
        if (code != PLK_OK || data == nullptr || room < 0) {
            return code != PLK_OK ? code : plk::refuse(PLK_EINVAL, "data is NULL or room negative");
        }
        flush(*context);
        const auto needed = static_cast<int64_t>(llama_state_seq_get_size(context->ctx, seq));
        if (room < needed) {
            return plk::refuse(PLK_EINVAL, "the state needs %lld bytes, there is room for %lld",
                               static_cast<long long>(needed), static_cast<long long>(room));
        }
        plk::forget_logged();
        const size_t size =
            llama_state_seq_get_data(context->ctx, data, static_cast<size_t>(room), seq);
        if (size == 0) {
            return plk::refuse(PLK_ESTATE, "llama.cpp wrote no state: %s", plk::logged());
        }
        return static_cast<int64_t>(size);
    });
}

int64_t plk_state_load(plk_context *context, int32_t seq, const uint8_t *data, int64_t length) {
    return sized([&]() -> int64_t {
        const int code = check(context, seq);
        if (code != PLK_OK || data == nullptr || length < 1) {
            return code != PLK_OK ? code : plk::refuse(PLK_EINVAL, "the state has no bytes");
        }
        if (context->model->info.is_recurrent && !plk::memory::restores_states) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "this release cannot restore a sequence of a recurrent model: use "
                               "0.2.90 or later");
        }
        const int kind =
            plk::cells::check_state(context->ctx, data, static_cast<size_t>(length));
        if (kind == 0) {
            return PLK_ESTATE;
        }
        flush(*context);
        context->used_states |= context->model->info.is_recurrent &&
                                !plk::memory::clears_states && plk_seq_pos_max(context, seq) >= 0;
        if (kind == 2) {
            plk::memory::seq_rm(context->ctx, seq, -1, -1);
            return length;
        }
        if (context->guard && plk::cells::limits(context->ctx).compressed) {
            // llama.cpp would keep the cells of the sequence beside an empty state.
            plk::memory::seq_rm(context->ctx, seq, -1, -1);
        }
        context->had_states = context->model->info.is_recurrent;
        const size_t size =
            llama_state_seq_set_data(context->ctx, data, static_cast<size_t>(length), seq);
        if (context->guard) {
            plk::cells::repair(context->ctx);
        }
        if (size == 0 && context->guard) {
            // A truncated state leaves some of its cells; those of the sequence are already gone.
            plk::memory::seq_rm(context->ctx, seq, -1, -1);
        }
        return static_cast<int64_t>(size);
    });
}

} // extern "C"
