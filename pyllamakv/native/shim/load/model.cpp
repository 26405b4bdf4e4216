// Functions for the vocabulary take the model (through 0.3.6).
#include "load/params.h"

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
