// A program that uses only upstream's API. It decodes one token in a cache whose first 3000 cells were freed. It prints
// the number of moved cells, or "no counters" if the library has none, and the log messages about variables.
// Usage: sparse MODEL [DEFRAG_THOLD]
#include "llama.h"

#include "decode.h"

#include <cstdlib>
#include <cstring>

#include <dlfcn.h>

namespace {

// The layout of llama-kv-counters.h; only one value is used.
struct counters {
    int64_t before[5];
    int64_t cells_moved;
    int64_t after[5];
};

} // namespace

int main(int n, char **words) {
    CHECK(n == 2 || n == 3);
    llama_log_set([](ggml_log_level, const char *text, void *) {
        if (std::strncmp(text, "LLAMA_KV_", 9) == 0) {
            std::printf("%s", text);
        }
    }, nullptr);
    llama_model *model = llama_model_load_from_file(words[1], llama_model_default_params());
    CHECK(model);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 4096;
    params.n_batch = params.n_ubatch = 256;
    params.n_seq_max = 2;
    params.n_threads = params.n_threads_batch = 1;
    params.kv_unified = true;
    if (n == 3) {
        params.defrag_thold = std::strtof(words[2], nullptr);
    }
    llama_context *ctx = llama_init_from_model(model, params);
    CHECK(ctx);
    for (int at = 0; at < 3000; at += 250) {
        decode(ctx, 0, at, 250);
    }
    decode(ctx, 1, 0, 50);
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1));
    decode(ctx, 1, 50, 1);
    counters values{};
    const auto get = (bool (*)(llama_context *, counters *)) dlsym(RTLD_DEFAULT, "llama_kv_counters_get");
    if (get != nullptr && get(ctx, &values)) {
        std::printf("%d cells moved\n", (int) values.cells_moved);
    } else {
        std::printf("no counters\n");
    }
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
