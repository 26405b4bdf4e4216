// The groups whose sources are chosen by compile probes: one folder each, one candidate per way
// that upstream has done it, `none.cpp` for trees that no candidate fits. Each answers `bits`, its
// share of plk_capabilities().
#pragma once

#include "core.h"

#include <memory>
#include <string>

namespace plk {

namespace load {
llama_model *open(const char *path, const plk_model_params &params);
void close(llama_model *model);
void describe(const llama_model *model, plk_model_info &info);
bool has_encoder(const llama_model *model);
// Whether a token has positions of several dimensions, which no release can shift.
bool many_positions(const llama_model *model);
int32_t tokenize(const llama_model *model, const char *text, int32_t length, int32_t *tokens,
                 int32_t room, bool add_special, bool parse_special);
int32_t piece(const llama_model *model, int32_t token, char *text, int32_t room, bool special);
bool is_eog(const llama_model *model, int32_t token);
} // namespace load

namespace context {
extern const uint64_t bits;
llama_context *open(llama_model *model, llama_context_params params);
} // namespace context

// What a context decided for itself; -1 where it cannot be read.
namespace settings {
struct Settings {
    int32_t flash = -1;
    int32_t causal = -1;
    int32_t n_seq_max = -1;
    int32_t unified = -1; // every cache has one stream
};
Settings read(llama_context *ctx);
// Flash attention on float32 keys or values aborts in trees that do not cast them first.
extern const bool flash_takes_f32;
} // namespace settings

namespace memory {
void clear(llama_context *ctx, bool data);
bool seq_rm(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1);
void seq_cp(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1);
void seq_keep(llama_context *ctx, int32_t seq);
void seq_add(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t delta);
// False, and nothing done, where llama.cpp would turn keys the wrong way round.
bool seq_div(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t divisor);
bool can_shift(llama_context *ctx);
// Whether a shift of quantised keys works, and whether one position per token is enough for models
// whose tokens have several: each false where llama.cpp aborts or reads beyond the batch.
extern const bool shifts_quantized;
extern const bool expands_positions;
// Whether recurrent models can be decoded at all.
extern const bool decodes_states;
// Whether a recurrent state begins empty where another one lay; whether several can begin at all.
extern const bool clears_states;
// Whether a removed sequence of a recurrent model may begin again without ending the process.
extern const bool restarts_states;
// Whether a saved recurrent state can be read back without ending the process.
extern const bool restores_states;
extern const bool separates_states;
// Whether a decode of a recurrent model that is broken off leaves nothing of its batch for the next,
// which may die of it: where it does, a guarded context rather ends its decode.
extern const bool ends_batches;
// Whether a state may begin in the batch of others once there have been states.
extern const bool begins_beside;
bool exists(llama_context *ctx);
// Positions as the library tells them; -1 for an empty sequence, -2 where it cannot tell.
int32_t pos_min(llama_context *ctx, int32_t seq);
int32_t pos_max(llama_context *ctx, int32_t seq);
// Used cells as the library counts them exactly; -1 where it cannot.
int32_t used(llama_context *ctx);
} // namespace memory

namespace cells {
extern const uint64_t bits;
// Fill memory, n_caches, n_streams, can_remove_partly, contiguous_slots, defrag, v_transposed and
// n_swa as far as the memory object shows them.
void describe(llama_context *ctx, plk_context_info &info);
int32_t count(llama_context *ctx);
int info(llama_context *ctx, int32_t cache, plk_cells_info &out);
int read(llama_context *ctx, int32_t cache, int32_t room, int32_t *pos, int32_t *shift,
         uint64_t *seqs, int32_t words);
// Whether a shift or a defragmentation waits: 1, 0, or -1 where that cannot be seen.
int pending(llama_context *ctx);
// Whether the library would refuse (by an assert) to copy this range between these sequences.
bool can_copy(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1);
// What must be told about shifts where it cannot be seen whether one is pending; NULL where it can.
struct Watch {
    virtual void shifting(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) = 0;
    virtual void applied(llama_context *ctx) = 0;
    virtual void closed(llama_context *ctx) = 0;

  protected:
    ~Watch() = default;
};
extern Watch *const watch;
// Whether the graph that shifts quantised keys can be built for this cache.
bool shifts_quantized(llama_context *ctx);
// Whether the state of a sequence can be written or read without following a null pointer.
bool saves_sequences(llama_context *ctx);
// Whether these bytes may be given to llama_state_seq_set_data without meeting an assert.
// 1: yes, 0: no (last error says why), 2: it is the state of an empty sequence.
int check_state(llama_context *ctx, const uint8_t *data, size_t length);
} // namespace cells

// Apply what is pending. `safe` avoids what aborts in this tree; without it: the public call alone.
namespace update {
extern const bool present;
void run(llama_context *ctx, bool safe);
} // namespace update

// Undo what a failed decode leaves behind, as far as llama_decode itself does not.
namespace rollback {
extern const uint64_t bits; // PLK_CAP_ROLLBACK where a batch without a slot leaves nothing
// Whether an aborted decode can be undone: where upstream removes other tokens instead, a guarded
// context rather ends its decode.
extern const bool abortable;
struct Saved {
    virtual ~Saved() = default;
};
std::unique_ptr<Saved> save(plk_context &context);
void undo(plk_context &context, const llama_batch &batch, int code, Saved *saved);
} // namespace rollback

namespace defrag {
extern const uint64_t bits;
// Why the memory of this context, which `info` describes, stays as it is; NULL where it need not.
const char *refusal(llama_context *ctx, const plk_context_info &info);
int run(llama_context *ctx, bool safe);
} // namespace defrag

// How cells are moved in this thread from now on, by all that moves any.
namespace moving {
extern const uint64_t bits;
void choose(const plk_context_params &asked);
} // namespace moving

// Caches in mapped memory.
namespace mapping {
extern const uint64_t bits;
// What the caches that this thread makes next are made of; NULL: the heap.
void choose(const plk_context_params *asked);
// Why the last one could not be made: a PLK_E code, or 0 where this had no part in it.
int failure();
// How many caches of a context are mapped.
int32_t count(llama_context *ctx);
// Why what a context was given is not what it was asked for: a PLK_E code, or 0.
int check(llama_context *ctx, const plk_context_params &asked);
int read(llama_context *ctx, plk_mapping &out);
int32_t tensors(llama_context *ctx, int32_t room, int64_t *rows);
int64_t trim(llama_context *ctx);
int flush(llama_context *ctx, const int32_t *tokens, int32_t n_tokens);
int32_t tokens(llama_context *ctx, int32_t room, int32_t *tokens);
} // namespace mapping

namespace counters {
extern const uint64_t bits;
bool read(llama_context *ctx, plk_counters &out);
} // namespace counters

namespace devices {
int32_t count();
bool read(int32_t index, plk_device &out);
// Append the handles of the named devices; false with the last error set.
bool select(const char *names, std::vector<void *> &list);
} // namespace devices

namespace rpc {
// Append handles of the devices behind these endpoints; false with the last error set.
bool add(const char *endpoints, std::vector<void *> &list);
int serve(const char *endpoint, const char *device, uint64_t memory);
} // namespace rpc

namespace sampler {
extern const uint64_t bits;
struct Sampler;
Sampler *open(const llama_model *model, const plk_sampler_params &params);
void close(Sampler *sampler);
void reset(Sampler *sampler);
int32_t sample(Sampler *sampler, llama_context *ctx, int32_t index, int32_t n_vocab);
} // namespace sampler

} // namespace plk
