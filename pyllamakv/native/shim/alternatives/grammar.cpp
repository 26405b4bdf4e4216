// Parsing grammars.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_parser
// Grammars with llama.cpp's parser (0.3.0 and later). llama.cpp writes the error of a text that does
// not parse to stderr only; here its parser runs rule by rule first, for an error with its place.
#include "words.h"

#include "llama-grammar.h"

#include <array>
#include <bitset>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>

namespace {

// Limits for texts. Parser and matcher recurse per nested group, rule and optional element, and
// copy repeated elements: beyond these, releases run out of stack, memory or time.
constexpr size_t max_text = 256 * 1024;
constexpr int max_depth = 256;
constexpr int max_rules = 10000;
constexpr int max_repetitions = 256; // in a rule
constexpr int64_t max_times = 2000; // the limit of 0.3.36 for {m,n}, and for a{m}{n} together
constexpr int64_t max_elements = 1000000;
constexpr size_t max_token = 1024; // bytes of <token>, which the parser tokenizes on the caller's stack
constexpr double max_paths = 20000; // of rules to the next character, each with its own stack
constexpr double max_pairs = 10000; // of such paths, where one can follow the other: the time is cubic
// Nested repetitions that may continue after a character with the same character. Each doubles the
// stacks, which llama.cpp compares with each other, and all are ways for each character of a token.
constexpr int max_loops = 4;
constexpr int64_t max_search = 10000000; // steps of the search for such repetitions

int refuse_at(const std::string &text, size_t at, const std::string &what) {
    const size_t start = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
    const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    const size_t column = start == std::string::npos ? at : at - start - 1;
    return plk::refuse(PLK_EGRAMMAR, "line %zu, column %zu: %.400s",
                       static_cast<size_t>(line) + 1, column + 1, what.c_str());
}

// Return the index after a literal, a class of characters or a token that starts at `at`.
size_t skip(const std::string &text, size_t at) {
    const char end = text[at] == '[' ? ']' : text[at] == '<' ? '>' : '"';
    for (++at; at < text.size() && text[at] != end; ++at) {
        at += text[at] == '\\' && end != '>';
    }
    return std::min(at + 1, text.size());
}

size_t skip_blanks(const std::string &text, size_t at) {
    while (at < text.size() && strchr(" \t\r\n#", text[at]) != nullptr) {
        at = text[at] == '#' ? std::min(text.find_first_of("\r\n", at), text.size()) : at + 1;
    }
    return at;
}

// The range of a repetition; `most` is -1 without a maximum, and `least` -1 if it does not parse.
struct Times {
    int64_t least = -1;
    int64_t most = -1;
};

// Return the range of a repetition that starts before `at`, and move `at` after it.
Times take_times(const std::string &text, size_t &at) {
    const char kind = text[at - 1];
    if (kind != '{') {
        return {kind == '+' ? 1 : 0, kind == '?' ? 1 : -1};
    }
    const auto take_number = [&] {
        int64_t number = -1;
        at = skip_blanks(text, at);
        for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
            number = std::min(std::max<int64_t>(number, 0) * 10 + (text[at] - '0'), max_times + 1);
        }
        at = skip_blanks(text, at);
        return number;
    };
    Times times;
    times.least = times.most = take_number();
    if (at < text.size() && text[at] == ',') {
        ++at;
        times.most = take_number();
    }
    if (at == text.size() || text[at] != '}') {
        return {};
    }
    ++at;
    return times;
}

