// Unit tests of llama-kv-settings.h: values of variables, precedence and log messages.

#include "check.h"

#include "llama-kv-settings.h"

#include <cstring>
#include <functional>
#include <locale>
#include <map>
#include <string>

#include <stdlib.h>

using namespace llama_kv_settings;
using namespace llama_kv_defrag;

static const char * const NAMES[] = {
    "LLAMA_KV_DEFRAG_THOLD", "LLAMA_KV_DEFRAG_MIN_CELLS", "LLAMA_KV_DEFRAG_PLAN", "LLAMA_KV_DEFRAG_MOVER", "LLAMA_KV_DEFRAG_THREADS",
};

// returns the settings with one variable set and all others unset
static settings with(const char * name, const char * value) {
    for (const char * each : NAMES) {
        unsetenv(each);
    }
    if (value) {
        setenv(name, value, 1);
    }
    logged().clear();
    return read();
}

static bool is_default(const settings & s) {
    return s.thold == -1.0f && s.min_cells == 2048 && s.defrag.order == ORDER_FEWEST && s.defrag.mover == MOVER_AUTO && s.defrag.n_threads == 0;
}

// an invalid value is ignored, and one log line contains the variable, the value and the expected values
static void check_refused(const char * name, const char * value, const char * expected) {
    CHECK(is_default(with(name, value)));
    const std::string line = std::string(name) + " is '" + value + "', which is ignored; expected " + expected + "\n";
    CHECK(logged() == line);
}

static void numbers() {
    for (const char * each : NAMES) {
        CHECK(is_default(with(each, nullptr)) && logged().empty());
        CHECK(is_default(with(each, "")) && logged().empty());
    }
    struct { const char * value; float want; } const tholds[] = {
        { "0", 0.0f }, { "1", 1.0f }, { "0.25", 0.25f }, { ".5", 0.5f }, { "1.0", 1.0f }, { "0.", 0.0f },
    };
    for (const auto & row : tholds) {
        CHECK(with("LLAMA_KV_DEFRAG_THOLD", row.value).thold == row.want && logged().empty());
    }
    for (const char * value : { "1.01", "-0.5", "-1", "half", "0,5", "nan", "inf", "0.5 ", " 0.5", "0x1", "1e-1", ".", "0.1.2", "50%" }) {
        check_refused("LLAMA_KV_DEFRAG_THOLD", value, "a number from 0 to 1");
    }
    CHECK(with("LLAMA_KV_DEFRAG_MIN_CELLS", "1").min_cells == 1);
    CHECK(with("LLAMA_KV_DEFRAG_MIN_CELLS", "2147483647").min_cells == 2147483647u && logged().empty());
    for (const char * value : { "0", "-1", "2147483648", "99999999999999999999", "256.5", "4k", "all" }) {
        check_refused("LLAMA_KV_DEFRAG_MIN_CELLS", value, "a positive number of cells");
    }
    CHECK(with("LLAMA_KV_DEFRAG_THREADS", "512").defrag.n_threads == 512 && logged().empty());
    for (const char * value : { "0", "513", "-1", "many", "1.5" }) {
        check_refused("LLAMA_KV_DEFRAG_THREADS", value, "a number of threads from 1 to 512");
    }
    // the program's locale has no effect
    struct comma : std::numpunct<char> {
        char do_decimal_point() const override { return ','; }
    };
    const std::locale before = std::locale::global(std::locale(std::locale::classic(), new comma));
    CHECK(with("LLAMA_KV_DEFRAG_THOLD", "0.25").thold == 0.25f && logged().empty());
    std::locale::global(before);
    // a long value is truncated in the log
    const std::string text(1000, '9');
    CHECK(is_default(with("LLAMA_KV_DEFRAG_THOLD", text.c_str())) && logged().size() < 200);
}

static void words() {
    CHECK(with("LLAMA_KV_DEFRAG_PLAN", "fewest").defrag.order == ORDER_FEWEST && logged().empty());
    CHECK(with("LLAMA_KV_DEFRAG_PLAN", "ordered").defrag.order == ORDER_KEPT && logged().empty());
    const std::map<std::string, mover> movers = {
        { "auto", MOVER_AUTO }, { "host", MOVER_HOST }, { "gather", MOVER_GATHER }, { "graph", MOVER_GRAPH }, { "staged", MOVER_STAGED },
    };
    for (const auto & each : movers) {
        CHECK(with("LLAMA_KV_DEFRAG_MOVER", each.first.c_str()).defrag.mover == each.second && logged().empty());
    }
    for (const char * value : { "best", "Fewest", "ordered ", "fewest,ordered", "1" }) {
        check_refused("LLAMA_KV_DEFRAG_PLAN", value, "fewest or ordered");
        check_refused("LLAMA_KV_DEFRAG_MOVER", value, "auto, host, gather, graph or staged");
    }
}

// variables are read and logged at the first use only
static void once() {
    setenv("LLAMA_KV_DEFRAG_THOLD", "0.5", 1);
    setenv("LLAMA_KV_DEFRAG_PLAN", "best", 1);
    setenv("LLAMA_KV_DEFRAG_MIN_CELLS", "many", 1);
    CHECK(get().thold == 0.5f && get().min_cells == 2048);
    const std::string text = logged();
    CHECK(text.find("PLAN") != std::string::npos && text.find("MIN_CELLS") != std::string::npos && text.find("THOLD") == std::string::npos);
    setenv("LLAMA_KV_DEFRAG_THOLD", "0.75", 1);
    CHECK(get().thold == 0.5f && effective(options()).order == ORDER_FEWEST && logged() == text);
}

// a value of the program overrides the variable, and the variable overrides the default
static void precedence() {
    options given;
    setenv("LLAMA_KV_DEFRAG_PLAN",    "ordered", 1);
    setenv("LLAMA_KV_DEFRAG_MOVER",   "graph",   1);
    setenv("LLAMA_KV_DEFRAG_THREADS", "3",       1);
    CHECK(effective(given).order == ORDER_KEPT && effective(given).mover == MOVER_GRAPH && effective(given).n_threads == 3);
    given.order = ORDER_FEWEST;
    CHECK(effective(given).order == ORDER_FEWEST && effective(given).mover == MOVER_GRAPH && effective(given).n_threads == 3);
    given.mover = MOVER_HOST;
    CHECK(effective(given).order == ORDER_FEWEST && effective(given).mover == MOVER_HOST && effective(given).n_threads == 3);
    given.n_threads = 2;
    CHECK(effective(given).n_threads == 2 && effective(given).mover == MOVER_HOST);
    given = options();
    CHECK(effective(given).order == ORDER_KEPT && effective(given).mover == MOVER_GRAPH && effective(given).n_threads == 3);
}

int main(int argc, char ** argv) {
    const std::map<std::string, std::function<void()>> groups = {
        { "numbers", numbers }, { "once", once }, { "precedence", precedence }, { "words", words },
    };
    if (argc < 2) {
        for (const auto & group : groups) {
            std::printf("%s\n", group.first.c_str());
        }
        return 0;
    }
    const auto found = groups.find(argv[1]);
    CHECK(found != groups.end());
    found->second();
    return 0;
}
