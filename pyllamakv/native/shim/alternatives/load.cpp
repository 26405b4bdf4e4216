// Loading models, and their vocabularies.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

// Model parameters, shared by the sections.
#include "fields.h"

#include <stdexcept>

namespace plk::load {

// Holds the device list that the parameters point to: llama.cpp copies it during the load.
struct Params {
    llama_model_params params = llama_model_default_params();
    std::vector<void *> devices;
};

inline void fill(Params &out, const plk_model_params &asked) {
    llama_model_params &params = out.params;
    params.n_gpu_layers = asked.n_gpu_layers;
    params.vocab_only = asked.vocab_only != 0;
    params.check_tensors = asked.check_tensors != 0;
    PLK_SET(use_mmap, params, asked.use_mmap != 0);
    PLK_SET(use_mlock, params, asked.use_mlock != 0);
    // In some releases one field replaces both: 0 reads the file, 1 maps it, and adding 2 locks it.
    PLK_SET(load_mode, params, (asked.use_mmap ? 1 : 0) + (asked.use_mlock ? 2 : 0));
    const bool remote = asked.rpc_servers != nullptr && *asked.rpc_servers != '\0';
    const bool named = asked.devices != nullptr && *asked.devices != '\0';
    bool good = true;
    if (remote) {
        good = plk::rpc::add(asked.rpc_servers, out.devices);
        PLK_SET(rpc_servers, params, asked.rpc_servers); // releases whose servers are not devices
    }
    if (good && named) {
        good = plk::devices::select(asked.devices, out.devices);
    }
    if (good && (named || (remote && !out.devices.empty()))) {
        if (!PLK_HAS(devices, llama_model_params)) {
            throw std::runtime_error("this release cannot be told which devices to use");
        }
        out.devices.push_back(nullptr);
        PLK_SET(devices, params, out.devices.data());
    }
    if (!good) {
        throw std::runtime_error(plk_last_error());
    }
}

} // namespace plk::load

#ifdef PLK_USE_vocab
// Functions for the vocabulary take a llama_vocab (0.3.7 and later).
#define PLK_MODEL(name) llama_model_##name
#define PLK_VOCAB(name) llama_vocab_##name

namespace {
const llama_vocab *vocab_of(const llama_model *model) { return llama_model_get_vocab(model); }

int32_t n_vocab(const llama_model *model) { return llama_vocab_n_tokens(vocab_of(model)); }

bool adds_bos(const llama_model *model) { return llama_vocab_get_add_bos(vocab_of(model)); }
} // namespace

llama_model *plk::load::open(const char *path, const plk_model_params &asked) {
    Params params;
    fill(params, asked);
    return llama_model_load_from_file(path, params.params);
}

void plk::load::close(llama_model *model) { llama_model_free(model); }

#elif defined(PLK_USE_model)
// Functions for the vocabulary take the model (through 0.3.6).
#define PLK_MODEL(name) llama_##name
#define PLK_VOCAB(name) llama_token_##name

namespace {
const llama_model *vocab_of(const llama_model *model) { return model; }

int32_t n_vocab(const llama_model *model) { return llama_n_vocab(model); }

bool adds_bos(const llama_model *model) {
    const int32_t add = llama_add_bos_token(model);
    return add >= 0 ? add : llama_vocab_type(model) == LLAMA_VOCAB_TYPE_SPM;
}
} // namespace

llama_model *plk::load::open(const char *path, const plk_model_params &asked) {
    Params params;
    fill(params, asked);
    return llama_load_model_from_file(path, params.params);
}

void plk::load::close(llama_model *model) { llama_free_model(model); }

#endif

void plk::load::describe(const llama_model *model, plk_model_info &info) {
    info.n_vocab = n_vocab(model);
    info.n_ctx_train = PLK_MODEL(n_ctx_train)(model);
    info.n_embd = PLK_MODEL(n_embd)(model);
    info.n_layer = PLK_MODEL(n_layer)(model);
    info.has_vocab = llama_vocab_type(vocab_of(model)) != LLAMA_VOCAB_TYPE_NONE;
    info.token_bos = info.token_eos = info.token_eot = info.token_nl = -1;
    if (info.has_vocab) {
        info.token_bos = PLK_VOCAB(bos)(vocab_of(model));
        info.token_eos = PLK_VOCAB(eos)(vocab_of(model));
        info.token_eot = PLK_VOCAB(eot)(vocab_of(model));
        info.token_nl = PLK_VOCAB(nl)(vocab_of(model));
        info.add_bos = adds_bos(model) ? 1 : 0;
    }
    plk::fields::describe(model, info);
}

bool plk::load::has_encoder(const llama_model *model) { return llama_model_has_encoder(model); }

bool plk::load::many_positions(const llama_model *model) {
    const auto rope = static_cast<int>(PLK_MODEL(rope_type)(model));
    // The bit of GGML_ROPE_TYPE_MROPE and of its variants; GLM is 4 in older trees.
    return rope >= 0 && (rope & 8);
}

int32_t plk::load::tokenize(const llama_model *model, const char *text, int32_t length,
                            int32_t *tokens, int32_t room, bool add_special, bool parse_special) {
    return llama_tokenize(vocab_of(model), text, length, tokens, room, add_special, parse_special);
}

int32_t plk::load::piece(const llama_model *model, int32_t token, char *text, int32_t room,
                         bool special) {
    return llama_token_to_piece(vocab_of(model), token, text, room, 0, special);
}

bool plk::load::is_eog(const llama_model *model, int32_t token) {
    return PLK_VOCAB(is_eog)(vocab_of(model), token);
}
