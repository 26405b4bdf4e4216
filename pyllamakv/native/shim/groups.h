// The functions whose implementation depends on the interface of a release. Each namespace has a file
// of alternatives with one section per interface that upstream has had; compile probes choose it.
// `bits` is the part of plk_capabilities() that it provides.
#pragma once

#include "core.h"

#include <memory>
#include <string>

namespace llama_kv_defrag {
struct options; // of the patches full-defrag and compaction
}

namespace plk {

namespace load {
llama_model *open(const char *path, const plk_model_params &params);
void close(llama_model *model);
void describe(const llama_model *model, plk_model_info &info);
bool has_encoder(const llama_model *model);
// Return whether a token has positions of several dimensions, which no release can shift.
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

// Settings that llama.cpp decides for a context; -1 if unknown.
namespace settings {
constexpr float unknown_thold = -2.0f; // every other negative value is -1
struct Settings {
    int32_t flash = -1;
    int32_t causal = -1;
    int32_t n_seq_max = -1;
    int32_t unified = -1; // every cache has one stream
    float defrag_thold = unknown_thold;
};
Settings read(llama_context *ctx);
// False in trees whose flash attention aborts on float32 keys or values, which they do not cast.
extern const bool flash_takes_f32;
} // namespace settings

namespace memory {
void clear(llama_context *ctx, bool data);
bool seq_rm(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1);
void seq_cp(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1);
void seq_keep(llama_context *ctx, int32_t seq);
void seq_add(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t delta);
// Return false, without a change, if llama.cpp would rotate keys in the wrong direction.
bool seq_div(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t divisor);
bool can_shift(llama_context *ctx);
// shifts_quantized: true if a shift of quantized keys works; else llama.cpp aborts.
// expands_positions: true if one position per token is enough for models whose tokens have several;
// else llama.cpp reads beyond the batch.
extern const bool shifts_quantized;
extern const bool expands_positions;
// True if recurrent models can be decoded.
extern const bool decodes_states;
// True if a new recurrent state is empty, even in a cell that another state used.
extern const bool clears_states;
// True if a removed sequence of a recurrent model can begin again; else the process ends.
extern const bool restarts_states;
// True if a saved recurrent state can be restored; else the process ends.
extern const bool restores_states;
// True if a context can have several sequences of a recurrent model.
extern const bool separates_states;
// True if an aborted decode of a recurrent model leaves nothing of its batch. Else the next decode
// may end the process, so that a guarded context does not abort a decode.
extern const bool ends_batches;
// True if a state can begin in a batch with other sequences after the context has had states.
extern const bool begins_beside;
bool exists(llama_context *ctx);
// Return the position that the library reports; -1 for an empty sequence, -2 if unknown.
int32_t pos_min(llama_context *ctx, int32_t seq);
int32_t pos_max(llama_context *ctx, int32_t seq);
// Return the number of used cells if the library counts them exactly, else -1.
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
// Return 1 if a shift or a defragmentation is pending, 0 if not, -1 if unknown.
int pending(llama_context *ctx);
// Return whether the library copies this range between these sequences; else it asserts.
bool can_copy(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1);
// Tracks shifts in releases that do not expose whether one is pending. `watch` is NULL in others.
struct Watch {
    virtual void shifting(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) = 0;
    virtual void applied(llama_context *ctx) = 0;
    virtual void closed(llama_context *ctx) = 0;

