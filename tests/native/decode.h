// Decode tokens of one sequence through the public calls.
#pragma once

#include "stubs/check.h"
#include "llama.h"

inline void decode(llama_context *ctx, llama_seq_id seq, int first, int n) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        batch.token[i] = (first + i) % 32;
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = i + 1 == n;
    }
    CHECK(llama_decode(ctx, batch) == 0);
    llama_batch_free(batch);
}
