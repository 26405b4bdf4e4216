// CHECK: if a condition is false, print its line and text, and exit with code 1.
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
