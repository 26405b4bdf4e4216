// Print whether the library advertises options for moving cells, in a tree that has them: with the
// variable READABLE, it can read the cells. The alternatives of the library are replaced.
#include "about.cpp"

#include <cstdlib>

namespace plk {
const uint64_t cells::bits = getenv("READABLE") != nullptr ? PLK_CAP_CELLS : 0;
const uint64_t moving::bits = PLK_CAP_DEFRAG_OPTIONS;
const uint64_t context::bits = 0, defrag::bits = 0, rollback::bits = 0, counters::bits = 0,
               mapping::bits = 0, sampler::bits = 0, grammar::bits = 0, adapters::bits = 0,
               pooling::bits = 0;
const char *const built::variant = "";
const char *const built::probes = "";

void start() {}
int settle(int code) { return code; }
AssertionTrap::AssertionTrap() {}
AssertionTrap::~AssertionTrap() {}
const char *AssertionFailed::what() const noexcept { return ""; }
} // namespace plk

int main() { printf("%d\n", (plk_capabilities() & PLK_CAP_DEFRAG_OPTIONS) != 0); }
