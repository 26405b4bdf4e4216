// libFuzzer target: llama-kv-mmap.h opens an existing file.
//
// An input is a byte that selects the options of opening, and the first bytes of the file; the rest of
// the file is a kept cache. FUZZ_FOLDER names an empty folder for it.

#include "llama-kv-mmap.h"

#include <cstdint>
#include <cstdlib>

using namespace llama_kv_mmap;

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            std::fprintf(stderr, "CHECK %d: %s\n", __LINE__, #condition);   \
            std::abort();                                                   \
        }                                                                   \
    } while (0)

namespace {

const uint32_t N_CELLS  = 64;
const uint32_t N_STREAM = 2;
const uint32_t N_WORDS  = 2;
const size_t   N_META   = N_STREAM*(8 + N_CELLS*(N_WORDS*8 + 4 + 4));
const size_t   N_FRONT  = sizeof(header) + N_META;

// the bits of an input's first byte
enum : uint8_t { MEND = 1, FRESH = 2, NOT = 4, SHORT = 8, TRIM = 16 };

std::string path;
std::string base; // the file of a kept cache

std::vector<tensor> some_tensors() {
    std::vector<tensor> res(2);
    for (int i = 0; i < 2; ++i) {
        res[i].name    = i ? "cache_v_l0" : "cache_k_l0";
        res[i].type    = "f16";
        res[i].layer   = 0;
        res[i].is_v    = i != 0;
        res[i].by_row  = i == 0;
        res[i].n_cell  = i ? 2 : 16;
        res[i].n_bytes = (size_t) N_STREAM*N_CELLS*(i ? 3*2 : 16);
    }
    return res;
}

struct cache {
    std::vector<int32_t>  pos  = std::vector<int32_t>(N_STREAM*N_CELLS, -1);
    std::vector<uint64_t> seqs = std::vector<uint64_t>(N_STREAM*N_CELLS*N_WORDS, 0);
    std::shared_ptr<backing> mapped;

    explicit cache(enum keep keep) {
        options opts;
        opts.kind  = KIND_FILE;
        opts.path  = path;
        opts.keep  = keep;
        opts.model = "model";
        opts.build = "build";
        opts.n_seq_max = 64*N_WORDS;

        mapped = std::make_shared<backing>(opts, 0, some_tensors(), N_CELLS, N_STREAM);
        mapped->clear();
        mapped->attach(
            [this](uint32_t s, int32_t * p, uint64_t * q, uint32_t n_words) {
                CHECK(n_words == N_WORDS && s < N_STREAM);
                std::copy_n(pos.begin() + s*N_CELLS, N_CELLS, p);
                std::copy_n(seqs.begin() + s*N_CELLS*N_WORDS, N_CELLS*N_WORDS, q);
                return 0;
            },
            [this](uint32_t s, const int32_t * p, const uint64_t * q, uint32_t n_words, uint32_t head) {
                CHECK(n_words == N_WORDS && s < N_STREAM && head < N_CELLS);
                std::copy_n(p, N_CELLS, pos.begin() + s*N_CELLS);
                std::copy_n(q, N_CELLS*N_WORDS, seqs.begin() + s*N_CELLS*N_WORDS);
            });
    }

    void fill(uint32_t n) {
        mapped->touch();
        for (uint32_t i = 0; i < n; ++i) {
            pos[i] = (int32_t) i;
            seqs[i*N_WORDS] = 1;
        }
        for (const auto & t : mapped->get_tensors()) {
            std::memset(mapped->data() + t.offset, 7, t.n_bytes);
        }
    }
};

std::string read_file() {
    std::string res;
    std::FILE * f = std::fopen(path.c_str(), "rb");
    CHECK(f);
    char part[4096];
    for (size_t n; (n = std::fread(part, 1, sizeof(part), f)) > 0;) {
        res.append(part, n);
    }
    std::fclose(f);
    return res;
}

void write_file(const std::string & text) {
    std::FILE * f = std::fopen(path.c_str(), "wb");
    CHECK(f && std::fwrite(text.data(), 1, text.size(), f) == text.size() && std::fclose(f) == 0);
}

uint32_t state_of(const std::string & text) {
    header h;
    CHECK(text.size() >= sizeof(h));
    std::memcpy(&h, text.data(), sizeof(h));
    return h.state;
}

// corrects the checksums of the file
void mend(std::string & text) {
    if (text.size() < N_FRONT) {
        return;
    }
    header h;
    std::memcpy(&h, text.data(), sizeof(h));
    h.sum_cells = checksum(text.data() + sizeof(h), N_META, 1);
    const char * begin = (const char *) &h.sum_cells;
    h.sum = checksum(begin, (const char *) (&h + 1) - begin, FORMAT);
    std::memcpy(&text[0], &h, sizeof(h));
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    const char * folder = std::getenv("FUZZ_FOLDER");
    CHECK(folder);
    path = std::string(folder) + "/kept";
    {
        cache c(KEEP_FRESH);
        c.fill(20);
        c.mapped->flush(nullptr);
    }
    base = read_file();
    return 0;
}

// mutations of the start of the file; an input without one gets a complete start
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned int seed) {
    if (size < 1 + N_FRONT && max_size >= 1 + N_FRONT && seed % 8) {
        data[0] = size ? data[0] : MEND;
        std::memcpy(data + 1, base.data(), N_FRONT);
        size = 1 + N_FRONT;
    }
    return LLVMFuzzerMutate(data, size, max_size);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const uint8_t how = size ? data[0] : 0;

    std::string text = base;
    if (size > 1) {
        const size_t n = how & SHORT ? size - 1 : std::min(size - 1, base.size());
        text.resize(how & SHORT ? n : base.size());
        std::memcpy(&text[0], data + 1, n);
    }
    if (how & MEND) {
        mend(text);
    }
    write_file(text);

    const enum keep keep = how & NOT ? KEEP_NOT : how & FRESH ? KEEP_FRESH : KEEP_IT;
    uint64_t generation = 0;
    try {
        cache c(keep);
        generation = c.mapped->get_generation();
        // only a file that was never flushed is recreated without an error
        CHECK(keep != KEEP_IT || c.mapped->get_is_resumed() || text.empty() || state_of(text) == STATE_SCRATCH);
        c.fill(10);
        if (how & TRIM) { // slow, because it needs system calls
            c.mapped->trim();
            CHECK(c.mapped->committed() <= c.mapped->reserved());
        }
        if (c.mapped->get_is_kept()) {
            c.mapped->flush(nullptr);
        }
    } catch (const error & e) {
        CHECK(*e.what() != 0 && e.why != FAILURE_NONE);
        CHECK(keep != KEEP_IT || read_file() == text); // unchanged
        return 0;
    }
    if (keep != KEEP_NOT) {
        cache again(KEEP_IT);
        CHECK(again.mapped->get_is_resumed() && again.mapped->get_generation() == generation + 1);
        CHECK(again.pos[9] == 9 && again.seqs[9*N_WORDS] == 1);
    }
    return 0;
}
