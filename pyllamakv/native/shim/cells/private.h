// Access to private members of llama.cpp's classes: an explicit template instantiation may name
// them. A renamed member is a compile error, after which the probe tries the next section.
#pragma once

namespace plk {
template <typename Tag, auto Member> struct Reach {
    friend auto plk_member(Tag) { return Member; }
};
} // namespace plk

// Use inside namespace plk; afterwards `object.*plk_member(tag{})` is the member.
#define PLK_PRIVATE(tag, member)                                                                   \
    struct tag {                                                                                   \
        friend auto plk_member(tag);                                                               \
    };                                                                                             \
    template struct Reach<tag, &member>
