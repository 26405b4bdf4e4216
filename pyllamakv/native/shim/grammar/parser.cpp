// Grammars with llama.cpp's parser (0.3.0 and later). llama.cpp writes the error of a text that does
// not parse to stderr only; here its parser runs rule by rule first, for an error with its place.
#include "groups.h"
#include "words.h"

#include "llama-grammar.h"

#include <memory>
#include <string>

namespace {

// Limits for texts. Parser and matcher recurse per nested group, rule and optional element, and
// copy repeated elements: beyond these, releases run out of stack or memory.
constexpr size_t max_text = 256 * 1024;
constexpr int max_depth = 256;
constexpr int max_rules = 10000;
constexpr int max_repetitions = 256; // in a rule; the time to match a run of optional ones is cubic
constexpr int64_t max_times = 2000; // the limit of 0.3.36 for {m,n}
constexpr int64_t max_elements = 1000000;

int refuse_at(const std::string &text, size_t at, const std::string &what) {
    const size_t start = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
    const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    const size_t column = start == std::string::npos ? at : at - start - 1;
    return plk::refuse(PLK_EGRAMMAR, "line %zu, column %zu: %.400s",
                       static_cast<size_t>(line) + 1, column + 1, what.c_str());
}

// Return the index after a literal or a class of characters that starts at `at`.
size_t skip(const std::string &text, size_t at) {
    const char end = text[at] == '[' ? ']' : '"';
    for (++at; at < text.size() && text[at] != end && text[at] != '\n'; ++at) {
        at += text[at] == '\\';
    }
    return std::min(at + 1, text.size());
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
    int64_t last = 1; // elements of the last symbol, at most
    for (size_t at = 0; at < text.size();) {
        const size_t from = at;
        const char c = text[at++];
        if (c == '#') {
            at = std::min(text.find('\n', at), text.size());
        } else if (c == '"' || c == '[') {
            at = skip(text, from);
            last = static_cast<int64_t>(at - from);
        } else if (c == '(') {
            if (++depth > max_depth) {
                return refuse_at(text, from, "too many nested groups");
            }
        } else if (c == ')') {
            --depth;
            last = 1;
        } else if (c == '=') {
            repetitions = 0;
            if (++rules > max_rules) {
                return refuse_at(text, from, "too many rules");
            }
        } else if (c == '*' || c == '+' || c == '?' || c == '{') {
            int64_t times = 1;
            for (; c == '{' && at < text.size() && text[at] != '}'; ++at) {
                int64_t number = 0;
                for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
                    number = std::min(number * 10 + (text[at] - '0'), max_times + 1);
                }
                times = std::max(times, number);
                if (at == text.size() || text[at] == '}') {
                    break;
                }
            }
            elements += times * last;
            if (times > max_times || ++repetitions > max_repetitions || elements > max_elements) {
                return refuse_at(text, from, "too many repetitions");
            }
        } else if (c != ' ' && c != '\t' && c != '\n' && c != '\r') {
            last = 1;
        }
    }
    return PLK_OK;
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