int check_limits(const std::string &text) {
    if (text.size() > max_text) {
        return plk::refuse(PLK_EGRAMMAR, "the grammar has %zu bytes, expected at most %zu",
                           text.size(), max_text);
    }
    int depth = 0;
    int rules = 0;
    int repetitions = 0;
    int64_t elements = 0;
    int64_t last = 1;   // elements of the last symbol, at most
    int64_t copies = 1; // of the rules of the last symbol, by the repetitions that follow it
    // Rules as the parser counts them: names, groups and the optional parts of repetitions.
    std::unordered_set<std::string> names;
    int64_t parts = 0;
    const auto count = [&] { return static_cast<int64_t>(names.size()) + parts; };
    std::vector<int64_t> before; // the counts before the groups that are open
    for (size_t at = 0; at < text.size();) {
        const size_t from = at;
        const char c = text[at++];
        if (c == '#') {
            at = std::min(text.find_first_of("\r\n", at), text.size());
        } else if (c == '"' || c == '[' || c == '<') {
            at = skip(text, from);
            if (c == '<' && at - from > max_token) {
                return refuse_at(text, from, "a token of more than 1024 bytes");
            }
            last = static_cast<int64_t>(at - from);
            copies = 1;
        } else if (c == '(') {
            if (++depth > max_depth) {
                return refuse_at(text, from, "too many nested groups");
            }
            before.push_back(count());
            ++parts;
        } else if (c == ')') {
            --depth;
            last = copies = 1;
            if (!before.empty()) {
                copies = std::max<int64_t>(1, count() - before.back());
                before.pop_back();
            }
        } else if (c == '=') {
            repetitions = 0;
            if (++rules > max_rules) {
                return refuse_at(text, from, "too many rules");
            }
        } else if (c == '*' || c == '+' || c == '?' || c == '{') {
            const Times times = take_times(text, at);
            if (times.least < 0) {
                return refuse_at(text, from, "expected {m}, {m,} or {m,n}");
            }
            if (times.most >= 0 && times.most < times.least) {
                return refuse_at(text, from, "the minimum of " + text.substr(from, at - from) +
                                 " is larger than the maximum");
            }
            const int64_t most = std::max<int64_t>({times.least, times.most, 1});
            copies *= most;
            elements += most * (last + 2);
            if (copies > max_times || ++repetitions > max_repetitions || elements > max_elements) {
                return refuse_at(text, from, "too many repetitions");
            }
            parts += times.most < 0 ? 1 : times.most - times.least;
            last = times.least * last + 1; // another repetition copies all of them
        } else if (isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_') {
            while (at < text.size() && (isalnum(static_cast<unsigned char>(text[at])) ||
                                        text[at] == '-' || text[at] == '_')) {
                ++at;
            }
            names.insert(text.substr(from, at - from));
            last = copies = 1;
        } else if (strchr(" \t\r\n", c) == nullptr) {
            last = copies = 1;
        }
    }
    return PLK_OK;
}

// A set of characters: ASCII, and one bit for all others.
using Characters = std::bitset<129>;

// What the matcher does at a rule, before it reaches characters. llama.cpp follows each way through
// empty parts, also where several ways are equal.
struct Ways {
    double paths = 0; // from the start of the rule
    double empty = 0; // that match nothing
    double pairs = 0; // of paths, one of which is in an optional part before the other
    bool done = false;
    Characters first; // of a path
};

// Put an element with its ways before the rest of an alternative.
void prepend(const Ways &element, Ways &rest) {
    rest.pairs = element.pairs +
        (element.empty > 0 ? element.paths * rest.paths + element.empty * rest.pairs : 0);
    rest.paths = element.paths + element.empty * rest.paths;
    rest.empty *= element.empty;
    rest.first = element.empty > 0 ? element.first | rest.first : element.first;
}

bool ends(const llama_grammar_element &element) {
    return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
}

