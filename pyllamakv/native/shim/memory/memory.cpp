// Memory functions llama_memory_* (0.3.10 and later).
#include "groups.h"

const bool plk::memory::shifts_quantized = true;
const bool plk::memory::expands_positions = true;

#ifdef PLK_ENDLESS_SPLIT
const bool plk::memory::decodes_states = false;
#else
const bool plk::memory::decodes_states = true;
#endif
const bool plk::memory::clears_states = true;
const bool plk::memory::restarts_states = true;
const bool plk::memory::restores_states = true;
const bool plk::memory::separates_states = true;
const bool plk::memory::ends_batches = true;
const bool plk::memory::begins_beside = true;

void plk::memory::clear(llama_context *ctx, bool data) {
    llama_memory_clear(llama_get_memory(ctx), data);
}

bool plk::memory::seq_rm(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) {
    return llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1);
}

void plk::memory::seq_cp(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    llama_memory_seq_cp(llama_get_memory(ctx), from, to, p0, p1);
}

void plk::memory::seq_keep(llama_context *ctx, int32_t seq) {
    llama_memory_seq_keep(llama_get_memory(ctx), seq);
}

void plk::memory::seq_add(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
    llama_memory_seq_add(llama_get_memory(ctx), seq, p0, p1, delta);
}

// pos_div of the class for cells makes the shift rotate keys in the wrong direction.
bool plk::memory::seq_div(llama_context *, int32_t, int32_t, int32_t, int32_t) { return false; }

bool plk::memory::can_shift(llama_context *ctx) {
    return exists(ctx) && llama_memory_can_shift(llama_get_memory(ctx));
}

bool plk::memory::exists(llama_context *ctx) { return llama_get_memory(ctx) != nullptr; }

int32_t plk::memory::pos_min(llama_context *ctx, int32_t seq) {
    return llama_memory_seq_pos_min(llama_get_memory(ctx), seq);
}

int32_t plk::memory::pos_max(llama_context *ctx, int32_t seq) {
    return llama_memory_seq_pos_max(llama_get_memory(ctx), seq);
}

int32_t plk::memory::used(llama_context *) { return -1; }
