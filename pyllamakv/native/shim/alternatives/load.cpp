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

llama_model *plk::load::open(const char *path, const plk_model_params &asked) {
    Params params;
    fill(params, asked);
    return llama_model_load_from_file(path, params.params);
}

void plk::load::close(llama_model *model) { llama_model_free(model); }

void plk::load::describe(const llama_model *model, plk_model_info &info) {
    const llama_vocab *vocab = llama_model_get_vocab(model);
    info.n_vocab = llama_vocab_n_tokens(vocab);
    info.n_ctx_train = llama_model_n_ctx_train(model);
    info.n_embd = llama_model_n_embd(model);
    info.n_layer = llama_model_n_layer(model);
    info.has_vocab = llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE;
    info.token_bos = info.token_eos = info.token_eot = info.token_nl = -1;
    if (info.has_vocab) {
        info.token_bos = llama_vocab_bos(vocab);
        info.token_eos = llama_vocab_eos(vocab);
        info.token_eot = llama_vocab_eot(vocab);
        info.token_nl = llama_vocab_nl(vocab);
        info.add_bos = llama_vocab_get_add_bos(vocab) ? 1 : 0;
    }
    plk::fields::describe(model, info);
}

bool plk::load::has_encoder(const llama_model *model) { return llama_model_has_encoder(model); }

bool plk::load::many_positions(const llama_model *model) {
    const auto rope = static_cast<int>(llama_model_rope_type(model));
    return rope >= 0 && (rope & 8); // bit of GGML_ROPE_TYPE_MROPE and of its variants
}

int32_t plk::load::tokenize(const llama_model *model, const char *text, int32_t length,
                            int32_t *tokens, int32_t room, bool add_special, bool parse_special) {
    return llama_tokenize(llama_model_get_vocab(model), text, length, tokens, room, add_special,
                          parse_special);
}

int32_t plk::load::piece(const llama_model *model, int32_t token, char *text, int32_t room,
                         bool special) {
    return llama_token_to_piece(llama_model_get_vocab(model), token, text, room, 0, special);
}

bool plk::load::is_eog(const llama_model *model, int32_t token) {
    return llama_vocab_is_eog(llama_model_get_vocab(model), token);
}

#elif defined(PLK_USE_model)
// Functions for the vocabulary take the model (through 0.3.6).

llama_model *plk::load::open(const char *path, const plk_model_params &asked) {
    Params params;
    fill(params, asked);
    return llama_load_model_from_file(path, params.params);
}

void plk::load::close(llama_model *model) { llama_free_model(model); }

void plk::load::describe(const llama_model *model, plk_model_info &info) {
    info.n_vocab = llama_n_vocab(model);
    info.n_ctx_train = llama_n_ctx_train(model);
    info.n_embd = llama_n_embd(model);
    info.n_layer = llama_n_layer(model);
    info.has_vocab = llama_vocab_type(model) != LLAMA_VOCAB_TYPE_NONE;
    info.token_bos = info.token_eos = info.token_eot = info.token_nl = -1;
    if (info.has_vocab) {
        info.token_bos = llama_token_bos(model);
        info.token_eos = llama_token_eos(model);
        info.token_eot = llama_token_eot(model);
        info.token_nl = llama_token_nl(model);
        const int32_t add = llama_add_bos_token(model);
        info.add_bos = add >= 0 ? add : llama_vocab_type(model) == LLAMA_VOCAB_TYPE_SPM;
    }
    plk::fields::describe(model, info);
}

bool plk::load::has_encoder(const llama_model *model) { return llama_model_has_encoder(model); }

bool plk::load::many_positions(const llama_model *model) {
    const auto rope = static_cast<int>(llama_rope_type(model));
    return rope >= 0 && (rope & 8); // bit of GGML_ROPE_TYPE_MROPE; GLM is 4 in older trees
}

int32_t plk::load::tokenize(const llama_model *model, const char *text, int32_t length,
                            int32_t *tokens, int32_t room, bool add_special, bool parse_special) {
    return llama_tokenize(model, text, length, tokens, room, add_special, parse_special);
}

int32_t plk::load::piece(const llama_model *model, int32_t token, char *text, int32_t room,
                         bool special) {
    return llama_token_to_piece(model, token, text, room, 0, special);
}

bool plk::load::is_eog(const llama_model *model, int32_t token) {
    return llama_token_is_eog(model, token);
}

#endif
