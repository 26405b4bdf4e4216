#ifndef SERVER_SAFETY_H
#define SERVER_SAFETY_H

// Checks of what clients and operators give to llama-server, before it is used: grammars and JSON schemas that cannot be
// enforced, and slot files that are damaged or of another model.
//
// This file is identical for all versions of llama.cpp, and uses none of its types.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace server_safety {

//
// grammars
//

// Throw std::invalid_argument for a repetition of a GBNF grammar whose maximum is below its minimum: the parser of the
// grammar repeats the symbol until the memory is full.
inline void check_grammar(const std::string & text) {
    const auto is_digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };

    // the end of a comment, which a carriage return ends too
    const auto comment_end = [&](size_t i) { return std::min(text.find_first_of("\r\n", i), text.size()); };

    // blanks, and the line ends and comments that the parser accepts within parentheses
    const auto skip = [&](size_t i) {
        for (; i < text.size() && std::strchr(" \t\r\n#", text[i]) != nullptr && text[i] != 0; ++i) {
            if (text[i] == '#') {
                i = comment_end(i) - 1;
            }
        }
        return i;
    };

    // digits of any length, without zeros in front
    const auto number = [&](size_t & i) {
        const size_t begin = i;
        while (is_digit(i)) {
            ++i;
        }
        size_t first = begin;
        while (first + 1 < i && text[first] == '0') {
            ++first;
        }
        return text.substr(first, i - first);
    };

    size_t line = 1;
    char   end  = 0; // of the literal or class that i is in
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c == '\n') {
            ++line;
        }
        if (end != 0) {
            if (c == '\\') {
                ++i;
            } else if (c == end) {
                end = 0;
            }
        } else if (c == '"' || c == '[') {
            end = c == '"' ? '"' : ']';
        } else if (c == '#') {
            i = comment_end(i) - 1;
        } else if (c == '{') {
            size_t at = skip(i + 1);
            const std::string least = number(at);
            at = skip(at);
            if (least.empty() || at >= text.size() || text[at] != ',') {
                continue;
            }
            at = skip(at + 1);
            const std::string most = number(at);
            if (!most.empty() && std::make_pair(most.size(), most) < std::make_pair(least.size(), least)) {
                throw std::invalid_argument("grammar, line " + std::to_string(line) + ": the repetition {" + least + "," + most +
                        "} has a maximum below its minimum");
            }
        }
    }
}

//
// JSON schemas
//

// A member of a path as in a JSON pointer.
inline std::string path_member(const std::string & name) {
    std::string res = "/";
    for (const char c : name) {
        res += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    }
    return res;
}

// The checks of a schema, in the order in which the conversion to a grammar reads its keywords: what the conversion ignores
// is not checked.
template <typename Json, typename Convert>
class schema_checker {
public:
    schema_checker(const Json & root, const Convert & grammar_of) : root(root), grammar_of(grammar_of) {}

    void check(const Json & schema, const std::string & path) {
        if (!schema.is_object()) {
            return; // the conversion refuses it
        }
        if (schema.contains("$ref")) {
            check_target(schema.at("$ref"));
            return;
        }
        for (const char * key : { "oneOf", "anyOf" }) {
            if (schema.contains(key)) {
                check_items(schema.at(key), path + "/" + key);
                return;
            }
        }
        if (schema.contains("const") || schema.contains("enum")) {
            return; // these decide alone
        }

        // without a type, the keywords decide
        const bool is_untyped     = !schema.contains("type");
        const bool has_properties = schema.contains("properties") || (schema.contains("additionalProperties") && !is_true(schema.at("additionalProperties")));
        const bool has_items      = schema.contains("items") || schema.contains("prefixItems");
        if (schema.contains("allOf") && (has_type(schema, "string") || (!has_properties && (is_untyped || has_type(schema, "object"))))) {
            check_items(schema.at("allOf"), path + "/allOf");
            return;
        }
        if (has_type(schema, "object") || (is_untyped && has_properties)) {
            check_object(schema, path);
        } else if (is_untyped && !has_items) {
            check_string(schema, path);
        }
        if (has_type(schema, "string")) {
            check_string(schema, path);
        }
        if (has_type(schema, "array") || (is_untyped && has_items && !has_properties)) {
            if (has_items) {
                const std::string key = schema.contains("items") ? "items" : "prefixItems";
                check_items(schema.at(key), path + "/" + key);
            }
            check_range(schema, path, "minItems", "maxItems");
        }
        if (has_type(schema, "integer") || has_type(schema, "number")) {
            check_range(schema, path, "minimum", "maximum");
        }
        if (has_type(schema, "integer")) {
            check_integer(schema, path);
        }
    }

private:
    const Json &          root;
    const Convert &       grammar_of;
    std::set<std::string> visited; // references

    static bool is_true(const Json & value) {
        return value.is_boolean() && value.template get<bool>();
    }

