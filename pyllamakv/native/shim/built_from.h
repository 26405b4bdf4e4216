// Find the release in the id of a variant, without llama.cpp.
#pragma once

#include <string>

namespace plk::mapping {

// Return the release that a variant is built from. Another release may interpret the content of a
// kept cache differently. Trees from git or a path have no release: their whole id is returned.
inline std::string built_from(const std::string &variant) {
    if (variant.compare(0, 4, "git-") == 0 || variant.compare(0, 5, "path-") == 0) {
        return variant;
    }
    // RELEASE-KIND-BACKEND-DIGEST, where RELEASE may have hyphens as well.
    size_t end = variant.size();
    for (int i = 0; i < 3 && end != 0 && end != std::string::npos; ++i) {
        end = variant.rfind('-', end - 1);
    }
    return variant.substr(0, end);
}

} // namespace plk::mapping
