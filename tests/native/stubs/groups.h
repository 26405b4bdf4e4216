// Entry point of a test program. Without arguments it lists its groups of tests. Usage: PROGRAM GROUP FOLDER, with an
// empty folder, which is empty again afterwards. Returns 0 if the group passes; a failed CHECK exits with 1.
#pragma once

#include "check.h"

#include <functional>
#include <map>
#include <string>

inline std::string & folder() {
    static std::string path;
    return path;
}

inline int run_group(int argc, char ** argv, const std::map<std::string, std::function<void()>> & groups) {
    if (argc < 3) {
        for (const auto & group : groups) {
            std::printf("%s\n", group.first.c_str());
        }
        return 0;
    }
    folder() = argv[2];
    const auto found = groups.find(argv[1]);
    CHECK(found != groups.end());
    found->second();
    return 0;
}
