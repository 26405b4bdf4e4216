// Say which line of a test does not hold, and end it.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            std::printf("line %d: %s\n", __LINE__, #condition);             \
            std::exit(1);                                                   \
        }                                                                   \
    } while (0)
