// Reproducer: the trial placement of a batch removes cells from a sliding window.
//
//     window-rollback MODEL.gguf
//
// Exits with 0 if a refused batch changes nothing and every token sees its whole window, 1 if a part of
// the window is lost, and 2 if the check is not possible with this model.

#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

static const float MAX_DIFF = 1e-2f; // logits: rounding, and the order of cells

struct token_pos {
    std::vector<llama_seq_id> seqs;
    llama_pos                 pos;
};

typedef std::vector<token_pos> tokens;

// positions [p0, p1) of the sequences
static tokens range(const std::vector<llama_seq_id> & seqs, llama_pos p0, llama_pos p1) {
    tokens res;
    for (llama_pos pos = p0; pos < p1; ++pos) {
        res.push_back({ seqs, pos });
    }
    return res;
}

static int decode(llama_context * ctx, const tokens & toks) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));

    llama_batch batch = llama_batch_init(toks.size(), 0, 2);

    batch.n_tokens = toks.size();
    for (int i = 0; i < batch.n_tokens; ++i) {
        const token_pos & tok = toks[i];

        batch.token   [i] = (7*tok.pos + 11*tok.seqs[0] + 3) % n_vocab;
        batch.pos     [i] = tok.pos;
        batch.n_seq_id[i] = tok.seqs.size();
        batch.logits  [i] = i == 0 || i == batch.n_tokens - 1;
        std::copy(tok.seqs.begin(), tok.seqs.end(), batch.seq_id[i]);
    }

    const int status = llama_decode(ctx, batch);
    llama_batch_free(batch);

    return status;
}

static std::vector<float> logits(llama_context * ctx, int i) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));

    const float * data = llama_get_logits_ith(ctx, i);

    return std::vector<float>(data, data + n_vocab);
}

static float distance(const std::vector<float> & a, const std::vector<float> & b) {
    float res = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) {
        res = std::max(res, std::fabs(a[i] - b[i]));
    }
    return res;
}

// a sliding-window cache with just enough cells for the next two micro-batches
struct setup {
    int n_swa;    // size of the window
    int n_ubatch; // size of a micro-batch
    int n_cells;  // cells of the sliding-window cache
    int n_late;   // tokens of the window in cells after its other tokens

    explicit setup(int n_swa) : n_swa(n_swa) {
        n_ubatch = std::min(n_swa/4, 256);
        n_cells  = (4*n_swa + n_ubatch + 255)/256*256;
        n_late   = n_ubatch/2;
    }

    // the cells afterwards:
    //   sequence 0, positions [n_late, n_swa)
    //   sequence 0, positions [0, n_late)
    //   sequences 1 and 2, which share all cells, so that no window can replace them
    //   n_ubatch + n_late - 1 empty cells
    bool fill(llama_context * ctx) const {
        llama_memory_t mem = llama_get_memory(ctx);

        llama_memory_clear(mem, true);

        const int n_shared = n_cells - (n_swa - 1) - n_ubatch - n_late;

        bool ok = true;

        ok = ok && decode(ctx, range({ 3 },    0, n_swa - n_late)) == 0;
        ok = ok && decode(ctx, range({ 0 },    0, n_late))         == 0;
        ok = ok && decode(ctx, range({ 1, 2 }, 0, n_shared))       == 0;

        // make room for the later positions in front of the earlier ones
        llama_memory_seq_rm(mem, 3, -1, -1);

        ok = ok && decode(ctx, range({ 0 }, n_late, n_swa)) == 0;

        return ok;
    }
};

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

    if (llama_model_n_swa(model) < 8) {
        fprintf(stderr, "the model has no sliding window\n");
        return 2;
    }

    const setup cells(llama_model_n_swa(model));

    const int n_swa    = cells.n_swa;
    const int n_ubatch = cells.n_ubatch;

    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx           = 2*cells.n_cells;
    cparams.n_batch         = 2*cells.n_cells;
    cparams.n_ubatch        = n_ubatch;
    cparams.n_seq_max       = 4;
    cparams.n_threads       = 1;
    cparams.n_threads_batch = 1;
    cparams.kv_unified      = true;
    cparams.swa_full        = false;

    llama_context * ctx = llama_init_from_model(model, cparams);
    if (!ctx) {
        fprintf(stderr, "cannot create a context\n");
        return 2;
    }

    printf("window %d, micro-batch %d, %d cells\n", n_swa, n_ubatch, cells.n_cells);

    const tokens first  = range({ 0 }, n_swa,            n_swa +   n_ubatch);
    const tokens second = range({ 0 }, n_swa + n_ubatch, n_swa + 2*n_ubatch);
    const tokens other  = range({ 3 }, 0, 3*n_ubatch);

    tokens both = first;
    both.insert(both.end(), second.begin(), second.end());

    tokens all = both;
    all.insert(all.end(), other.begin(), other.end());

    int n_wrong = 0;

    // a batch that does not fit: nothing may change
    {
        const bool   filled = cells.fill(ctx);
        const size_t before = llama_state_seq_get_size(ctx, 0);
        const int    status = filled ? decode(ctx, all) : -1;
        const size_t after  = llama_state_seq_get_size(ctx, 0);

        if (status != 1) {
            fprintf(stderr, "the cells cannot be filled as the check requires: llama_decode returned %d\n", status);
            return 2;
        }

        printf("refused batch: the state of sequence 0 had %zu bytes before and has %zu after it\n", before, after);
        n_wrong += before != after;
    }

    // one micro-batch per call: its trial placement equals its placement
    if (!cells.fill(ctx) || decode(ctx, first) != 0) {
        fprintf(stderr, "a batch of one micro-batch cannot be decoded\n");
        return 2;
    }
    const auto expected = logits(ctx, 0);

    // both micro-batches in one call: the logits of the first token must not change
    {
        if (!cells.fill(ctx) || decode(ctx, both) != 0) {
            fprintf(stderr, "a batch of two micro-batches cannot be decoded\n");
            return 2;
        }

        const float diff = distance(expected, logits(ctx, 0));

        printf("two micro-batches in one call: the logits of the first token differ by %g\n", diff);
        n_wrong += !(diff <= MAX_DIFF);
    }

    if (n_wrong) {
        printf("DEFECT: %d of 2 checks found a window that lost tokens\n", n_wrong);
    } else {
        printf("OK: the window is complete\n");
    }

    llama_free(ctx);
    llama_model_free(model);

    return n_wrong ? 1 : 0;
}
