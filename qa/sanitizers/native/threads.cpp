// Use a library from several threads, within the rules of plk.h, for the thread sanitizer.
//
// Usage: threads MODEL THREADS ROUNDS; prints "ok", or the first failed check.
#include "plk.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::printf("line %d: %s: %s\n", __LINE__, #condition, plk_last_error());              \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

namespace {

constexpr int n_ctx = 256;

int n_threads = 1;
int rounds = 10;

plk_context *context(plk_model *model, int defrag_threads) {
    plk_context_params p{};
    p.size = sizeof p;
    p.n_ctx = n_ctx;
    p.n_batch = p.n_ubatch = 64;
    p.n_seq_max = 4;
    p.n_threads = p.n_threads_batch = n_threads;
    p.flash_attn = 1;
    p.type_k = p.type_v = 1;
    p.kv_unified = 1;
    p.offload_kqv = 1;
    p.defrag_thold = -1.0f;
    p.guard = 1;
    p.defrag_mover = 1;
    p.defrag_threads = defrag_threads;
    plk_context *made = nullptr;
    CHECK(plk_context_new(model, &p, &made) == PLK_OK);
    return made;
}

int decode(plk_context *c, int n, int first, int seq) {
    std::vector<int32_t> token(n), pos(n), seqs(n, seq);
    for (int i = 0; i < n; ++i) {
        token[i] = 3 + i % 20;
        pos[i] = first + i;
    }
    plk_batch batch{};
    batch.size = sizeof batch;
    batch.n_tokens = n;
    batch.token = token.data();
    batch.pos = pos.data();
    batch.seq_id = seqs.data();
    return plk_decode(c, &batch);
}

// Some threads write log records, others read them, and one changes the level.
void log_ring() {
    std::atomic<bool> going{true};
    std::vector<std::thread> readers;
    for (int i = 0; i < 2; ++i) {
        readers.emplace_back([&going] {
            char text[4096];
            int32_t level = 0;
            while (going.load()) {
                (void)plk_log_read(&level, text, sizeof text);
                (void)plk_log_lost();
                plk_log_level(1 + level % 4);
            }
        });
    }
    std::vector<std::thread> writers;
    for (int i = 0; i < 2; ++i) {
        writers.emplace_back([] {
            plk_model_params p{};
            p.size = sizeof p;
            for (int k = 0; k < rounds; ++k) {
                plk_model *none = nullptr;
                CHECK(plk_model_load("/nowhere/model.gguf", &p, &none) < 0);
                CHECK(std::string(plk_last_error()).size() > 0);
            }
        });
    }
    for (std::thread &each : writers) {
        each.join();
    }
    going.store(false);
    for (std::thread &each : readers) {
        each.join();
    }
    plk_log_level(1);
}

// One thread decodes, another one cancels repeatedly; a decode is complete or rolled back.
void cancel(plk_model *model) {
    plk_context *c = context(model, 1);
    std::atomic<bool> going{true};
    std::thread other([&going, c] {
        while (going.load()) {
            plk_cancel(c);
            (void)plk_cancel_polls(c);
            std::this_thread::yield();
        }
    });
    for (int k = 0; k < rounds; ++k) {
        const int code = decode(c, 48, 0, 0);
        CHECK(code == PLK_OK || code == PLK_ABORTED);
        CHECK(plk_seq_pos_max(c, 0) == (code == PLK_OK ? 47 : -1));
        CHECK(plk_clear(c, 0) == PLK_OK);
    }
    going.store(false);
    other.join();
    plk_context_free(c);
}

// Each thread has its own context of one model: decode, fragment, defragment with threads, save.
void serve(plk_model *model) {
    std::vector<std::thread> workers;
    for (int i = 0; i < 2; ++i) {
        workers.emplace_back([model] {
            plk_context *c = context(model, 3);
            for (int k = 0; k < rounds; ++k) {
                for (int at = 0; at < 96; at += 8) {
                    CHECK(decode(c, 8, at, 0) == PLK_OK);
                    CHECK(decode(c, 8, at, 1) == PLK_OK);
                }
                CHECK(plk_seq_rm(c, 0, -1, -1) == PLK_OK);
                plk_defrag_report report{};
                report.size = sizeof report;
                const int code = plk_defrag(c, &report);
                CHECK(code == PLK_OK || code == PLK_EUNSUPPORTED);
                CHECK(plk_seq_add(c, 1, 8, -1, -4) == PLK_OK && plk_update(c) == PLK_OK);
                const int64_t size = plk_state_size(c, 1);
                std::vector<uint8_t> state(size);
                CHECK(plk_state_save(c, 1, state.data(), size) == size);
                CHECK(plk_state_load(c, 2, state.data(), size) == size);
                CHECK(decode(c, 1, 95, 2) == PLK_OK && plk_logits(c, -1) != nullptr);
                CHECK(plk_clear(c, 1) == PLK_OK);
            }
            plk_context_free(c);
        });
    }
    for (std::thread &each : workers) {
        each.join();
    }
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 4) {
        std::printf("usage: threads MODEL THREADS ROUNDS\n");
        return 2;
    }
    n_threads = std::atoi(argv[2]);
    rounds = std::atoi(argv[3]);
    CHECK(plk_init() == PLK_OK);
    plk_model_params p{};
    p.size = sizeof p;
    plk_model *model = nullptr;
    CHECK(plk_model_load(argv[1], &p, &model) == PLK_OK);
    log_ring();
    cancel(model);
    serve(model);
    plk_model_free(model);
    std::printf("ok\n");
    return 0;
}
