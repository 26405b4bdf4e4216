// How a program of tests is run: without arguments it lists its groups, else it runs the one that is
// named, in a folder that it leaves empty. Exit code 0 if the group holds, else a line that says
// what does not.
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
