// Turn failed assertions of llama.cpp into exceptions. llama.cpp ends the process with ggml_abort()
// and abort(); the linker redirects its calls to the functions below (`--wrap`).
//
// The checks of arguments avoid the assertions that are known. This file is for the others: a
// release asserts in places that no header shows. An exception passes through llama.cpp's frames,
// whose destructors run; what the call has changed in its context stays, so the context is unusable
// afterwards.
#include "core.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

thread_local int calls = 0;     // nested plk::guarded() of this thread
thread_local int computing = 0; // nested computations of graphs
thread_local const plk_context *serving = nullptr;
thread_local char text[512] = ""; // of the assertion that failed in this call; "" if none did

bool traps() { return calls > 0 && computing == 0; }

// Return whether a source file belongs to a device or a connection. Its assertions say that these
// are gone, for all contexts: the process ends, and the one that owns it raises DeviceLost.
bool of_device(const char *file) {
    for (const char *name : {"ggml-rpc", "ggml-cuda", "ggml-metal", "ggml-vulkan"}) {
        if (strstr(file, name) != nullptr) {
            return true;
        }
    }
    return false;
}

// A count that an exception restores.
struct Counted {
    int &count;
    explicit Counted(int &which) : count(which) { ++count; }
    ~Counted() { --count; }
};

} // namespace

const char *plk::AssertionFailed::what() const noexcept { return text; }

plk::AssertionTrap::AssertionTrap() {
    if (calls++ == 0) {
        serving = nullptr;
        text[0] = 0;
    }
}

plk::AssertionTrap::~AssertionTrap() { --calls; }

void plk::serve(const plk_context *context) { serving = context; }

int32_t plk::call_out(int32_t (*function)(void)) {
    // This thread is in a call and computes. Calls in `function` begin anew, and leave no trace.
    const int outer_calls = calls, outer_computing = computing;
    const plk_context *outer = serving;
    const std::string outer_error = logged();
    calls = computing = 0;
    const int32_t code = function();
    calls = outer_calls;
    computing = outer_computing;
    serving = outer;
    text[0] = 0;
    remember_logged(outer_error.c_str());
    return code;
}

int plk::settle(int code) {
    if (text[0] == 0) {
        return code;
    }
    if (serving == nullptr) {
        return refuse(code < 0 ? code : PLK_EEXCEPTION, "an assertion of llama.cpp failed: %s", text);
    }
    const_cast<plk_context *>(serving)->assertion = text;
    return refuse(PLK_EEXCEPTION,
                  "an assertion of llama.cpp failed: %s; free the context and create another one",
                  text);
}

extern "C" {

// The functions that the linker redirects. A release without one of them has no reference to it.
[[noreturn]] void __real_abort(void);
[[noreturn]] __attribute__((weak)) void __real_ggml_abort(const char *, int, const char *, ...);

[[noreturn]] void __wrap_abort(void) {
    if (traps()) {
        if (text[0] == 0) {
            snprintf(text, sizeof(text), "the message was written to stderr");
        }
        throw plk::AssertionFailed();
    }
    __real_abort();
}

[[noreturn]] void __wrap_ggml_abort(const char *file, int line, const char *format, ...) {
    char words[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof(words), format, arguments);
    va_end(arguments);
    if (traps() && !of_device(file)) {
        const char *name = strrchr(file, '/');
        snprintf(text, sizeof(text), "%s:%d: %s", name != nullptr ? name + 1 : file, line, words);
        throw plk::AssertionFailed();
    }
    const Counted count(computing); // __wrap_abort must not throw
    __real_ggml_abort(file, line, "%s", words);
}

// Define the redirected form of a function that computes a graph.
#define PLK_COMPUTES(name)                                                                         \
    __attribute__((weak)) enum ggml_status __real_##name(void *, void *);                          \
    enum ggml_status __wrap_##name(void *where, void *graph) {                                     \
        const Counted count(computing);                                                            \
        return __real_##name(where, graph);                                                        \
    }
PLK_COMPUTES(ggml_backend_graph_compute)
PLK_COMPUTES(ggml_backend_graph_compute_async)
PLK_COMPUTES(ggml_backend_sched_graph_compute)
PLK_COMPUTES(ggml_backend_sched_graph_compute_async)
#undef PLK_COMPUTES

} // extern "C"
