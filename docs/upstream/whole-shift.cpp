// Reproducer: a K-shift that the abort callback ends leaves keys that do not match their positions.
//
//     whole-shift MODEL.gguf
//
// Exits with 0 if no aborted decode leaves wrong keys, 1 if one does, and 2 if the check is not
// possible with this model or backend.

#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

static const int N_PROMPT = 64; // tokens before the shift
static const int N_CUT    = 16; // tokens that the shift closes up
static const int N_POLLS  = 24; // maximum number of polls to abort at

static const float MAX_DIFF = 1e-2f; // logits: rounding

struct poll_counter {
    long n_polls  = 0;
    long abort_at = 0;     // 0: never
    bool stays    = false; // all polls from then until the decode returns
};

static bool on_poll(void * data) {
    auto * counter = (poll_counter *) data;

    ++counter->n_polls;

    if (counter->abort_at == 0 || counter->n_polls < counter->abort_at) {
        return false;
    }

    return counter->stays || counter->n_polls == counter->abort_at;
}

static int decode(llama_context * ctx, llama_pos pos, int n_tokens) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));

    llama_batch batch = llama_batch_init(n_tokens, 0, 1);

    batch.n_tokens = n_tokens;
    for (int i = 0; i < n_tokens; ++i) {
        batch.token   [i]    = (7*(pos + i) + 3) % n_vocab;
        batch.pos     [i]    = pos + i;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = 0;
        batch.logits  [i]    = i == n_tokens - 1;
    }

    const int status = llama_decode(ctx, batch);
    llama_batch_free(batch);

    return status;
}

static std::vector<float> logits(llama_context * ctx) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));

    const float * data = llama_get_logits_ith(ctx, -1);

    return std::vector<float>(data, data + n_vocab);
}

// the prompt without its second quarter, with the shift still pending
static bool prepare(llama_context * ctx) {
    llama_memory_t mem = llama_get_memory(ctx);

    llama_memory_clear(mem, true);

    if (decode(ctx, 0, N_PROMPT) != 0) {
        return false;
    }

    llama_memory_seq_rm (mem, 0, N_CUT, 2*N_CUT);
    llama_memory_seq_add(mem, 0, 2*N_CUT, -1, -N_CUT);

    return true;
}

// two tokens after the shift: a shift that is applied twice shows in one of them
static bool decode_both(llama_context * ctx, llama_pos pos, std::vector<float> * found) {
    for (int i = 0; i < 2; ++i) {
        if (decode(ctx, pos + i, 1) != 0) {
            return false;
        }
        found[i] = logits(ctx);
    }
    return true;
}

static float distance(const std::vector<float> & a, const std::vector<float> & b) {
    float res = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) {
        res = std::max(res, std::fabs(a[i] - b[i]));
    }
    return res;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);

    llama_model_params mparams = llama_model_default_params();
    mparams.n_gpu_layers = 0;

    llama_model * model = llama_model_load_from_file(argv[1], mparams);
    if (!model) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 2;
    }

    poll_counter counter;

    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx               = 256;
    cparams.n_batch             = 256;
    cparams.n_seq_max           = 1;
    cparams.n_threads           = 1;
    cparams.n_threads_batch     = 1;
    cparams.offload_kqv         = false;
    cparams.op_offload          = false;
    cparams.swa_full            = true;
    cparams.abort_callback      = on_poll;
    cparams.abort_callback_data = &counter;

    llama_context * ctx = llama_init_from_model(model, cparams);
    if (!ctx || !llama_memory_can_shift(llama_get_memory(ctx))) {
        fprintf(stderr, "the memory of this model cannot be shifted\n");
        return 2;
    }

    const llama_pos next = N_PROMPT - N_CUT;

    std::vector<float> expected[2];
    std::vector<float> found[2];

    // the same decodes with and without a pending shift: the difference is the number of polls in the shift
    counter = {};
    bool ok = prepare(ctx);

    counter = {};
    ok = ok && decode_both(ctx, next, expected);
    const long n_polls_shifted = counter.n_polls;

    llama_memory_seq_rm(llama_get_memory(ctx), 0, next, -1);

    counter = {};
    ok = ok && decode_both(ctx, next, found);
    const long n_polls_decode = counter.n_polls;
    const long n_polls_shift  = n_polls_shifted - n_polls_decode;

    if (!ok || n_polls_decode == 0) {
        fprintf(stderr, "the prompt cannot be decoded, or this backend does not call the abort callback\n");
        return 2;
    }

    printf("polls of the abort callback: %ld in the shift, %ld in two decodes\n", n_polls_shift, n_polls_decode);

    int n_tests = 0;
    int n_wrong = 0;

    // a fixed library does not poll in the shift: the same polls then abort the decode of the token
    const long n_last = n_polls_shift > 0 ? n_polls_shift : n_polls_decode/2;
    const long n_step = (n_last + N_POLLS - 1)/N_POLLS;

    for (const bool stays : { false, true }) {
        for (long at = 1; at <= n_last; at += n_step) {
            counter = {};
            if (!prepare(ctx)) {
                return 2;
            }

            counter = { 0, at, stays };
            const int status = decode(ctx, next, 1);
            counter = {};

            // the application repeats a decode that was aborted
            if (status == 2) {
                llama_memory_seq_rm(llama_get_memory(ctx), 0, next, -1);
                ok = decode_both(ctx, next, found);
            } else {
                ok = status == 0;
                found[0] = ok ? logits(ctx) : found[0];
                ok = ok && decode(ctx, next + 1, 1) == 0;
                found[1] = ok ? logits(ctx) : found[1];
            }

            const float diff[2] = {
                ok ? distance(expected[0], found[0]) : INFINITY,
                ok ? distance(expected[1], found[1]) : INFINITY,
            };

            ++n_tests;

            if (!(diff[0] <= MAX_DIFF && diff[1] <= MAX_DIFF)) {
                ++n_wrong;

                printf("abort at poll %ld (%s): decode returned %d, logits of the next two tokens differ by %g and %g\n",
                        at, stays ? "until it returned" : "once", status, diff[0], diff[1]);
            }
        }
    }

    if (n_wrong) {
        printf("DEFECT: %d of %d aborted decodes left wrong keys\n", n_wrong, n_tests);
    } else {
        printf("OK: none of %d aborted decodes left wrong keys\n", n_tests);
    }

    llama_free(ctx);
    llama_model_free(model);

    return n_wrong ? 1 : 0;
}
