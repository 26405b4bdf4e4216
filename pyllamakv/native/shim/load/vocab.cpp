// Functions for the vocabulary take a llama_vocab (0.3.7 and later).
#include "load/params.h"

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
