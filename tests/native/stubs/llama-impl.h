// Stub of llama-impl.h: stores log messages.
#pragma once

#include <cstdio>
#include <string>

inline std::string & logged() {
    static std::string text;
    return text;
}

#define LLAMA_LOG_ERROR(...)                                                \
    do {                                                                    \
        char line[512];                                                     \
        std::snprintf(line, sizeof(line), __VA_ARGS__);                     \
        logged() += line;                                                   \
    } while (0)

#define LLAMA_LOG_DEBUG LLAMA_LOG_ERROR
#define LLAMA_LOG_INFO  LLAMA_LOG_ERROR
#define LLAMA_LOG_WARN  LLAMA_LOG_ERROR