    // Whether a type is the one of a schema, or one of several.
    static bool has_type(const Json & schema, const std::string & name) {
        if (!schema.contains("type")) {
            return false;
        }
        const Json & type = schema.at("type");
        if (type.is_array()) {
            for (const auto & item : type) {
                if (item.is_string() && item.template get<std::string>() == name) {
                    return true;
                }
            }
        }
        return type.is_string() && type.template get<std::string>() == name;
    }

    // Follow a reference within the schema, once. The conversion refuses others, and resolves no ~0 and ~1.
    void check_target(const Json & value) {
        const std::string ref = value.is_string() ? value.template get<std::string>() : "";
        if (ref.compare(0, 2, "#/") != 0 || !visited.insert(ref).second) {
            return;
        }
        const Json * target = &root;
        for (size_t at = 2; at <= ref.size(); ) {
            const size_t end = std::min(ref.find('/', at), ref.size());
            const std::string name = ref.substr(at, end - at);
            if (target->is_object() && target->contains(name)) {
                target = &target->at(name);
            } else if (target->is_array()) {
                const bool is_number = !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string::npos;
                const size_t i = is_number ? std::stoul(name) : target->size();
                if (i >= target->size()) {
                    return;
                }
                target = &target->at(i);
            } else {
                return;
            }
            at = end + 1;
        }
        check(*target, ref);
    }

    void check_items(const Json & items, const std::string & path) {
        if (!items.is_array()) {
            check(items, path);
            return;
        }
        size_t i = 0;
        for (const auto & item : items) {
            check(item, path + "/" + std::to_string(i++));
        }
    }

    void check_object(const Json & schema, const std::string & path) {
        if (schema.contains("properties") && schema.at("properties").is_object()) {
            for (const auto & [name, child] : schema.at("properties").items()) {
                check(child, path + "/properties" + path_member(name));
            }
        }
        if (schema.contains("additionalProperties")) {
            check(schema.at("additionalProperties"), path + "/additionalProperties");
        }
    }

    static double bound(const Json & schema, const char * key, double otherwise) {
        return schema.contains(key) && schema.at(key).is_number() ? schema.at(key).template get<double>() : otherwise;
    }

    static constexpr double none = std::numeric_limits<double>::infinity();

    static void check_range(const Json & schema, const std::string & path, const char * least, const char * most) {
        if (bound(schema, least, -none) > bound(schema, most, none)) {
            throw std::invalid_argument(path + ": " + least + " is above " + most);
        }
    }

    static void check_integer(const Json & schema, const std::string & path) {
        const double least = std::max(std::ceil (bound(schema, "minimum", -none)), std::floor(bound(schema, "exclusiveMinimum", -none)) + 1);
        const double most  = std::min(std::floor(bound(schema, "maximum",  none)), std::ceil (bound(schema, "exclusiveMaximum",  none)) - 1);
        if (least > most) {
            throw std::invalid_argument(path + ": no integer is within the bounds");
        }
    }

    void check_string(const Json & schema, const std::string & path) const {
        check_range(schema, path, "minLength", "maxLength");
        if (!schema.contains("pattern") || !schema.at("pattern").is_string()) {
            return;
        }
        try {
            check_grammar(grammar_of(schema.at("pattern").template get<std::string>()));
        } catch (const std::exception & e) {
            throw std::invalid_argument(path + "/pattern: " + e.what());
        }
    }
};

// Throw std::invalid_argument, with the path, for a pattern or a range of a JSON schema that no grammar enforces.
//
// grammar_of(pattern) is the grammar of a string with a pattern, or throws.
template <typename Json, typename Convert>
void check_schema(const Json & schema, const Convert & grammar_of) {
    schema_checker<Json, Convert>(schema, grammar_of).check(schema, "#");
}

//
// slot files
//

// A checksum of bytes that detects every change of a single word.
class digest {
public:
    void add(const char * data, size_t size) {
        for (; size >= sizeof(uint64_t); data += sizeof(uint64_t), size -= sizeof(uint64_t)) {
            uint64_t word;
            std::memcpy(&word, data, sizeof(word));
            add(word);
        }
        uint64_t word = 0;
        std::memcpy(&word, data, size);
        add(word);
    }

    void add(uint64_t word) {
        state = (state ^ word) * 0x9e3779b97f4a7c15;
        state ^= state >> 32;
    }

    uint64_t value() const { return state; }

private:
    uint64_t state = 0x243f6a8885a308d3;
};

// The end of a slot file. Servers without this patch ignore it.
struct seal {
    char     magic[8];
    uint64_t size;  // of what precedes it
    uint64_t model; // digest of the model
    uint64_t sum;   // of what precedes it, and of size and model
};

static_assert(sizeof(seal) == 32, "a seal has no padding");

inline const char * seal_magic() {
    return "KVSLOT01";
}

constexpr size_t CHUNK = 1 << 20; // bytes that are read at once

