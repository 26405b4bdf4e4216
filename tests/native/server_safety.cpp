// Unit tests of server-safety.h: repetitions of a grammar, ranges and patterns of schemas, and the ends of slot files.

#include "check.h"

#include "server-safety.h"

#include <functional>
#include <map>

using namespace server_safety;

// Whether an exception has a text.
static bool throws(const std::function<void()> & run, const std::string & text = "") {
    try {
        run();
    } catch (const std::exception & e) {
        return std::string(e.what()).find(text) != std::string::npos;
    }
    return false;
}

static void grammars() {
    for (const char * text : {
            "root ::= \"a\"{2,3}", "root ::= \"a\"{3,3} \"b\"{2} \"c\"{2,} \"d\"{0,0}", "root ::= \"{2,1}\" [{2,1}] \"\\\"{2,1}\"",
            "root ::= \"a\" # {2,1}\n", "root ::= (\"a\"{2, # {2,1}\r3})", "#", "root ::= [\\]{2,1}]", "root ::= \"a\"{9,10}", "root ::= \"a\"{007,8}", "", "{", "{2,", "\"{2,1}" }) {
        check_grammar(text);
    }
    for (const char * text : {
            "root ::= \"a\"{2,1}", "root ::= [a]{ 2 , 1 }", "root ::= \"\\\\\"{2,1}", "root ::= \"a\"{10,9}",
            "root ::= (\"a\"{2,\n1})", "root ::= (\"a\"{\r\n2 # least\n, # most\r1})", "root ::= (\"a\" # a comment\r{2,1})",
            "root ::= \"a\"{99999999999999999999,1}", "# a comment\nroot ::= b{2,0}" }) {
        CHECK(throws([&]() { check_grammar(text); }, "below its minimum"));
    }
    CHECK(throws([]() { check_grammar("root ::= a\na ::= \"\\n\n\"{2,1}"); }, "line 3"));
    CHECK(path_member("a/b~c") == "/a~1b~0c");
}

// A JSON value with what check_schema() needs. Numbers, texts and truth values convert to one.
struct value {
    enum { NOTHING, BOOLEAN, NUMBER, TEXT, ARRAY, OBJECT } kind = NOTHING;
    bool truth = false;
    double number = 0;
    std::string text;
    std::vector<value> list;
    std::map<std::string, value> members;

    value() = default;
    value(bool v) : kind(BOOLEAN), truth(v) {}
    value(double v) : kind(NUMBER), number(v) {}
    value(int v) : kind(NUMBER), number(v) {}
    value(const char * v) : kind(TEXT), text(v) {}

    bool is_object()  const { return kind == OBJECT; }
    bool is_array()   const { return kind == ARRAY; }
    bool is_string()  const { return kind == TEXT; }
    bool is_number()  const { return kind == NUMBER; }
    bool is_boolean() const { return kind == BOOLEAN; }

    bool contains(const std::string & key) const { return members.count(key) > 0; }
    const value & at(const std::string & key) const { return members.at(key); }
    const value & at(size_t i) const { return list.at(i); }
    size_t size() const { return list.size(); }
    const std::map<std::string, value> & items() const { return members; }
    std::vector<value>::const_iterator begin() const { return list.begin(); }
    std::vector<value>::const_iterator end() const { return list.end(); }

    template <typename T> T get() const;
};

template <> bool        value::get<bool>()        const { return truth; }
template <> double      value::get<double>()      const { return number; }
template <> std::string value::get<std::string>() const { return text; }

static value object(const std::map<std::string, value> & members) {
    value res;
    res.kind    = value::OBJECT;
    res.members = members;
    return res;
}

static value array(const std::vector<value> & list) {
    value res;
    res.kind = value::ARRAY;
    res.list = list;
    return res;
}

static std::string grammar_of(const std::string & pattern) {
    if (pattern == "bad") {
        throw std::runtime_error("no grammar");
    }
    return "root ::= " + pattern;
}

static void schemas() {
    const value text = object({ { "type", "string" }, { "minLength", 2 }, { "maxLength", 1 } });
    const value pattern = object({ { "pattern", "bad" } });
    const value odd = object({ { "type", array({ "integer", "null" }) }, { "exclusiveMinimum", 3 }, { "exclusiveMaximum", 4 } });
    const auto reference = [](const char * to) { return object({ { "$ref", to } }); };

    for (const auto & [schema, message] : std::vector<std::pair<value, std::string>> {
            { text, "#: minLength is above maxLength" }, { pattern, "#/pattern: no grammar" }, { odd, "#: no integer" },
            { object({ { "type", "string" }, { "pattern", "[a]{2,1}" } }), "#/pattern: grammar, line 1" },
            { object({ { "type", array({ "null", "array" }) }, { "minItems", 3 }, { "maxItems", 2 } }), "#: minItems" },
            { object({ { "type", "number" }, { "minimum", 3 }, { "maximum", 2.5 } }), "#: minimum" },
            { object({ { "properties", object({ { "a/b", text } }) } }), "#/properties/a~1b: minLength" },
            { object({ { "type", "object" }, { "additionalProperties", pattern } }), "#/additionalProperties/pattern" },
            { object({ { "items", array({ object({}), text }) } }), "#/items/1: minLength" },
            { object({ { "allOf", array({ text }) } }), "#/allOf/0: minLength" },
            { object({ { "oneOf", array({ true, odd }) } }), "#/oneOf/1: no integer" },
            { object({ { "anyOf", array({ reference("#/x/1/y") }) }, { "x", array({ 1, object({ { "y", text } }) }) } }), "#/x/1/y: minLength" },
            { object({ { "items", reference("#/$defs/a") }, { "$defs", object({ { "a", object({ { "items", reference("#/$defs/b") } }) },
                { "b", object({ { "anyOf", array({ reference("#/$defs/a"), pattern }) } }) } }) } }), "#/$defs/b/anyOf/1/pattern" } }) {
        CHECK(throws([&]() { check_schema(schema, grammar_of); }, message));
    }
    for (const value & schema : {
            value(true), object({}), object({ { "$defs", object({ { "a", pattern } }) } }), object({ { "type", "number" }, { "pattern", "bad" } }),
            object({ { "anyOf", array({ object({}) }) }, { "properties", object({ { "a", pattern } }) } }),
            object({ { "const", 1 }, { "pattern", "bad" } }), object({ { "enum", array({ 1 }) }, { "minLength", 2 }, { "maxLength", 1 } }),
            object({ { "items", object({}) }, { "prefixItems", array({ text }) } }), object({ { "$ref", "#/a" }, { "pattern", "bad" } }),
            object({ { "$ref", "#/x/9" }, { "x", array({ text }) } }), reference("other#/a"), object({ { "$ref", 1 } }),
            object({ { "type", "integer" }, { "exclusiveMinimum", 3 }, { "exclusiveMaximum", 5 } }) }) {
        check_schema(schema, grammar_of);
    }
}

