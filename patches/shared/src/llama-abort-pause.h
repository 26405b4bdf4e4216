#ifndef LLAMA_ABORT_PAUSE_H
#define LLAMA_ABORT_PAUSE_H

// Removes the abort callback of a context while its memory is updated, and restores it.
//
// An abort of the graphs of an update would leave data that does not match its positions: a partial shift cannot be
// resumed or undone.
//
// This file is identical for all versions of llama.cpp. It requires C++11.

#include "llama.h"

// The callback is also restored if an exception ends the scope.
class llama_abort_pause {
public:
    // callback and data: those of the context, whose members are private in most releases. nullptr: change nothing.
    llama_abort_pause(llama_context * context, ggml_abort_callback callback, void * data) : ctx(context), cb(callback), cb_data(data) {
        if (cb) {
            llama_set_abort_callback(ctx, nullptr, cb_data);
        }
    }

    ~llama_abort_pause() {
        if (cb) {
            llama_set_abort_callback(ctx, cb, cb_data);
        }
    }

    llama_abort_pause(const llama_abort_pause &) = delete;
    llama_abort_pause & operator=(const llama_abort_pause &) = delete;

private:
    llama_context * const     ctx;
    const ggml_abort_callback cb;
    void * const              cb_data;
};

#endif // LLAMA_ABORT_PAUSE_H
