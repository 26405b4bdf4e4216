// Models: loading, properties, vocabulary.
#include "groups.h"

#include <cerrno>
#include <climits>
#include <cstdio>
#include <functional>

#include <pthread.h>
#include <signal.h>

namespace {

// Many pre-tokenizers use std::regex, which recurses for each character of a match: 340 bytes of stack
// on b11549, and on 0.3.9 340 to 900 (gpt-4o and tekken, whose groups capture), with gcc on x86-64.
// A text above this size is tokenized on a thread with a stack for one match of the whole text. Pages
// of a stack that no call reaches use no memory.
constexpr size_t small_text = 1024;
constexpr size_t stack_base = 1 << 20, stack_per_byte = 2048;

struct Task {
    const std::function<int()> &work;
    int code = PLK_OK;
    char error[1024] = ""; // plk_last_error() belongs to a thread
};

void *run_task(void *data) {
    auto *task = static_cast<Task *>(data);
    task->code = plk::guarded(task->work);
    snprintf(task->error, sizeof(task->error), "%s", plk_last_error());
    return nullptr;
}

// Run `work` for a text of `length` bytes with a stack that is large enough.
int with_stack(size_t length, const std::function<int()> &work) {
    if (length <= small_text) {
        return work();
    }
    Task task{work};
    pthread_attr_t attributes;
    pthread_t thread;
    const size_t size = (stack_base + length * stack_per_byte + 0xffff) & ~size_t(0xffff);
    int failed = pthread_attr_init(&attributes);
    if (failed == 0) {
        failed = pthread_attr_setstacksize(&attributes, size);
        if (failed == 0) {
            // The thread inherits the mask: handlers of signals run in the threads of the caller.
            sigset_t all, before;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            failed = pthread_create(&thread, &attributes, run_task, &task);
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
        }
        pthread_attr_destroy(&attributes);
    }
    if (failed != 0) {
        return plk::refuse(PLK_EMEMORY, "a text of %zu bytes needs a thread with a stack of %zu bytes (%s): "
                           "tokenize it in parts",
                           length, size, strerror(failed));
    }
    pthread_join(thread, nullptr);
    return *task.error != 0 ? plk::refuse(task.code, "%s", task.error) : task.code;
}

} // namespace

plk_model::~plk_model() {
    if (model != nullptr) {
        plk::load::close(model);
    }
}

void plk::release(plk_model *model) {
    if (model != nullptr && model->users.fetch_sub(1) == 1) {
        delete model;
    }
}

extern "C" {

int plk_model_load(const char *path, const plk_model_params *params, plk_model **out) {
    return plk::guarded([&]() -> int {
        if (path == nullptr || out == nullptr) {
            return plk::refuse(PLK_EINVAL, "path or out is NULL");
        }
        *out = nullptr;
        plk_model_params mine{};
        mine.use_mmap = 1;
        const int code = plk::take(params, mine, "plk_model_params");
        if (code != PLK_OK) {
            return code;
        }
        // Check here: llama.cpp reports a missing or invalid file only in its log or on stderr.
        FILE *file = fopen(path, "rb");
        if (file == nullptr) {
            return plk::refuse(PLK_EMODEL, "cannot open %s: %s", path, strerror(errno));
        }
        char magic[4] = {};
        const size_t bytes = fread(magic, 1, sizeof(magic), file);
        fclose(file); // nothing before can throw
        if (bytes != sizeof(magic) || memcmp(magic, "GGUF", sizeof(magic)) != 0) {
            return plk::refuse(PLK_EMODEL, "%s is no GGUF file", path);
        }
        plk::start();
        auto handle = std::make_unique<plk_model>();
        plk::forget_logged();
        try {
            handle->model = plk::load::open(path, mine);
        } catch (const std::exception &error) {
            return plk::refuse(PLK_EMODEL, "%s: %s", path, error.what());
        }
        if (handle->model == nullptr) {
            return plk::refuse(PLK_EMODEL, "llama.cpp cannot load %s: %s", path, plk::logged());
        }
        handle->offloaded = mine.n_gpu_layers != 0;
        handle->info.size = sizeof(plk_model_info);
        plk::load::describe(handle->model, handle->info);
        *out = handle.release();
        return PLK_OK;
    });
}

void plk_model_free(plk_model *model) {
    plk::guarded([&] {
        plk::release(model);
        return PLK_OK;
    });
}

int plk_model_read(const plk_model *model, plk_model_info *out) {
    if (model == nullptr) {
        return plk::refuse(PLK_EINVAL, "the model is NULL");
    }
    return plk::give(model->info, out, "plk_model_info");
}

int32_t plk_model_meta(const plk_model *model, const char *key, char *text, int32_t room) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || key == nullptr || room < 0 || (text == nullptr && room > 0)) {
            return plk::refuse(PLK_EINVAL, "model or key is NULL, or room is negative");
        }
        char none[1];
        return llama_model_meta_val_str(model->model, key, text ? text : none, text ? room : 1);
    });
}

int32_t plk_tokenize(const plk_model *model, const char *text, int32_t length, int32_t *tokens,
                     int32_t room, int32_t add_special, int32_t parse_special) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || text == nullptr || length < 0 || room < 0 ||
            (tokens == nullptr && room > 0)) {
            return plk::refuse(PLK_EINVAL, "model or text is NULL, or a length is negative");
        }
        if (!model->info.has_vocab) {
            return plk::refuse(PLK_EUNSUPPORTED, "the model has no vocabulary: pass token ids");
        }
        const int32_t count = with_stack(static_cast<size_t>(length), [&] {
            return plk::load::tokenize(model->model, text, length, tokens, room, add_special != 0,
                                       parse_special != 0);
        });
        // INT32_MIN means that the count overflows; other negative values are the required room.
        return count == INT_MIN ? plk::refuse(PLK_EINVAL, "the text has too many tokens") : count;
    });
}

int32_t plk_token_piece(const plk_model *model, int32_t token, char *piece, int32_t room,
                        int32_t special) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || room < 0 || (piece == nullptr && room > 0)) {
            return plk::refuse(PLK_EINVAL, "the model is NULL, or room is negative");
        }
        if (token < 0 || token >= model->info.n_vocab) {
            return plk::refuse(PLK_EINVAL, "token %d is outside [0, %d)", token,
                               model->info.n_vocab);
        }
        if (!model->info.has_vocab) {
            return plk::refuse(PLK_EUNSUPPORTED, "the model has no vocabulary");
        }
        return plk::load::piece(model->model, token, piece, room, special != 0);
    });
}

int32_t plk_token_is_eog(const plk_model *model, int32_t token) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || token < 0 || token >= model->info.n_vocab) {
            return plk::refuse(PLK_EINVAL, "the model is NULL or token %d is out of range", token);
        }
        return model->info.has_vocab && plk::load::is_eog(model->model, token) ? 1 : 0;
    });
}

} // extern "C"
