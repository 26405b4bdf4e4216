// Store llama.cpp's log in a ring buffer until Python reads it; nothing is written to stderr.
#include "core.h"

#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>

namespace {

constexpr size_t max_records = 8192;
constexpr size_t max_bytes = 4000; // every record fits into a buffer of 4096 bytes

struct Record {
    int32_t level;
    std::string text;
};

// Never destroyed: a thread of llama.cpp may log while the process exits.
struct Ring {
    std::mutex mutex;
    std::deque<Record> records;
    int64_t lost = 0;
    std::atomic<int32_t> lowest{1};
};
Ring &ring() {
    static Ring *one = new Ring;
    return *one;
}

// An incomplete line: the next record of this thread may continue a text without a newline.
struct Line {
    int32_t level = 0;
    std::string text;
};
thread_local Line line;

// llama.cpp only logs the reason of some failures. The first error is the cause, and later errors
// report its consequences.
thread_local std::string first_error;

thread_local int32_t most_nodes = 0;

thread_local bool muted = false;

// The releases that need this number (0.3.7 through 0.3.16, in which a graph has a maximum) only log it:
// the graphs of a context are private or temporary. Without a plausible number, check_nodes assumes
// half of the maximum.
const std::string nodes_of_a_graph = "graph nodes  = ";

// Before 0.3, levels were numbered from 2 (error) to 5 (debug), and none marked a continuation.
constexpr bool continues = static_cast<int>(GGML_LOG_LEVEL_DEBUG) == 1;

int32_t level_of(int level) {
    switch (level) {
    case GGML_LOG_LEVEL_DEBUG: return 1;
    case GGML_LOG_LEVEL_WARN: return 3;
    case GGML_LOG_LEVEL_ERROR: return 4;
    default: return 2;
    }
}

void push(int32_t level, const std::string &text) {
    if (level < ring().lowest.load()) {
        return;
    }
    const std::lock_guard<std::mutex> lock(ring().mutex);
    for (size_t at = 0; at < text.size(); at += max_bytes) {
        if (ring().records.size() == max_records) {
            ring().records.pop_front();
            ring().lost += 1;
        }
        ring().records.push_back({level, text.substr(at, max_bytes)});
    }
}

void finish() {
    while (!line.text.empty() && (line.text.back() == '\n' || line.text.back() == '\r')) {
        line.text.pop_back();
    }
    if (!line.text.empty()) {
        if (line.level == 4 && first_error.empty()) {
            first_error = line.text;
        }
        const size_t nodes = line.text.find(nodes_of_a_graph);
        if (nodes != std::string::npos) {
            most_nodes = std::max(most_nodes, atoi(line.text.c_str() + nodes + nodes_of_a_graph.size()));
        }
        push(line.level, line.text);
    }
    line.text.clear();
}

void receive(ggml_log_level level, const char *text, void *) noexcept {
    if (muted) {
        return;
    }
    try {
        const bool more = continues ? static_cast<int>(level) == 5 : !line.text.empty();
        if (!more) {
            finish();
            line.level = level_of(static_cast<int>(level));
        }
        line.text += text;
        if (!line.text.empty() && line.text.back() == '\n') {
            finish();
        }
    } catch (...) {
        line.text.clear(); // out of memory: drop this record; llama.cpp cannot handle an exception
    }
}

} // namespace

const char *plk::logged() { return first_error.c_str(); }

void plk::forget_logged() {
    first_error.clear();
    most_nodes = 0;
}

void plk::remember_logged(const char *text) { first_error = text; }

int32_t plk::logged_nodes() { return most_nodes; }

plk::Muted::Muted() { muted = true; }

plk::Muted::~Muted() { muted = false; }

void plk::start() {
    static const bool once = [] {
        // After a failed assert, ggml would start a debugger on this process, which then hangs.
        setenv("GGML_NO_BACKTRACE", "1", 0);
        llama_log_set(receive, nullptr);
        llama_backend_init();
        return true;
    }();
    (void)once;
}

extern "C" {

int32_t plk_log_read(int32_t *level, char *text, int32_t room) {
    return plk::guarded([&]() -> int {
        Record record{};
        {
            const std::lock_guard<std::mutex> lock(ring().mutex);
            if (ring().records.empty()) {
                return -1;
            }
            record = std::move(ring().records.front());
            ring().records.pop_front();
        }
        if (level != nullptr) {
            *level = record.level;
        }
        const int32_t length = std::min<int32_t>(record.text.size(), std::max(room, 0));
        if (text != nullptr && length > 0) {
            memcpy(text, record.text.data(), length);
        }
        return length;
    });
}

int64_t plk_log_lost(void) {
    const std::lock_guard<std::mutex> lock(ring().mutex);
    return ring().lost;
}

void plk_log_level(int32_t lowest) { ring().lowest.store(lowest); }

} // extern "C"
