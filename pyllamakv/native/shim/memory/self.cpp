// Memory functions llama_kv_self_* (March to May 2025).
#include "fields.h"
#include "groups.h"

const bool plk::memory::shifts_quantized = true;
const bool plk::memory::expands_positions = false;
const bool plk::memory::decodes_states = true;
// States are copied before they are cleared, and the copy marks them as used; b4980 does so with
// states of other sequences.
const bool plk::memory::clears_states = false;
const bool plk::memory::restarts_states = true;
const bool plk::memory::restores_states = true;
const bool plk::memory::separates_states = PLK_HAS(tensor_buft_overrides, llama_model_params);
const bool plk::memory::ends_batches = true;
// As in the releases before: the cell for a new state is not marked before states are gathered.
const bool plk::memory::begins_beside = false;

void plk::memory::clear(llama_context *ctx, bool) { llama_kv_self_clear(ctx); }

bool plk::memory::seq_rm(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) {
    return llama_kv_self_seq_rm(ctx, seq, p0, p1);
}

void plk::memory::seq_cp(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    llama_kv_self_seq_cp(ctx, from, to, p0, p1);
}

void plk::memory::seq_keep(llama_context *ctx, int32_t seq) { llama_kv_self_seq_keep(ctx, seq); }

void plk::memory::seq_add(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
    llama_kv_self_seq_add(ctx, seq, p0, p1, delta);
}

bool plk::memory::seq_div(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t d) {
    llama_kv_self_seq_div(ctx, seq, p0, p1, d);
    return true;
}

bool plk::memory::can_shift(llama_context *ctx) { return llama_kv_self_can_shift(ctx); }

bool plk::memory::exists(llama_context *) { return true; }

int32_t plk::memory::pos_min(llama_context *, int32_t) { return -2; }

int32_t plk::memory::pos_max(llama_context *ctx, int32_t seq) {
    // These releases also return 0 for an empty sequence.
    const int32_t pos = llama_kv_self_seq_pos_max(ctx, seq);
    return pos > 0 ? pos : -2;
}

int32_t plk::memory::used(llama_context *ctx) { return llama_kv_self_used_cells(ctx); }
