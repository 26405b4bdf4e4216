// Operations on the memory of a context.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_memory
// Memory functions llama_memory_* (0.3.10 and later).
#define PLK_CALL(name, ...) llama_memory_##name(llama_get_memory(ctx), __VA_ARGS__)

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

// pos_div of the class for cells makes the shift rotate keys in the wrong direction.
bool plk::memory::seq_div(llama_context *, int32_t, int32_t, int32_t, int32_t) { return false; }

bool plk::memory::can_shift(llama_context *ctx) {
    return exists(ctx) && llama_memory_can_shift(llama_get_memory(ctx));
}

bool plk::memory::exists(llama_context *ctx) { return llama_get_memory(ctx) != nullptr; }

int32_t plk::memory::pos_min(llama_context *ctx, int32_t seq) {
    return PLK_CALL(seq_pos_min, seq);
}

int32_t plk::memory::pos_max(llama_context *ctx, int32_t seq) {
    return PLK_CALL(seq_pos_max, seq);
}

int32_t plk::memory::used(llama_context *) { return -1; }

#elif defined(PLK_USE_self)
// Memory functions llama_kv_self_* (March to May 2025).
#define PLK_CALL(name, ...) llama_kv_self_##name(ctx, __VA_ARGS__)
#include "fields.h"

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

bool plk::memory::can_shift(llama_context *ctx) { return llama_kv_self_can_shift(ctx); }

int32_t plk::memory::used(llama_context *ctx) { return llama_kv_self_used_cells(ctx); }

#elif defined(PLK_USE_cache)
// Memory functions llama_kv_cache_* (through 0.3.8). A failed decode leaves its first tokens.
#define PLK_CALL(name, ...) llama_kv_cache_##name(ctx, __VA_ARGS__)
#include "fields.h"

#if __has_include("ggml-cpu.h")
#include "ggml-cpu.h"
#endif

void plk::memory::clear(llama_context *ctx, bool) { llama_kv_cache_clear(ctx); }

namespace {
// llama_kv_cache_can_shift exists since 0.3.5. Before that, a shift aborts for DeepSeek models.
template <typename Context> auto ask(Context *ctx, int) -> decltype(llama_kv_cache_can_shift(ctx)) {
    return llama_kv_cache_can_shift(ctx);
}
template <typename Context> bool ask(Context *ctx, long) {
    const llama_model *model = llama_get_model(ctx);
    return !plk::fields::recurrent(model) && plk::fields::architecture(model) != "deepseek2";
}

// llama_model_get_vocab was added in the month in which the CPU backend learned to copy quantized
// rows to floats (0.3.7).
template <typename Model, typename = void> struct Later : std::false_type {};
template <typename Model>
struct Later<Model, std::void_t<decltype(llama_model_get_vocab(std::declval<Model *>()))>>
    : std::true_type {};

// While ggml_backend_cpu_buft_is_aarch64 was public (0.3.2), the CPU backend stored convolution
// weights of recurrent models in a buffer that it could not compute with, and asserted.
template <typename Type, typename = void> struct Misplaces : std::false_type {};
template <typename T>
struct Misplaces<T, std::void_t<decltype(ggml_backend_cpu_buft_is_aarch64(std::declval<T>()))>>
    : std::true_type {};

// llama_model_is_recurrent was added when states got cells of their own (0.2.90). Before that, a
// restore asserts that its cell belongs to the sequence, and only a decode sets that.
template <typename Model, typename = void> struct Owns : std::false_type {};
template <typename Model>
struct Owns<Model, std::void_t<decltype(llama_model_is_recurrent(std::declval<Model *>()))>>
    : std::true_type {};
} // namespace

const bool plk::memory::shifts_quantized = Later<llama_model>::value;
const bool plk::memory::expands_positions = false;
const bool plk::memory::decodes_states = !Misplaces<ggml_backend_buffer_type_t>::value;
// The oldest releases, whose batches have this field, search for the state that was removed.
const bool plk::memory::restarts_states = !PLK_HAS(all_pos_0, llama_batch);
const bool plk::memory::clears_states = restarts_states;
const bool plk::memory::restores_states = Owns<llama_model>::value;
const bool plk::memory::separates_states = true;
const bool plk::memory::ends_batches = false;
// The cell for a new state is not marked before states are gathered, and gathering swaps cells.
const bool plk::memory::begins_beside = false;

bool plk::memory::can_shift(llama_context *ctx) { return ask(ctx, 0); }

int32_t plk::memory::used(llama_context *ctx) { return llama_get_kv_cache_used_cells(ctx); }

#endif

bool plk::memory::seq_rm(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) {
    return PLK_CALL(seq_rm, seq, p0, p1);
}

void plk::memory::seq_cp(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    PLK_CALL(seq_cp, from, to, p0, p1);
}

void plk::memory::seq_keep(llama_context *ctx, int32_t seq) { PLK_CALL(seq_keep, seq); }

void plk::memory::seq_add(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
    PLK_CALL(seq_add, seq, p0, p1, delta);
}

#ifndef PLK_USE_memory
bool plk::memory::seq_div(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t d) {
    PLK_CALL(seq_div, seq, p0, p1, d);
    return true;
}

bool plk::memory::exists(llama_context *) { return true; }

int32_t plk::memory::pos_min(llama_context *, int32_t) { return -2; }

int32_t plk::memory::pos_max(llama_context *ctx, int32_t seq) {
    // These releases also return 0 for an empty sequence.
    const int32_t pos = PLK_CALL(seq_pos_max, seq);
    return pos > 0 ? pos : -2;
}
#endif