// Return the ways of a character, class or token that starts at `at`. An element within a class has no
// start, and the start replaces what it adds.
Ways take_character(const llama_grammar_rule &rule, size_t at) {
    Ways ways = {1, 0, 0, true, {}};
    if (rule[at].type != LLAMA_GRETYPE_CHAR) {
        ways.first.set();
        return ways;
    }
    for (;; ++at) {
        const uint32_t low = std::min<uint32_t>(rule[at].value, 128);
        uint32_t high = low;
        if (rule[at + 1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER) {
            high = std::min<uint32_t>(rule[++at].value, 128);
        }
        for (uint32_t value = low; value <= high; ++value) {
            ways.first.set(value);
        }
        if (rule[at + 1].type != LLAMA_GRETYPE_CHAR_ALT) {
            return ways;
        }
    }
}

// Add the ways through the alternatives of a rule. Those of a rule after a character do not count.
void add_alternatives(const llama_grammar_rule &rule, const std::vector<Ways> &ways, Ways &sum) {
    Ways rest;
    for (size_t at = rule.size(); at-- > 0;) {
        if (ends(rule[at])) {
            rest = {0, 1, 0, true, {}};
        } else {
            const bool refers = rule[at].type == LLAMA_GRETYPE_RULE_REF;
            prepend(refers ? ways[rule[at].value] : take_character(rule, at), rest);
        }
        if (at == 0 || rule[at - 1].type == LLAMA_GRETYPE_ALT) {
            sum.paths += rest.paths + rest.empty;
            sum.empty += rest.empty;
            sum.pairs += rest.pairs;
            sum.first |= rest.first;
        }
    }
    sum.done = true;
}

// Compute the ways of all rules, each after those that it can start with. Returns a rule that can
// start with itself, whose matching would never end, or -1.
int64_t count_ways(const llama_grammar_rules &rules, std::vector<Ways> &ways) {
    struct Frame {
        size_t id;
        size_t at;    // the next element
        bool reached; // without a character before it
    };
    std::vector<char> active(rules.size());
    std::vector<Frame> stack; // not recursive: a chain may have all rules
    for (size_t first = 0; first < rules.size(); ++first) {
        if (!ways[first].done) {
            stack.push_back({first, 0, true});
            active[first] = 1;
        }
        while (!stack.empty()) {
            Frame &frame = stack.back();
            const llama_grammar_rule &rule = rules[frame.id];
            const llama_grammar_element &element = rule[frame.at];
            if (element.type == LLAMA_GRETYPE_END) {
                add_alternatives(rule, ways, ways[frame.id]);
                active[frame.id] = 0;
                stack.pop_back();
                continue;
            }
            if (element.type == LLAMA_GRETYPE_ALT) {
                frame.reached = true;
            } else if (element.type != LLAMA_GRETYPE_RULE_REF) {
                frame.reached = false;
            } else if (frame.reached) {
                const size_t next = element.value;
                if (active[next]) {
                    return static_cast<int64_t>(next);
                }
                if (!ways[next].done) {
                    active[next] = 1;
                    stack.push_back({next, 0, true});
                    continue; // and come back to this element
                }
                frame.reached = ways[next].empty > 0;
            }
            ++frame.at;
        }
    }
    return -1;
}

// The rules that `child` continues to, in the rules around it.
struct Around {
    Characters repeats;  // that start a rest which may start with the rule again
    bool leaves = false; // a rest may be empty
};

// Return whether a sequence can start with a rule, without a character before it.
bool starts_with(const llama_grammar_rules &rules, const std::vector<Ways> &ways, size_t id, size_t at,
                 size_t wanted, std::vector<size_t> &seen, size_t search, int64_t &steps) {
    std::vector<std::pair<size_t, size_t>> left{{id, at}};
    while (!left.empty()) {
        const auto [from, first] = left.back();
        left.pop_back();
        const llama_grammar_rule &rule = rules[from];
        for (size_t next = first; next < rule.size() && ++steps <= max_search; ++next) {
            if (!ends(rule[next])) {
                if (rule[next].type == LLAMA_GRETYPE_RULE_REF) {
                    const size_t inner = rule[next].value;
                    if (inner == wanted) {
                        return true;
                    }
                    if (seen[inner] != search) {
                        seen[inner] = search;
                        left.emplace_back(inner, 0);
                    }
                    if (ways[inner].empty > 0) {
                        continue;
                    }
                }
                while (next < rule.size() && !ends(rule[next])) {
                    ++next;
                }
            }
            if (first > 0 || next >= rule.size()) {
                break; // the rest of one alternative, or all of them
            }
        }
    }
    return false;
}

// Return whether the ways after any element are too many. An element is followed by the rest of its
// rule, then by the rests of the rules around it; how often a rule is around itself is unknown, so it
// counts once.
bool too_many_ways(const llama_grammar_rules &rules, const std::vector<Ways> &ways, size_t root) {
    std::vector<size_t> order; // each rule after those that it refers to, without cycles
    std::vector<char> known(rules.size());
    std::vector<std::pair<size_t, size_t>> stack{{root, 0}};
    known[root] = 1;
    while (!stack.empty()) {
        auto &[id, at] = stack.back();
        if (at == rules[id].size()) {
            order.push_back(id);
            stack.pop_back();
            continue;
        }
        const llama_grammar_element &element = rules[id][at++];
        if (element.type == LLAMA_GRETYPE_RULE_REF && !known[element.value]) {
            known[element.value] = 1;
            stack.emplace_back(element.value, 0);
        }
    }
    const auto exceeds = [](const Ways &sum) {
        return sum.paths > max_paths || sum.empty > max_paths || sum.pairs > max_pairs;
    };
    std::vector<Ways> follow(rules.size()); // of what follows a rule; at most, of all its places
    // By characters: the repetitions around a rule that may follow it with this character.
    std::map<size_t, std::array<uint8_t, Characters().size()>> loops;
    follow[root] = {0, 1, 0, true, {}};
    std::vector<char> passed(rules.size());
    std::vector<size_t> seen(rules.size());
    size_t search = 0;
    int64_t steps = 0;
    for (auto id = order.rbegin(); id != order.rend(); ++id) {
        const llama_grammar_rule &rule = rules[*id];
        passed[*id] = 1;
        std::map<size_t, Around> around; // by the rules that this one refers to
        Ways rest;                       // of the alternative, after `at`
        for (size_t at = rule.size(); at-- > 0;) {
            if (ends(rule[at])) {
                rest = {0, 1, 0, true, {}};
                continue;
            }
            const bool refers = rule[at].type == LLAMA_GRETYPE_RULE_REF;
            Ways after = follow[*id];
            prepend(rest, after);
            if (exceeds(after)) {
                return true;
            }
            if (refers && !passed[rule[at].value]) {
                const size_t inner = rule[at].value;
                Ways &most = follow[inner];
                most.paths = std::max(most.paths, after.paths);
                most.empty = std::max(most.empty, after.empty);
                most.pairs = std::max(most.pairs, after.pairs);
                Around &places = around[inner];
                places.leaves = places.leaves || rest.empty > 0;
                if (starts_with(rules, ways, *id, at + 1, inner, seen, ++search, steps)) {
                    places.repeats |= rest.first;
                }
                if (steps > max_search) {
                    return true;
                }
            }
            prepend(refers ? ways[rule[at].value] : take_character(rule, at), rest);
        }
        const auto outer = loops.find(*id);
        for (const auto &[inner, places] : around) {
            const bool leaves = places.leaves && outer != loops.end();
            if (!leaves && places.repeats.none()) {
                continue;
            }
            auto &most = loops[inner];
            for (size_t at = 0; at < most.size(); ++at) {
                const int sum = (places.repeats[at] ? 1 : 0) + (leaves ? outer->second[at] : 0);
                if (sum > max_loops) {
                    return true;
                }
                most[at] = std::max<uint8_t>(most[at], static_cast<uint8_t>(sum));
            }
        }
    }
    return exceeds(ways[root]);
}

template <typename Parser> Parser make_parser(const llama_model *model) {
    using Words = decltype(plk::words(model));
    if constexpr (std::is_constructible_v<Parser, Words>) {
        return Parser(plk::words(model));
    } else {
        return Parser{};
    }
}

int check(const llama_model *model, const std::string &text) {
    const int code = check_limits(text);
    if (code != PLK_OK) {
        return code;
    }
    auto parser = make_parser<llama_grammar_parser>(model);
    const char *const start = text.c_str();
    const char *at = start;
    try {
        for (;;) {
            // The parser skips blanks and comments only after a rule.
            while (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n' || *at == '#') {
                at += *at == '#' ? strcspn(at, "\r\n") : 1;
            }
            if (*at == '\0') {
                break;
            }
            at = parser.parse_rule(at);
        }
    } catch (const std::exception &error) {
        // The parser appends the rest of the text to its message.
        const std::string what = error.what();
        const size_t word = what.find(" at ");
        const size_t rest = word == std::string::npos ? 0 : what.size() - word - 4;
        const bool known = word != std::string::npos && rest <= text.size() &&
            text.compare(text.size() - rest, rest, what, word + 4, rest) == 0;
        if (known) {
            return refuse_at(text, text.size() - rest, what.substr(0, word));
        }
        const bool ended = what.find("end of input") != std::string::npos;
        return refuse_at(text, ended ? text.size() : static_cast<size_t>(at - start),
                         what.substr(0, word));
    }
    for (const auto &[name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            return refuse_at(text, text.find(name), "the rule '" + name + "' is not defined");
        }
    }
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        return plk::refuse(PLK_EGRAMMAR, "the grammar has no rule 'root'");
    }
    // llama.cpp overlooks recursion after a rule that is empty by its rules, and may search for long.
    std::vector<Ways> ways(parser.rules.size());
    const int64_t endless = count_ways(parser.rules, ways);
    if (endless >= 0) {
        for (const auto &[name, id] : parser.symbol_ids) {
            if (id == static_cast<uint32_t>(endless)) {
                std::string named = name; // a group has the name of its rule, and a number
                while (text.find(named) == std::string::npos) {
                    named.resize(named.rfind('_'));
                }
                return refuse_at(text, text.find(named), "left recursion: the rule '" + named +
                                 "', or a part of it, can start with itself");
            }
        }
    }
    if (too_many_ways(parser.rules, ways, parser.symbol_ids.at("root"))) {
        return plk::refuse(PLK_EGRAMMAR, "too many ways lead to the next character: use fewer "
                           "alternatives, fewer optional parts in a row, or fewer nested "
                           "repetitions");
    }
    return PLK_OK;
}

} // namespace

