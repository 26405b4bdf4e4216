// The abort callback of a context is kept if its K-shift throws an exception.
// Usage: throwing_shift MODEL
#include "llama.h"

#include "decode.h"

#include <cstring>
#include <stdexcept>

#include <dlfcn.h>

namespace {

bool throws = false;
int n_abort_calls = 0;

// Throw as soon as a graph rotates a tensor of the cache.
bool evaluate(ggml_tensor *node, bool, void *) {
    const ggml_tensor *root = node;
    while (root->view_src != nullptr) {
        root = root->view_src;
    }
    if (throws && node->op == GGML_OP_ROPE && std::strncmp(root->name, "cache_k", 7) == 0) {
        throw std::runtime_error("a shift fails");
    }
    return false;
}

bool abort_at_once(void *) {
    ++n_abort_calls;
    return true;
}

template <typename F> F *function(const char *name) {
    return reinterpret_cast<F *>(dlsym(RTLD_DEFAULT, name));
}

// Shift sequence 0 with the function that this release has.
void shift(llama_context *ctx, int by) {
    const auto memory = function<void *(llama_context *)>("llama_get_memory");
    const auto add = function<void(void *, llama_seq_id, llama_pos, llama_pos, llama_pos)>("llama_memory_seq_add");
    const auto old = function<void(llama_context *, llama_seq_id, llama_pos, llama_pos, llama_pos)>("llama_kv_self_seq_add");
    CHECK((memory && add) || old);
    memory && add ? add(memory(ctx), 0, 0, -1, by) : old(ctx, 0, 0, -1, by);
}

int decode_one(llama_context *ctx, int pos) {
    llama_batch batch = llama_batch_init(1, 0, 1);
    batch.n_tokens = batch.n_seq_id[0] = batch.logits[0] = 1;
    batch.token[0] = 3;
    batch.pos[0] = pos;
    batch.seq_id[0][0] = 0;
    int code = -100;
    try {
        code = llama_decode(ctx, batch);
    } catch (const std::exception &) {
    }
    llama_batch_free(batch);
    return code;
}

} // namespace

int main(int n, char **words) {
    CHECK(n == 2);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model *model = llama_model_load_from_file(words[1], llama_model_default_params());
    CHECK(model);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_threads = params.n_threads_batch = 1;
    params.cb_eval = evaluate;
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    decode(ctx, 0, 0, 20);
    llama_set_abort_callback(ctx, abort_at_once, nullptr);
    shift(ctx, 4);
    throws = true;
    CHECK(decode_one(ctx, 24) < 0);
    CHECK(n_abort_calls == 0); // the callback is not used during a shift
    throws = false;
    CHECK(decode_one(ctx, 24) == 2 && n_abort_calls > 0);
    llama_set_abort_callback(ctx, nullptr, nullptr);
    CHECK(decode_one(ctx, 24) == 0);
    std::printf("the callback was kept\n");
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