static std::string folder;

static std::string write(const std::string & data) {
    const std::string path = folder + "/slot";
    std::ofstream(path, std::ios::binary) << data;
    return path;
}

static std::string read(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

static void seals() {
    for (const size_t size : { (size_t) 0, (size_t) 1, (size_t) 8, (size_t) 1001, CHUNK, CHUNK + 3 }) {
        std::string data(size, 'x');
        const std::string path = write(data);
        CHECK(size < 32 || !verify_seal(path, 7));
        CHECK(write_seal(path, 7) == 32 && verify_seal(path, 7));
        CHECK(throws([&]() { verify_seal(path, 8); }, "another model"));
        const std::string whole = read(path);
        CHECK(whole.size() == size + 32 && whole.compare(0, size, data) == 0);
        for (size_t at = 0; at < whole.size(); at += size > 2000 ? 65537 : 1) {
            std::string other = whole;
            other[at] ^= 1;
            CHECK(throws([&]() { verify_seal(write(other), 7); }, "damaged"));
        }
        if (size > 0) {
            CHECK(throws([&]() { verify_seal(write(whole.substr(1)), 7); }, "damaged"));
            CHECK(throws([&]() { verify_seal(write("x" + whole), 7); }, "damaged"));
        }
    }
    CHECK(throws([]() { verify_seal(write("short"), 7); }, "too short"));
    CHECK(throws([]() { verify_seal(folder + "/missing", 7); }, "opened"));
    CHECK(throws([]() { write_seal(folder + "/no/slot", 7); }));
    std::remove((folder + "/slot").c_str());
}

static void check_text(const std::string & text) {
    check_appendix((const uint8_t *) text.data(), text.size(), { 0x12345678, 1 }, 16);
}

static void appendices() {
    const auto bytes = [](auto value) { return std::string((const char *) &value, sizeof(value)); };
    std::string checkpoints = bytes((uint32_t) 0x12345678) + bytes((uint32_t) 1) + bytes((uint32_t) 2);
    for (const std::vector<uint64_t> & sizes : std::vector<std::vector<uint64_t>> { { 5, 0, 7 }, { 9, 0, 0 } }) {
        checkpoints += std::string(16, 'h');
        for (const uint64_t size : sizes) {
            checkpoints += bytes(size) + std::string(size, 's');
        }
    }
    const std::string end = seal_magic() + std::string(24, 'e');
    for (const std::string & text : { checkpoints + end, end }) {
        for (size_t size = 0; size <= text.size(); ++size) {
            const std::string cut = text.substr(0, size);
            // a file without a seal, and one without checkpoints, is not cut short
            if (size == 0 || size == text.size() || cut == checkpoints) {
                check_text(cut);
            } else {
                CHECK(throws([&]() { check_text(cut); }, "cut short"));
            }
        }
    }
    // what other versions append is not known
    for (const size_t at : { 0, 4 }) {
        std::string other = checkpoints.substr(0, 20);
        other[at] ^= 1;
        check_text(other);
    }
    std::string huge = checkpoints;
    huge.replace(28, 8, bytes(~(uint64_t) 0));
    CHECK(throws([&]() { check_text(huge); }, "cut short"));
}

static void samples() {
    std::string data(100000, 'x');
    const std::vector<std::pair<uint64_t, uint64_t>> parts = { { 0, 50000 }, { 50000, 10 }, { 50010, 49990 } };
    const uint64_t sum = sample_digest(write(data), parts);
    CHECK(sum == sample_digest(write(data), parts));
    for (const size_t at : { 0, 4095, 25000, 49999, 50000, 50009, 75000, 99999 }) {
        std::string other = data;
        other[at] = 'y';
        CHECK(sample_digest(write(other), parts) != sum);
    }
    CHECK(sample_digest(write(data + "x"), parts) != sum);
    CHECK(throws([&]() { sample_digest(write(data.substr(1)), parts); }, "cannot be read"));
    std::remove((folder + "/slot").c_str());
}

int main(int argc, char ** argv) {
    const std::map<std::string, std::function<void()>> groups = {
        { "grammars", grammars }, { "schemas", schemas }, { "seals", seals }, { "appendices", appendices }, { "samples", samples },
    };
    if (argc < 2) {
        for (const auto & group : groups) {
            std::printf("%s\n", group.first.c_str());
        }
        return 0;
    }
    CHECK(groups.count(argv[1]));
    folder = argc > 2 ? argv[2] : ".";
    groups.at(argv[1])();
    return 0;
}
