// Reach a member that upstream keeps private, without changing upstream: an explicit instantiation
// may name it. A renamed member is a compile error, so the probe moves on to the next candidate.
#pragma once

namespace plk {
template <typename Tag, auto Member> struct Reach {
    friend auto plk_member(Tag) { return Member; }
};
} // namespace plk

// Inside namespace plk: afterwards `object.*plk_member(tag{})` is the member.
#define PLK_PRIVATE(tag, member)                                                                   \
    struct tag {                                                                                   \
        friend auto plk_member(tag);                                                               \
    };                                                                                             \
    template struct Reach<tag, &member>