namespace plk::grammar {

const uint64_t bits = PLK_CAP_GRAMMAR;

struct Grammar {
    std::unique_ptr<llama_sampler, void (*)(llama_sampler *)> sampler;
};

Grammar *open(const llama_model *model, const char *text) {
    if (check(model, text) != PLK_OK) {
        return nullptr;
    }
    forget_logged();
    Grammar grammar{{llama_sampler_init_grammar(words(model), text, "root"), llama_sampler_free}};
    if (!grammar.sampler) {
        // Some releases log the reason as an incomplete line.
        const bool silent = *logged() == '\0';
        refuse(PLK_EGRAMMAR, "%s", silent ? "a rule is left-recursive" : logged());
        return nullptr;
    }
    return new Grammar(std::move(grammar));
}

void close(Grammar *grammar) { delete grammar; }

void reset(Grammar *grammar) { llama_sampler_reset(grammar->sampler.get()); }

void apply(Grammar *grammar, std::vector<llama_token_data> &candidates) {
    llama_token_data_array all{candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(grammar->sampler.get(), &all);
}

void accept(Grammar *grammar, int32_t token) {
    llama_sampler_accept(grammar->sampler.get(), token);
}

} // namespace plk::grammar

#elif defined(PLK_USE_none)
// Releases whose grammars cannot be parsed here (through 0.2.90).

struct plk::grammar::Grammar {};
const uint64_t plk::grammar::bits = 0;

plk::grammar::Grammar *plk::grammar::open(const llama_model *, const char *) {
    refuse(PLK_EUNSUPPORTED, "this build has no grammars");
    return nullptr;
}
void plk::grammar::close(Grammar *) {}
void plk::grammar::reset(Grammar *) {}
void plk::grammar::apply(Grammar *, std::vector<llama_token_data> &) {}
void plk::grammar::accept(Grammar *, int32_t) {}

#endif