  protected:
    ~Watch() = default;
};
extern Watch *const watch;
// True if creating a context reserves a graph whose tokens are rounded up to a multiple of n_seq_max
// in a cache with one stream, and aborts if that exceeds the cells (0.3.10 through 0.3.14).
extern const bool rounds_up;
// Return whether each micro-batch must have consecutive sequences; else llama.cpp asserts (hybrid
// memories with a stream per sequence, 0.3.15 and 0.3.16).
bool needs_order(llama_context *ctx);
// Limits of a class of memory.
struct Limits {
    // It stores rows that no cell describes, each computed from several tokens (llama_kv_cache_dsv4).
    bool compressed = false;
    // Removing a sequence leaves the compressed rows of the others.
    bool separates_sequences = true;
    // A shift rotates the right values of all keys. It does not in the indexer of
    // llama_kv_cache_dsa, which stores the rotated values first, and multiplied by a matrix.
    bool shifts = true;
    // Exclusive maximum of positions: compressed rows have the index position / ratio.
    int32_t positions = far_away;
};
Limits limits(llama_context *ctx);
// Set the options for moving cells of each cache that has them.
void set_options(llama_context *ctx, const llama_kv_defrag::options &options);
// Repair what llama.cpp leaves after a shift or the restore of a state.
void repair(llama_context *ctx);
// Return whether the graph that shifts quantized keys can be built for this cache.
bool shifts_quantized(llama_context *ctx);
// Return whether saving or restoring the state of a sequence works; else it dereferences NULL.
bool saves_sequences(llama_context *ctx);
// Check that llama_state_seq_set_data does not assert on these bytes. Return 1 if it does not, 0
// with the last error set if it does, 2 if this is the state of an empty sequence.
int check_state(llama_context *ctx, const uint8_t *data, size_t length);
} // namespace cells

// Apply pending updates. safe: avoid calls that abort in this tree; else make only the public call.
namespace update {
extern const bool present;
// False if a shift or move asserts with mean pooling: the graph that is then reserved has the number of
// outputs of the last batch.
extern const bool reserves_means;
void run(llama_context *ctx, bool safe);
} // namespace update

// Undo the effects of a failed decode that llama_decode does not undo.
namespace rollback {
extern const uint64_t bits; // PLK_CAP_ROLLBACK if a batch without a slot leaves nothing
// True if an aborted decode can be undone. False if upstream removes other tokens: then a guarded
// context does not abort a decode.
extern const bool abortable;
struct Saved {
    virtual ~Saved() = default;
};
std::unique_ptr<Saved> save(plk_context &context);
void undo(plk_context &context, const llama_batch &batch, int code, Saved *saved);
} // namespace rollback

namespace defrag {
extern const uint64_t bits;
// Return why the memory of this context, described by `info`, cannot be defragmented, or NULL.
const char *refusal(llama_context *ctx, const plk_context_info &info);
int run(llama_context *ctx, bool safe);
// Return the fraction of unnecessary cells or holes above which the library defragments before a
// decode: never if <= 0.
float threshold(const plk_context &context);
} // namespace defrag

// Options for moving the cells of a context.
namespace moving {
extern const uint64_t bits;
void choose(llama_context *ctx, const plk_context_params &asked);
// Write the options that are in effect for a context with these parameters.
void describe(const plk_context_params &asked, plk_context_info &info);
} // namespace moving

// Caches in mapped memory.
namespace mapping {
extern const uint64_t bits;
// Select the memory of the caches that this thread creates next. NULL selects the heap.
void choose(const plk_context_params *asked);
// Return the PLK_E code of the last cache that could not be mapped, or 0 if mapping did not fail.
int failure();
// Return the number of mapped caches of a context.
int32_t count(llama_context *ctx);
// Return a PLK_E code if the mapped caches of a context are not what `asked` requests, else 0.
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
// Append the handles of the named devices. Return false, with the last error set, on failure.
bool select(const char *names, std::vector<void *> &list);
} // namespace devices

namespace rpc {
// Append the handles of the devices of these servers. Return false, with the last error set, on
// failure. `endpoints`: host:port, separated by commas.
bool add(const char *endpoints, std::vector<void *> &list);
int serve(const char *endpoint, const char *device, uint64_t memory);
} // namespace rpc

namespace sampler {
extern const uint64_t bits;
struct Sampler;
// Return NULL, with the last error set, on failure.
Sampler *open(const plk_model &model, const plk_sampler_params &params);
void close(Sampler *sampler);
void reset(Sampler *sampler);
// Sample from candidates whose logits are finite, at least one; return the token or a PLK_E code.
int32_t sample(Sampler *sampler, std::vector<llama_token_data> &candidates);
void accept(Sampler *sampler, int32_t token);
} // namespace sampler

// Grammars in GBNF. They restrict the candidates before any sampler of the chain.
namespace grammar {
extern const uint64_t bits;
struct Grammar;
// Return NULL, with the last error set, if the text does not parse or has no rule `root`.
Grammar *open(const llama_model *model, const char *text);
void close(Grammar *grammar);
void reset(Grammar *grammar);
// Set the logits of the tokens that the grammar does not allow next to -INFINITY.
void apply(Grammar *grammar, std::vector<llama_token_data> &candidates);
// The token must be allowed: llama.cpp aborts for an end token that is not.
void accept(Grammar *grammar, int32_t token);
} // namespace grammar

// LoRA adapters.
namespace adapters {
extern const uint64_t bits;
// Return NULL if llama.cpp refuses the file; the reason is in its log.
void *open(llama_model *model, const char *path);
void close(void *lora);
// Replace the adapters of a context. Return false if llama.cpp refuses one.
bool set(llama_context *ctx, const std::vector<void *> &loras, const std::vector<float> &scales);
// Return the maximum number of nodes of a graph, beyond which llama.cpp asserts; 0: it makes room.
size_t max_nodes(llama_context *ctx);
} // namespace adapters

// Pooling of embeddings.
namespace pooling {
extern const uint64_t bits;
// Return whether a model has a classification head; true if unknown. Without one, llama.cpp asserts.
bool has_head(const llama_model *model);
// Return the width of the embeddings that the graph of a context computes; 0 if unknown.
int64_t width(llama_context *ctx);
} // namespace pooling

} // namespace plk
