// Check the kv_* parameters of a context, and apply them while the context is created.
#pragma once

#include "groups.h"

namespace plk {

inline int check_backing(const plk_model &model, const plk_context_params &asked) {
    if (asked.kv_backing < PLK_BACKING_HEAP || asked.kv_backing > PLK_BACKING_FILE ||
        asked.kv_keep < 0 || asked.kv_keep > 2 ||
        (asked.kv_backing >= PLK_BACKING_TEMPORARY) != (asked.kv_path != nullptr) ||
        (asked.kv_keep && asked.kv_backing != PLK_BACKING_FILE)) {
        return plk::refuse(PLK_EINVAL,
                           "kv_backing is %d (0 to 3; 2 and 3 with kv_path), kv_keep %d (0 to 2; "
                           "1 and 2 with kv_backing 3)",
                           asked.kv_backing, asked.kv_keep);
    }
    if (!plk::mapping::bits && asked.kv_backing) {
        return plk::refuse(PLK_EUNSUPPORTED, "this build keeps its cache on the heap only");
    }
    if (asked.kv_keep && plk::load::many_positions(model.model)) {
        return plk::refuse(PLK_EUNSUPPORTED,
                           "tokens of this model have several positions each: its cache cannot be "
                           "kept");
    }
    return PLK_OK;
}

// While an object exists, this thread creates caches in the memory that the context requests;
// otherwise it creates them on the heap.
struct Backed {
    explicit Backed(const plk_context_params &asked) { plk::mapping::choose(&asked); }
    ~Backed() { plk::mapping::choose(nullptr); }
    // Return the PLK_E code for a context that could not be created.
    int code() const {
        const int why = plk::mapping::failure();
        return why ? why : PLK_ECONTEXT;
    }
    Backed(const Backed &) = delete;
    Backed &operator=(const Backed &) = delete;
};

} // namespace plk