// The checksum of the first n bytes of a file. Throws std::runtime_error if it has fewer.
inline uint64_t file_sum(std::ifstream & file, uint64_t size, uint64_t model) {
    digest sum;
    std::vector<char> data(CHUNK);
    file.clear();
    file.seekg(0);
    for (uint64_t left = size; left > 0; ) {
        const size_t n = (size_t) std::min<uint64_t>(left, data.size());
        if (!file.read(data.data(), n)) {
            throw std::runtime_error("the file cannot be read");
        }
        sum.add(data.data(), n);
        left -= n;
    }
    sum.add(size);
    sum.add(model);
    return sum.value();
}

inline uint64_t file_size(std::ifstream & file) {
    file.seekg(0, std::ios::end);
    return file ? (uint64_t) file.tellg() : 0;
}

// Append the seal to a slot file and return its size. Throws std::runtime_error.
template <typename Path>
size_t write_seal(const Path & path, uint64_t model) {
    seal end;
    std::memcpy(end.magic, seal_magic(), sizeof(end.magic));
    {
        std::ifstream file(path, std::ios::binary);
        end.size  = file_size(file);
        end.model = model;
        end.sum   = file_sum(file, end.size, model);
    }
    std::ofstream file(path, std::ios::binary | std::ios::app);
    file.write((const char *) &end, sizeof(end));
    file.flush();
    if (!file) {
        throw std::runtime_error("the checksum cannot be written");
    }
    return sizeof(end);
}

// Return whether a slot file has a seal. Throws std::runtime_error if the file differs from what was written, or is of
// another model.
template <typename Path>
bool verify_seal(const Path & path, uint64_t model) {
    std::ifstream file(path, std::ios::binary);
    const uint64_t size = file_size(file);
    if (!file) {
        throw std::runtime_error("the file cannot be opened");
    }
    seal end;
    if (size < sizeof(end)) {
        throw std::runtime_error("the file is too short");
    }
    file.seekg(size - sizeof(end));
    if (!file.read((char *) &end, sizeof(end))) {
        throw std::runtime_error("the file cannot be read");
    }
    size_t n_equal = 0; // a seal can be damaged too
    for (size_t i = 0; i < sizeof(end.magic); ++i) {
        n_equal += end.magic[i] == seal_magic()[i];
    }
    if (n_equal < sizeof(end.magic)/2) {
        return false;
    }
    if (n_equal < sizeof(end.magic) || end.size != size - sizeof(end) || end.sum != file_sum(file, end.size, end.model)) {
        throw std::runtime_error("the file is damaged: its checksum does not match");
    }
    if (end.model != model) {
        throw std::runtime_error("the file was saved with another model");
    }
    return true;
}

// Throw std::runtime_error if what follows the state of a slot file ends within its checkpoints or its seal. Servers ignore
// what begins like neither.
//
// Checkpoints begin with two numbers, of which the second one is a version, and their count. Each has n_head bytes, and
// three times a size of 8 bytes and as many bytes.
inline void check_appendix(const uint8_t * data, size_t size, const uint32_t (&begin)[2], size_t n_head) {
    const auto begins_with = [&](const void * what, size_t n) {
        return size > 0 && std::memcmp(data, what, std::min(n, size)) == 0;
    };
    const auto skip = [&](uint64_t n) {
        if (n > size) {
            throw std::runtime_error("the file is cut short");
        }
        const uint8_t * skipped = data;
        data += n;
        size -= n;
        return skipped;
    };
    const auto number = [&](auto value) {
        std::memcpy(&value, skip(sizeof(value)), sizeof(value));
        return value;
    };
    if (begins_with(begin, sizeof(begin))) {
        skip(sizeof(begin));
        for (uint32_t n = number(uint32_t()); n > 0; --n) {
            skip(n_head);
            for (int i = 0; i < 3; ++i) {
                skip(number(uint64_t()));
            }
        }
    }
    if (begins_with(seal_magic(), sizeof(seal::magic))) {
        skip(sizeof(seal));
    }
}

// A digest of parts of a file, each with its offset and size in bytes: of at most 4,096 bytes at the start, in the middle
// and at the end of each part. Throws std::runtime_error.
template <typename Path>
uint64_t sample_digest(const Path & path, const std::vector<std::pair<uint64_t, uint64_t>> & parts) {
    constexpr uint64_t SAMPLE = 4096;
    std::ifstream file(path, std::ios::binary);
    digest sum;
    sum.add(file_size(file));
    std::vector<char> data(SAMPLE);
    for (const auto & [offset, size] : parts) {
        const uint64_t n = std::min(size, SAMPLE);
        for (const uint64_t at : { offset, offset + (size - n)/2, offset + size - n }) {
            file.seekg(at);
            if (!file.read(data.data(), n)) {
                throw std::runtime_error("the model cannot be read");
            }
            sum.add(data.data(), n);
        }
    }
    return sum.value();
}

} // namespace server_safety

#endif // SERVER_SAFETY_H
