// Unit tests of llama-kv-mmap.h. Usage: kv_mmap GROUP FOLDER, with an empty folder, which is empty again afterwards.
// Returns 0 if the group passes; a failed CHECK exits with 1.

#include "check.h"
#include "llama-kv-mmap.h"

#include <csignal>
#include <cstdio>
#include <functional>
#include <map>
#include <set>

#include <cstdarg>

#include <sys/syscall.h>
#include <sys/wait.h>

using namespace llama_kv_mmap;

// errno of the next call of a system function, which fails once; 0: no failure
static int open_error           = 0;
static int open_temporary_error = 0; // open() with O_TMPFILE
static int ftruncate_error      = 0;
static int fallocate_error      = 0;
static bool fallocate_kills    = false;
static int zero_error           = 0;
static int flock_error          = 0;
static int msync_error          = 0;
static int mincore_error        = 0;
static int pagemap_error        = 0; // opening /proc/self/pagemap
static int pwrite_error         = 0;
static int fsync_error          = 0;

static ssize_t pwrite_most = -1; // maximum bytes per call of pwrite(); -1: unlimited
static int     n_fsynced   = 0;

// called before a file is created, to simulate another process
static std::function<void()> before_create;

static int fail_once(int & code) {
    if (code == 0) {
        return 0;
    }
    errno = code;
    code  = 0;
    return -1;
}

// These override the functions of libc, to simulate errors of other file systems.
extern "C" int open(const char * path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
    va_end(more);
    if (std::strcmp(path, "/proc/self/pagemap") == 0) {
        return fail_once(pagemap_error) != 0 ? -1 : (int) ::syscall(SYS_openat, AT_FDCWD, path, flags, 0);
    }
    if (fail_once((flags & O_TMPFILE) == O_TMPFILE ? open_temporary_error : open_error) != 0) {
        return -1;
    }
    if (flags & O_EXCL && before_create) {
        before_create();
    }
    return (int) ::syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

extern "C" int ftruncate(int fd, off_t length) noexcept {
    return fail_once(ftruncate_error) != 0 ? -1 : (int) ::syscall(SYS_ftruncate, fd, length);
}

extern "C" ssize_t pwrite(int fd, const void * data, size_t n, off_t at) {
    if (fail_once(pwrite_error) != 0) {
        return -1;
    }
    return ::syscall(SYS_pwrite64, fd, data, pwrite_most < 0 ? n : std::min(n, (size_t) pwrite_most), at);
}

extern "C" int fsync(int fd) {
    n_fsynced++;
    return fail_once(fsync_error) != 0 ? -1 : (int) ::syscall(SYS_fsync, fd);
}

extern "C" int fallocate(int fd, int mode, off_t offset, off_t len) {
    if (fail_once(mode & FALLOC_FL_ZERO_RANGE ? zero_error : fallocate_error) != 0) {
        return -1;
    }
    const int res = (int) ::syscall(SYS_fallocate, fd, mode, offset, len);
    if (fallocate_kills) {
        ::kill(getpid(), SIGKILL);
    }
    return res;
}

extern "C" int flock(int fd, int operation) noexcept {
    return fail_once(flock_error) != 0 ? -1 : (int) ::syscall(SYS_flock, fd, operation);
}

// last advice about huge pages
static int advised = -1;

extern "C" int madvise(void * begin, size_t len, int advice) noexcept {
    if (advice == MADV_HUGEPAGE || advice == MADV_NOHUGEPAGE) {
        advised = advice;
    }
    return (int) ::syscall(SYS_madvise, begin, len, advice);
}

// order of msync() calls: a header as its state, everything else as DATA
static const uint32_t        DATA = 1000;
static std::vector<uint32_t> synced;

extern "C" int msync(void * begin, size_t len, int flags) {
    if (fail_once(msync_error) != 0) {
        return -1;
    }
    CHECK(flags == MS_SYNC);
    const auto * found = (const header *) begin;
    synced.push_back(std::memcmp(found->magic, magic(), sizeof(found->magic)) == 0 ? found->state : DATA);
    return (int) ::syscall(SYS_msync, begin, len, flags);
}

// reports the first two pages as resident; only the lowest bit is significant
extern "C" int mincore(void *, size_t len, unsigned char * pages) noexcept {
    if (fail_once(mincore_error) != 0) {
        return -1;
    }
    for (size_t i = 0; i < len/page_size(); ++i) {
        pages[i] = i < 2 ? 0xff : 0xfe;
    }
    return 0;
}

static std::string folder;

static const uint32_t N_CELLS  = 4096;
static const uint32_t N_STREAM = 2;

// K of 96 bytes per cell, V of 3 rows of 2 bytes per cell
static std::vector<tensor> some_tensors() {
    std::vector<tensor> res;

    for (int layer = 0; layer < 2; ++layer) {
        for (const bool is_v : { false, true }) {
            tensor t;

            t.name    = std::string("cache_") + (is_v ? "v" : "k") + "_l" + std::to_string(layer);
            t.type    = "f16";
            t.layer   = layer;
            t.is_v    = is_v;
            t.by_row  = !is_v;
            t.n_bytes = (size_t) N_STREAM*N_CELLS*(is_v ? 3*2 : 96);
            t.n_cell  = is_v ? 2 : 96;

            res.push_back(t);
        }
    }

    return res;
}

// a cache: its cells and a backing
struct cache {
    std::vector<std::map<uint32_t, std::pair<int32_t, uint64_t>>> cells;
    std::shared_ptr<backing> mapped;
    uint32_t head = 0;

    explicit cache(const options & opts, uint32_t number = 0) : cells(N_STREAM) {
        mapped = std::make_shared<backing>(opts, number, some_tensors(), N_CELLS, N_STREAM);
        mapped->clear(); // as upstream does; no effect before attach()
        mapped->attach(
            [this](uint32_t s, int32_t * pos, uint64_t * seqs, uint32_t n_words) {
                CHECK(n_words == 1);
                for (uint32_t i = 0; i < N_CELLS; ++i) {
                    const auto found = cells[s].find(i);
                    pos[i]  = found == cells[s].end() ? -1 : found->second.first;
                    seqs[i] = found == cells[s].end() ?  0 : found->second.second;
                }
                return head + s;
            },
            [this](uint32_t s, const int32_t * pos, const uint64_t * seqs, uint32_t, uint32_t from) {
                head = from - s;
                for (uint32_t i = 0; i < N_CELLS; ++i) {
                    if (pos[i] >= 0) {
                        cells[s][i] = { pos[i], seqs[i] };
                    }
                }
            });
    }

    // calls f for every byte of a cell in all tensors
    void each(uint32_t s, uint32_t cell, const std::function<void(char &, size_t)> & f) const {
        size_t k = 0;
        for (const auto & t : mapped->get_tensors()) {
            char * begin = mapped->data() + t.offset + s*(t.n_bytes/N_STREAM);
            if (t.by_row) {
                for (size_t b = 0; b < t.n_cell; ++b) {
                    f(begin[cell*t.n_cell + b], k++);
                }
            } else {
                for (size_t row = 0; row < 3; ++row) {
                    for (size_t b = 0; b < 2; ++b) {
                        f(begin[(row*N_CELLS + cell)*2 + b], k++);
                    }
                }
            }
        }
    }

    static char value(uint32_t s, uint32_t cell, size_t k) {
        return (char) (1 + (s*31 + cell*7 + k*13) % 100);
    }

    void fill(uint32_t s, uint32_t first, uint32_t last) {
        mapped->touch();
        for (uint32_t i = first; i < last; ++i) {
            cells[s][i] = { (int32_t) (i + 5), 1ull << (i % 3) | 1ull << 63 };
            each(s, i, [&](char & byte, size_t k) { byte = value(s, i, k); });
        }
    }

    void free(uint32_t s, uint32_t first, uint32_t last) {
        for (uint32_t i = first; i < last; ++i) {
            cells[s].erase(i);
        }
    }

    bool holds(uint32_t s, uint32_t first, uint32_t last) const {
        bool res = true;
        for (uint32_t i = first; i < last; ++i) {
            each(s, i, [&](char & byte, size_t k) { res = res && byte == value(s, i, k); });
        }
        return res;
    }
};

static options anonymous() {
    options res;
    res.kind = KIND_ANON;
    return res;
}

static options named(const char * name, enum keep keep = KEEP_IT) {
    options res;
    res.kind  = KIND_FILE;
    res.path  = folder + "/" + name;
    res.keep  = keep;
    res.model = "model";
    res.build = "build";
    return res;
}

static enum failure failure_of(const std::function<void()> & f) {
    try {
        f();
    } catch (const error & e) {
        CHECK(*e.what() != 0);
        return e.why;
    }
    return FAILURE_NONE;
}

static enum failure opening(const options & opts) {
    return failure_of([&] { cache c(opts); });
}

// runs f in a child process that is then killed
static void killed(const std::function<void()> & f) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        f();
        ::kill(getpid(), SIGKILL);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void poke(const std::string & path, long at, char byte) {
    std::FILE * f = std::fopen(path.c_str(), "r+b");
    CHECK(f && std::fseek(f, at, at < 0 ? SEEK_END : SEEK_SET) == 0);
    CHECK(std::fwrite(&byte, 1, 1, f) == 1 && std::fclose(f) == 0);
}

// changes the header of a file and updates its checksum
static void change_header(const std::string & path, const std::function<void(header &)> & change) {
    header h;
    std::FILE * f = std::fopen(path.c_str(), "r+b");
    CHECK(f && std::fread((void *) &h, sizeof(h), 1, f) == 1);
    change(h);
    h.sum = checksum((const char *) &h.sum_cells, (const char *) (&h + 1) - (const char *) &h.sum_cells, FORMAT);
    CHECK(std::fseek(f, 0, SEEK_SET) == 0 && std::fwrite((const void *) &h, sizeof(h), 1, f) == 1 && std::fclose(f) == 0);
}

static std::string message_of(const std::function<void()> & f) {
    try {
        f();
    } catch (const error & e) {
        return e.what();
    }
    return "";
}

static bool exists(const std::string & path) {
    return ::access(path.c_str(), F_OK) == 0;
}

static void test_layout() {
    for (const bool huge : { false, true }) {
        auto opts = anonymous();
        opts.huge = huge;
        cache c(opts);
        CHECK(advised == (huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
        const size_t unit = huge ? 2u << 20 : page_size();
        size_t end = 0;
        for (const auto & t : c.mapped->get_tensors()) {
            CHECK(t.offset == end && t.n_reserved % unit == 0);
            CHECK(t.n_reserved >= t.n_bytes && t.n_reserved < t.n_bytes + unit);
            end = t.offset + t.n_reserved;
        }
        CHECK(c.mapped->size() == end && c.mapped->reserved() == end);
        CHECK(c.mapped->owns(c.mapped->data()) && !c.mapped->owns(c.mapped->data() + c.mapped->size()));
        CHECK(!c.mapped->get_is_kept() && c.mapped->get_file_bytes() == 0);
    }
}

static void test_lazy() {
    cache c(anonymous());
    CHECK(c.mapped->committed() == 0);
    CHECK(c.mapped->reserved() >= 2*N_STREAM*N_CELLS*(96 + 6));

    c.fill(0, 0, 10);
    CHECK(c.mapped->committed() <= 2*(1 + 3)*page_size());
    CHECK(c.mapped->committed() >= 2*(1 + 1)*page_size());
    for (const auto & t : c.mapped->get_tensors()) {
        CHECK(t.n_committed >= page_size());
    }

    c.fill(1, 100, 200);
    c.mapped->clear();
    CHECK(c.mapped->committed() == 0);
    c.each(1, 150, [](char & byte, size_t) { CHECK(byte == 0); });
}

// zero() clears every byte of a range, and no other
static void test_zero() {
    const size_t n = 4*page_size();
    const std::pair<size_t, size_t> ranges[] = {
        { 10, n - 20 }, { 0, n }, { page_size(), 30 }, { 10, 30 }, { page_size() - 10, 20 }, { 10, 0 },
    };
    for (const auto & range : ranges) {
        mapping m(nullptr, n, false);
        std::memset(m.data(), 7, n);
        m.zero(range.first, range.second);
        for (size_t i = 0; i < n; ++i) {
            CHECK(m.data()[i] == (i >= range.first && i < range.first + range.second ? 0 : 7));
        }
    }
    CHECK(failure_of([] { mapping m(nullptr, (size_t) 1 << 62, false); }) == FAILURE_MEMORY);
}

// resident bytes from /proc/self/pagemap, or from mincore() if that cannot be opened
static void test_counting() {
    cache c(anonymous());
    const int next = ::dup(1);
    ::close(next);
    // reading commits nothing
    c.each(0, 10, [](char & byte, size_t) { CHECK(*(volatile char *) &byte == 0); });
    CHECK(c.mapped->committed() == 0);
    c.fill(0, 0, 10);
    const size_t seen = c.mapped->committed();
    CHECK(seen >= c.mapped->get_tensors().size()*page_size());
    CHECK(::dup(1) == next && ::close(next) == 0); // no file is left open

    // a child process that shares the pages does not change the count of either process
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::_Exit(c.mapped->committed() == seen ? 0 : 1);
    }
    CHECK(c.mapped->committed() == seen);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);

    // a page of written zeros is resident
    const auto & v = c.mapped->get_tensors()[3];
    const size_t before = c.mapped->committed();
    std::memset(c.mapped->data() + v.offset + 3*page_size(), 0, page_size());
    CHECK(c.mapped->committed() == before + page_size());

    // without pagemap: what mincore() reports
    const size_t after = before + page_size();
    const size_t first = c.mapped->get_tensors()[0].n_committed;
    pagemap_error = EACCES;
    CHECK(c.mapped->committed() == after - first + 2*page_size() && pagemap_error == 0);
    CHECK(c.mapped->get_tensors()[0].n_committed == 2*page_size());
    pagemap_error = EACCES;
    mincore_error = ENOMEM;
    CHECK(c.mapped->committed() == after - first && mincore_error == 0);
    CHECK(c.mapped->committed() == after);
}

static void test_trim() {
    for (int kind = 0; kind < 2; ++kind) {
        auto opts = kind == 0 ? anonymous() : named("", KEEP_NOT);
        if (kind == 1) {
            opts.kind = KIND_TEMP;
            opts.path = folder;
        }
        cache c(opts);
        c.fill(0, 0, 4000);
        c.fill(1, 0, N_CELLS);
        const size_t full = c.mapped->committed();
        CHECK(full >= 2*(N_CELLS + 4000)*(96 + 6));

        c.free(0, 1000, 4000);
        c.free(0, 10, 20);
        c.free(1, 0, 4000);
        const size_t back = c.mapped->trim();
        CHECK(c.mapped->committed() == full - back);
        CHECK(kind == 1 || back >= 2*(3000*(96 + 6) - 4*2*page_size()));
        CHECK(c.mapped->trim() == 0);
        CHECK(c.holds(0, 0, 10) && c.holds(0, 20, 1000) && c.holds(1, 4000, N_CELLS));

        // an empty stream is released completely, and released cells can be written again
        c.free(1, 4000, N_CELLS);
        const size_t rest = c.mapped->trim();
        CHECK(kind == 1 || rest >= 2*page_size());
        CHECK(c.holds(0, 20, 1000));
        c.fill(1, 0, N_CELLS);
        c.fill(0, 900, 1500);
        CHECK(c.holds(0, 20, 1500) && c.holds(1, 0, N_CELLS));
    }
}

static void test_copy() {
    cache c(anonymous());
    c.fill(0, 0, 300);
    for (uint32_t i = 0; i < 300; ++i) {
        c.cells[1][i] = c.cells[0][i];
    }
    c.cells[1][299].first = 0; // the last cell has the first position
    // the cells of the source are free before the data is copied
    c.free(0, 0, 300);
    const size_t before = c.mapped->committed();
    c.mapped->copy(0, 1);
    for (uint32_t i = 0; i < 300; ++i) {
        c.each(1, i, [&](char & byte, size_t k) { CHECK(byte == cache::value(0, i, k)); });
    }
    CHECK(c.mapped->committed() <= 2*before);
}

// a layer without V has a tensor of 0 bytes
static void test_empty() {
    const auto opts = named("empty");
    for (int round = 0; round < 2; ++round) {
        auto list = some_tensors();
        list[1].n_bytes = list[1].n_cell = 0;
        backing b(opts, 0, list, N_CELLS, N_STREAM);
        CHECK(b.get_is_resumed() == (round == 1));
        b.attach([](uint32_t, int32_t * pos, uint64_t * seqs, uint32_t) {
            std::fill(pos, pos + N_CELLS, -1);
            std::fill(seqs, seqs + N_CELLS, 0);
            pos[3] = 3;
            return 4u;
        }, [](uint32_t, const int32_t * pos, const uint64_t *, uint32_t, uint32_t) { CHECK(pos[3] == 3); });
        b.touch();
        b.copy(0, 1);
        b.trim();
        b.flush(nullptr);
    }
    ::unlink(opts.path.c_str());
}

static void test_keep() {
    const auto opts = named("kept");
    std::vector<int32_t> tokens(N_STREAM*N_CELLS);
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = (int32_t) (i*7);
    }
    {
        cache c(opts);
        CHECK(c.mapped->get_is_kept() && !c.mapped->get_is_resumed());
        c.fill(0, 0, 100);
        c.fill(1, 50, 60);
        c.head = 77;
        c.mapped->flush(tokens.data());
        CHECK(c.mapped->get_generation() == 1);
        // the same process cannot open the file again before it is closed
        CHECK(opening(opts) == FAILURE_BUSY);
    }
    {
        cache c(opts);
        CHECK(c.mapped->get_is_resumed() && c.mapped->get_generation() == 1);
        CHECK(c.cells[0].size() == 100 && c.cells[1].size() == 10 && c.head == 77);
        CHECK(c.cells[0][7].first == 12 && c.cells[0][7].second == (1ull << 1 | 1ull << 63));
        CHECK(c.holds(0, 0, 100) && c.holds(1, 50, 60));
        CHECK(std::equal(tokens.begin(), tokens.end(), c.mapped->get_tokens()));
        c.fill(0, 100, 110);
        c.mapped->flush(nullptr);
        CHECK(c.mapped->get_tokens()[3] == -1);
    }
    {
        // opened without a change: still clean
        cache c(opts);
        CHECK(c.mapped->get_generation() == 2);
    }
    {
        cache c(opts);
        CHECK(c.holds(0, 0, 110));
        c.mapped->clear();
        c.cells.assign(N_STREAM, {});
        c.mapped->flush(nullptr);
    }
    {
        cache c(opts);
        CHECK(c.cells[0].empty() && c.cells[1].empty() && c.mapped->get_generation() == 3);
    }
    // the second cache of a context has its own file
    { cache c(opts, 1); c.fill(0, 0, 1); c.mapped->flush(nullptr); }
    CHECK(exists(opts.path + ".1"));
    ::unlink((opts.path + ".1").c_str());
    ::unlink(opts.path.c_str());

    // a flushed cache without cells is kept, and a search position beyond the last cell is clamped
    { cache c(opts); c.head = N_CELLS; c.mapped->flush(nullptr); }
    { cache c(opts); CHECK(c.mapped->get_is_resumed() && c.head + 1 == N_CELLS - 1); }
    ::unlink(opts.path.c_str());
}

static void test_owners() {
    const auto opts = named("owners");
    // another process creates the file at the same time, and keeps it open or has closed it
    int other = -1;
    before_create = [&] {
        other = (int) ::syscall(SYS_openat, AT_FDCWD, opts.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        ::flock(other, LOCK_EX);
    };
    CHECK(opening(opts) == FAILURE_BUSY && exists(opts.path));
    before_create = nullptr;
    CHECK(message_of([&] { cache c(opts); }) == opts.path + " is in use by another context or process");
    ::close(other);
    flock_error = ENOLCK;
    CHECK(message_of([&] { cache c(opts); }).find("in use") == std::string::npos);
    ::unlink(opts.path.c_str());
    before_create = [&] {
        ::close((int) ::syscall(SYS_openat, AT_FDCWD, opts.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    };
    CHECK(opening(opts) == FAILURE_NONE);
    before_create = nullptr;
    ::unlink(opts.path.c_str());
}

static void test_dirty() {
    const auto opts = named("dirty");
    { cache c(opts); c.fill(0, 0, 10); c.mapped->flush(nullptr); }

    // killed before the first change: still clean
    killed([&] { new cache(opts); });
    CHECK(opening(opts) == FAILURE_NONE);

    // killed after the first change
    killed([&] { auto & c = *new cache(opts); c.mapped->touch(); });
    CHECK(opening(opts) == FAILURE_DIRTY);
    CHECK(opening(opts) == FAILURE_DIRTY);

    auto fresh = opts;
    fresh.keep = KEEP_FRESH;
    { cache c(fresh); CHECK(!c.mapped->get_is_resumed()); c.each(0, 3, [](char & b, size_t) { CHECK(b == 0); }); }
    // recreated and never flushed
    CHECK(opening(opts) == FAILURE_DIRTY);

    // killed between a flush and the next change: the flushed data is restored
    killed([&] { auto & c = *new cache(fresh); c.fill(1, 0, 20); c.mapped->flush(nullptr); });
    { cache c(opts); CHECK(c.mapped->get_is_resumed() && c.holds(1, 0, 20)); }

    // each operation that changes data makes the file dirty
    const std::function<void(backing &)> changes[] = {
        [](backing & b) { b.trim(); }, [](backing & b) { b.clear(); }, [](backing & b) { b.copy(1, 0); },
    };
    for (const auto & change : changes) {
        { cache c(fresh); c.fill(1, 0, 20); c.mapped->flush(nullptr); }
        CHECK(opening(opts) == FAILURE_NONE);
        killed([&] { auto & c = *new cache(opts); change(*c.mapped); });
        CHECK(opening(opts) == FAILURE_DIRTY);
    }
    ::unlink(opts.path.c_str());

    // killed after fallocate(): the header identifies the file as dirty, and it can be recreated
    killed([&] { fallocate_kills = true; cache c(opts); });
    CHECK(opening(opts) == FAILURE_DIRTY);
    CHECK(opening(fresh) == FAILURE_NONE);
    ::unlink(opts.path.c_str());

    // a truncated header: the file is dirty if the magic number is complete, and foreign otherwise
    for (const size_t n : { sizeof(header::magic), sizeof(header) - 1 }) {
        { cache c(fresh); c.fill(0, 0, 1); }
        CHECK(::truncate(opts.path.c_str(), (off_t) n) == 0);
        CHECK(opening(opts) == FAILURE_DIRTY && opening(opts) == FAILURE_DIRTY);
        CHECK(opening(fresh) == FAILURE_NONE);
        ::unlink(opts.path.c_str());
    }
    { cache c(fresh); c.fill(0, 0, 1); }
    CHECK(::truncate(opts.path.c_str(), 7) == 0 && opening(fresh) == FAILURE_FOREIGN);
    ::unlink(opts.path.c_str());

    // a new file is removed when it is closed without a change, but not after one
    { cache c(opts); }
    CHECK(!exists(opts.path));
    { cache c(opts); c.fill(0, 0, 1); }
    CHECK(opening(opts) == FAILURE_DIRTY);
    ::unlink(opts.path.c_str());
}

// power failure: the dirty state is on disk before a change, and the clean state after all data of a flush
static void test_power() {
    const auto opts = named("power");
    const std::vector<uint32_t> flushed = { STATE_DIRTY, DATA, DATA, DATA, DATA, STATE_CLEAN };

    cache c(opts);
    c.fill(0, 0, 10);
    synced.clear();
    c.mapped->flush(nullptr);
    CHECK(synced == flushed);

    synced.clear();
    c.mapped->touch();
    CHECK(synced == std::vector<uint32_t>{ STATE_DIRTY });
    c.mapped->touch(); // already dirty
    CHECK(synced.size() == 1);

    synced.clear();
    c.mapped->flush(nullptr);
    CHECK(synced == flushed);

    // a flush changes the cells, so that the file is dirty until it ends
    synced.clear();
    c.mapped->flush(nullptr);
    CHECK(synced.size() == 1 + flushed.size() && synced[0] == STATE_DIRTY);
    CHECK(std::equal(flushed.begin(), flushed.end(), synced.begin() + 1));

    // the header is synced when a file is created; a temporary file needs no sync
    n_fsynced = 0;
    { cache again(named("begun")); }
    CHECK(n_fsynced == 1);
    auto temporary = named("", KEEP_NOT);
    temporary.kind = KIND_TEMP;
    temporary.path = folder;
    { cache again(temporary); }
    CHECK(n_fsynced == 1);

    msync_error = EIO;
    CHECK(failure_of([&] { c.mapped->flush(nullptr); }) == FAILURE_IO && msync_error == 0);
    c.mapped.reset();
    CHECK(opening(opts) == FAILURE_DIRTY);
    ::unlink(opts.path.c_str());
}

static void test_foreign() {
    const auto opts = named("foreign");
    { cache c(opts); c.fill(0, 0, 10); c.mapped->flush(nullptr); }

    auto other = opts;
    other.model = "another";
    CHECK(opening(other) == FAILURE_FOREIGN);
    other = opts;
    other.build = "another";
    CHECK(opening(other) == FAILURE_FOREIGN);
    other = opts;
    other.n_seq_max = 65;
    CHECK(opening(other) == FAILURE_FOREIGN);
    other = opts;
    other.keep = KEEP_NOT; // would destroy it
    CHECK(opening(other) == FAILURE_FOREIGN);

    const auto shaped = [&](const std::function<void(std::vector<tensor> &)> & change, uint32_t n_cells, uint32_t n_stream) {
        auto list = some_tensors();
        change(list);
        return failure_of([&] { backing b(opts, 0, list, n_cells, n_stream); });
    };
    CHECK(shaped([](std::vector<tensor> &) {}, N_CELLS/2, N_STREAM) == FAILURE_FOREIGN);
    CHECK(shaped([](std::vector<tensor> &) {}, N_CELLS, 1) == FAILURE_FOREIGN);
    CHECK(shaped([](std::vector<tensor> & l) { l[1].type = "q8_0"; }, N_CELLS, N_STREAM) == FAILURE_FOREIGN);
    CHECK(shaped([](std::vector<tensor> & l) { l[1].by_row = true; }, N_CELLS, N_STREAM) == FAILURE_FOREIGN);
    CHECK(shaped([](std::vector<tensor> & l) { l.pop_back(); }, N_CELLS, N_STREAM) == FAILURE_FOREIGN);
    CHECK(shaped([](std::vector<tensor> & l) { std::swap(l[0], l[2]); }, N_CELLS, N_STREAM) == FAILURE_FOREIGN);
    // each number of the header
    struct stat st;
    CHECK(::stat(opts.path.c_str(), &st) == 0);
    change_header(opts.path, [&](header & h) {
        CHECK(h.n_bytes == (uint64_t) st.st_size && h.n_page == page_size() && h.n_words == 1);
        CHECK(h.n_cells == N_CELLS && h.n_stream == N_STREAM && h.n_tensors == some_tensors().size());
    });
    const std::function<void(header &, int)> numbers[] = {
        [](header & h, int by) { h.n_bytes   += by; }, [](header & h, int by) { h.n_page   += by; },
        [](header & h, int by) { h.n_cells   += by; }, [](header & h, int by) { h.n_stream += by; },
        [](header & h, int by) { h.n_tensors += by; }, [](header & h, int by) { h.n_words  += by; },
        [](header & h, int by) { h.layout    += by; },
    };
    for (const auto & number : numbers) {
        change_header(opts.path, [&](header & h) { number(h, 1); });
        CHECK(opening(opts) == FAILURE_FOREIGN);
        change_header(opts.path, [&](header & h) { number(h, -1); });
    }
    CHECK(opening(opts) == FAILURE_NONE);

    // the message contains both shapes: types of K and V, and the layout of V
    const auto shape_message = [&](const std::function<void(std::vector<tensor> &)> & change) {
        auto list = some_tensors();
        change(list);
        return message_of([&] { backing b(opts, 0, list, N_CELLS, N_STREAM); });
    };
    const std::string shape = "has another shape: 2 x 4096 cells, 4 tensors, K f16, V f16 by columns, expected 2 x 4096 cells, ";
    CHECK(shape_message([](std::vector<tensor> & l) {
        l[0].type = l[2].type = "q8_0";
        std::swap(l[2], l[3]);
    }) == opts.path + " " + shape + "4 tensors, K q8_0, V f16 by columns");
    CHECK(shape_message([](std::vector<tensor> & l) {
        l.resize(2);
        l[1].by_row = true;
        l[1].type   = "q4_0";
    }) == opts.path + " " + shape + "2 tensors, K f16, V q4_0 by rows");

    // strings without a terminating zero
    change_header(opts.path, [](header & h) { std::memset(h.model, 'm', sizeof(h.model)); });
    CHECK(opening(opts) == FAILURE_FOREIGN);
    CHECK(message_of([&] { cache c(opts); }).find("(" + std::string(127, 'm') + ",") != std::string::npos);
    change_header(opts.path, [](header & h) {
        std::memset(h.model, 0, sizeof(h.model));
        std::memcpy(h.model, "model", 5);
        std::memset(h.build, 'b', sizeof(h.build));
    });
    CHECK(message_of([&] { cache c(opts); }).find("(" + std::string(127, 'b') + ",") != std::string::npos);
    change_header(opts.path, [](header & h) {
        std::memset(h.build, 0, sizeof(h.build));
        std::memcpy(h.build, "build", 5);
    });
    CHECK(opening(opts) == FAILURE_NONE);

    // a file that was never flushed contains the model as well
    const auto never = named("never");
    killed([&] { (new cache(never))->mapped->touch(); });
    other = never;
    other.model = "another";
    CHECK(opening(other) == FAILURE_FOREIGN && opening(never) == FAILURE_DIRTY);
    ::unlink(never.path.c_str());

    // a file that is not a cache is never overwritten, with any option
    const auto alien = named("alien", KEEP_FRESH);
    std::FILE * f = std::fopen(alien.path.c_str(), "w");
    CHECK(f && std::fputs("precious", f) >= 0 && std::fclose(f) == 0);
    CHECK(opening(alien) == FAILURE_FOREIGN);
    CHECK(opening(named("alien", KEEP_NOT)) == FAILURE_FOREIGN);
    char text[16] = "";
    f = std::fopen(alien.path.c_str(), "r");
    CHECK(f && std::fgets(text, sizeof(text), f) && std::fclose(f) == 0);
    CHECK(std::strcmp(text, "precious") == 0);

    ::unlink(alien.path.c_str());
    ::unlink(opts.path.c_str());
}

static void test_damaged() {
    const auto opts = named("damaged");
    const auto flushed = [&] {
        ::unlink(opts.path.c_str());
        cache c(opts);
        c.fill(0, 0, 100);
        c.fill(1, 0, 100);
        c.mapped->flush(nullptr);
        return c.mapped->get_tensors();
    };

    auto tensors = flushed();
    // a byte of the header, of the cells, of K, and of V of the second stream
    const long offsets[] = {
        (long) offsetof(header, generation), (long) sizeof(header) + 8*50, (long) tensors[0].offset + 99*96,
        (long) (tensors[3].offset + tensors[3].n_bytes/2 + 2*(N_CELLS*2 + 99)),
    };
    for (const long at : offsets) {
        flushed();
        CHECK(opening(opts) == FAILURE_NONE);
        poke(opts.path, at, (char) 0xa5);
        CHECK(opening(opts) == FAILURE_DAMAGED);
        CHECK(opening(opts) == FAILURE_DAMAGED);
    }
    // every bit of the state: a flipped bit never results in another valid state
    for (long bit = 0; bit < 32; ++bit) {
        flushed();
        poke(opts.path, (long) offsetof(header, state) + bit/8, (char) ((STATE_CLEAN >> bit/8*8 & 0xff) ^ 1u << bit%8));
        CHECK(opening(opts) == FAILURE_DAMAGED);
    }
    // the bytes of free cells are not checked
    flushed();
    poke(opts.path, (long) tensors[0].offset + 100*96, 7);
    CHECK(opening(opts) == FAILURE_NONE);

    // the last used cell may have the first position
    {
        ::unlink(opts.path.c_str());
        cache c(opts);
        c.fill(0, 0, 100);
        c.cells[0][99].first = 0;
        c.mapped->flush(nullptr);
    }
    CHECK(opening(opts) == FAILURE_NONE);
    poke(opts.path, (long) tensors[0].offset + 99*96, (char) 0xa5);
    CHECK(opening(opts) == FAILURE_DAMAGED);

    // truncated before or after the last byte of used cells
    for (const size_t n : { (size_t) 100000, tensors[3].offset + tensors[3].n_bytes - 1 }) {
        flushed();
        CHECK(::truncate(opts.path.c_str(), (off_t) n) == 0);
        CHECK(opening(opts) == FAILURE_DAMAGED && opening(opts) == FAILURE_DAMAGED);
    }
    // unsupported formats: a later one, and format 2, which has pages between tensors
    for (const char format : { 77, 2 }) {
        flushed();
        poke(opts.path, 8, format);
        CHECK(message_of([&] { cache c(opts); }) == opts.path + " has format " + std::to_string(format) + ", expected 3");
        CHECK(opening(opts) == FAILURE_FOREIGN);
    }
    ::unlink(opts.path.c_str());
}

static void test_space() {
    struct rlimit limit;
    CHECK(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const auto old = limit;
    limit.rlim_cur = 100000;
    CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);

    const auto opts = named("large");
    CHECK(opening(opts) == FAILURE_SPACE);
    CHECK(!exists(opts.path));
    auto temporary = opts;
    temporary.keep = KEEP_NOT;
    temporary.kind = KIND_TEMP;
    temporary.path = folder;
    CHECK(opening(temporary) == FAILURE_SPACE);

    CHECK(::setrlimit(RLIMIT_FSIZE, &old) == 0);
    size_t n = 0;
    {
        cache c(opts);
        CHECK(c.mapped->get_file_bytes() >= c.mapped->reserved());
        n = c.mapped->size();
    }
    // a file of the size of the limit is allowed
    limit.rlim_cur = n;
    CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(opening(opts) == FAILURE_NONE);
    limit.rlim_cur = n - 1;
    CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    n_fsynced = 0;
    CHECK(opening(opts) == FAILURE_SPACE && n_fsynced == 0); // fails before anything is written
    CHECK(::setrlimit(RLIMIT_FSIZE, &old) == 0);
    // an existing file does not cause SIGXFSZ either
    { cache c(opts); c.fill(0, 0, 10); c.mapped->flush(nullptr); }
    CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(opening(opts) == FAILURE_SPACE);
    CHECK(::setrlimit(RLIMIT_FSIZE, &old) == 0);
    CHECK(opening(opts) == FAILURE_NONE);
    ::unlink(opts.path.c_str());
    auto missing = opts;
    missing.path = folder + "/none/such";
    CHECK(opening(missing) == FAILURE_IO);
    missing.path = "/dev/null";
    CHECK(opening(missing) == FAILURE_UNSUPPORTED);
}

// errors of other file systems
static void test_answers() {
    CHECK(kind_of(ENOSPC) == FAILURE_SPACE && kind_of(EFBIG) == FAILURE_SPACE && kind_of(EDQUOT) == FAILURE_SPACE);
    CHECK(kind_of(ENOMEM) == FAILURE_MEMORY && kind_of(EIO) == FAILURE_IO && kind_of(EACCES) == FAILURE_IO);
    CHECK(kind_of(EOPNOTSUPP) == FAILURE_UNSUPPORTED && kind_of(ENOSYS) == FAILURE_UNSUPPORTED);

    auto temporary = named("", KEEP_NOT);
    temporary.kind = KIND_TEMP;
    temporary.path = folder;

    // without support for O_TMPFILE, a named file is created and unlinked
    for (const int code : { EOPNOTSUPP, EISDIR, EINVAL }) {
        open_temporary_error = code;
        cache c(temporary);
        c.fill(0, 0, 10);
        CHECK(open_temporary_error == 0 && c.holds(0, 0, 10));
        CHECK(c.mapped->get_kind() == KIND_TEMP);
    }
    open_temporary_error = ENOSPC; // no fallback for other errors
    CHECK(opening(temporary) == FAILURE_SPACE);

    const auto opts = named("answers");
    fallocate_error = ENOSPC;
    CHECK(opening(opts) == FAILURE_SPACE && !exists(opts.path));
    fallocate_error = EOPNOTSUPP;
    CHECK(opening(opts) == FAILURE_UNSUPPORTED && !exists(opts.path));
    open_error = ENOSPC;
    CHECK(opening(opts) == FAILURE_SPACE && !exists(opts.path));
    ftruncate_error = EIO;
    CHECK(opening(opts) == FAILURE_IO && !exists(opts.path));
    flock_error = ENOLCK;
    CHECK(opening(opts) == FAILURE_IO);
    ::unlink(opts.path.c_str());

    // the header: write fails, is partial, or fsync() fails
    pwrite_error = EIO;
    CHECK(opening(opts) == FAILURE_IO && !exists(opts.path));
    for (const ssize_t most : { 0, 8, (int) sizeof(header) - 1 }) {
        pwrite_most = most;
        errno       = EIO; // a stale value
        CHECK(opening(opts) == FAILURE_SPACE && !exists(opts.path));
    }
    pwrite_most = -1;
    fsync_error  = EIO;
    CHECK(opening(opts) == FAILURE_IO && !exists(opts.path));

    // interrupted by a signal: retried
    fallocate_error = EINTR;
    { cache c(opts); c.fill(0, 0, 10); c.mapped->flush(nullptr); CHECK(fallocate_error == 0); }
    fallocate_error = ENOSPC; // an existing file is not changed
    CHECK(opening(opts) == FAILURE_SPACE && exists(opts.path));
    CHECK(opening(opts) == FAILURE_NONE);

    {
        cache c(opts);
        CHECK(c.holds(0, 0, 10));
        zero_error = EINTR;
        c.mapped->clear();
        CHECK(zero_error == 0);
        c.each(0, 3, [](char & b, size_t) { CHECK(b == 0); });
        c.fill(0, 0, 4000);
        // memory that cannot be released is overwritten with zeros
        for (size_t i = 0; i < c.mapped->get_tensors().size(); ++i) {
            zero_error = EOPNOTSUPP;
            c.mapped->clear();
        }
        c.each(0, 3999, [](char & b, size_t) { CHECK(b == 0); });
    }
    ::unlink(opts.path.c_str());
}

// in a process without standard input, the first opened file has descriptor 0
static void test_numbers() {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ::close(0);
        const auto opts = named("zero");
        { cache c(opts); c.fill(0, 0, 10); c.mapped->flush(nullptr); CHECK(c.mapped->get_file_bytes() > 0); }
        errno = ENOENT; // a stale value
        { cache c(opts); CHECK(c.mapped->get_is_resumed() && c.holds(0, 0, 10)); }
        ::unlink(opts.path.c_str());
        // a new file has descriptor 0, and a stale EEXIST does not mean that it existed
        before_create = [] { errno = EEXIST; };
        { cache c(opts); CHECK(::fcntl(0, F_GETFD) >= 0 && ::fcntl(3, F_GETFD) < 0); }
        before_create = nullptr;
        CHECK(!exists(opts.path));
        auto temporary = named("", KEEP_NOT);
        temporary.kind = KIND_TEMP;
        temporary.path = folder;
        errno = EINVAL; // a stale value
        CHECK(opening(temporary) == FAILURE_NONE);
        open_temporary_error = EINVAL;
        CHECK(opening(temporary) == FAILURE_NONE);
        CHECK(::dup(1) == 0 && ::close(0) == 0); // no descriptor remains open
        std::exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_scratch() {
    const auto opts = named("scratch", KEEP_NOT);
    {
        cache c(opts);
        c.fill(0, 0, 10);
        CHECK(exists(opts.path) && opening(opts) == FAILURE_BUSY);
        CHECK(failure_of([&] { c.mapped->flush(nullptr); }) == FAILURE_UNSUPPORTED);
    }
    CHECK(!exists(opts.path));
    // the file of a killed process is reused without its content
    killed([&] { auto & c = *new cache(opts); c.fill(0, 0, 10); });
    CHECK(exists(opts.path));
    {
        cache c(opts);
        c.each(0, 3, [](char & b, size_t) { CHECK(b == 0); });
        CHECK(c.cells[0].empty());
    }
    { cache c(named("scratch")); CHECK(!c.mapped->get_is_resumed()); }
    ::unlink(opts.path.c_str());
}

static void test_options() {
    CHECK(effective().kind == KIND_HEAP);
    CHECK(make(some_tensors(), N_CELLS, N_STREAM) == nullptr);

    ::setenv("LLAMA_KV_BACKING", "mmap", 1);
    ::setenv("LLAMA_KV_BACKING_HUGE", "1", 1);
    CHECK(effective().kind == KIND_ANON && effective().huge);
    ::setenv("LLAMA_KV_BACKING", folder.c_str(), 1);
    ::setenv("LLAMA_KV_BACKING_HUGE", "0", 1);
    CHECK(effective().kind == KIND_TEMP && !effective().huge);
    // a value that is not valid has no effect, and names no file
    CHECK(effective().ignored.empty());
    for (const char * wrong : { "mmpa", "Mmap", "mmap ", "file.kv", "1", ".kv" }) {
        ::setenv("LLAMA_KV_BACKING", wrong, 1);
        CHECK(effective().kind == KIND_HEAP && effective().path.empty());
        CHECK(effective().ignored == std::vector<std::string>{ std::string("LLAMA_KV_BACKING is '") + wrong +
            "', which is ignored; expected heap, mmap, a directory, or a file whose path contains a '/'" });
        CHECK(make(some_tensors(), N_CELLS, N_STREAM) == nullptr && !exists(wrong));
    }
    for (const char * wrong : { "yes", "01", " 1" }) {
        ::setenv("LLAMA_KV_BACKING_HUGE", wrong, 1);
        CHECK(!effective().huge && effective().ignored.size() == 2);
        CHECK(effective().ignored[1] == std::string("LLAMA_KV_BACKING_HUGE is '") + wrong + "', which is ignored; expected 1 or 0");
    }
    ::setenv("LLAMA_KV_BACKING", "", 1);
    ::setenv("LLAMA_KV_BACKING_HUGE", "", 1);
    CHECK(effective().kind == KIND_HEAP && effective().ignored.empty());
    ::setenv("LLAMA_KV_BACKING", ".", 1); // a directory that exists
    CHECK(effective().kind == KIND_TEMP && effective().ignored.empty());
    ::setenv("LLAMA_KV_BACKING", (folder + "/file").c_str(), 1);
    current().keep = KEEP_IT; // applies to a path of this thread's options, not to one of the environment
    CHECK(effective().kind == KIND_FILE && effective().keep == KEEP_NOT);
    current()      = options();
    current().kind = KIND_ANON;
    CHECK(effective().kind == KIND_ANON && effective().path.empty()); // the thread's options override the environment
    ::unsetenv("LLAMA_KV_BACKING");
    ::unsetenv("LLAMA_KV_BACKING_HUGE");

    CHECK(effective().kind == KIND_ANON);
    CHECK(!use_heap_for("llama") && effective().kind == KIND_ANON);
    CHECK(use_heap_for("deepseek4") && effective().kind == KIND_HEAP);
    CHECK(make(some_tensors(), N_CELLS, N_STREAM) == nullptr);
    CHECK(use_heap_for("deepseek4")); // the next context, after one whose creation failed
    CHECK(take_made().empty() && effective().kind == KIND_ANON);
    ::setenv("LLAMA_KV_BACKING", "heap", 1);
    CHECK(use_heap_for("deepseek4")); // the thread's options still have precedence
    current() = options();
    CHECK(!use_heap_for("deepseek4"));
    ::unsetenv("LLAMA_KV_BACKING");
    current().kind = KIND_ANON;
    {
        const auto one = make(some_tensors(), N_CELLS, N_STREAM);
        make(some_tensors(), N_CELLS, N_STREAM); // of a context whose creation fails
        const auto all = take_made();
        CHECK(all.size() == 1 && all[0].lock() == one && take_made().empty());
    }
    current() = named("a");
    current().n_seq_max = 200;
    {
        const auto one = make(some_tensors(), N_CELLS, N_STREAM);
        const auto two = make(some_tensors(), N_CELLS, N_STREAM);
        CHECK(exists(folder + "/a") && exists(folder + "/a.1"));
        CHECK(current().failed == FAILURE_NONE);
        take_made();
        CHECK(failure_of([] { make(some_tensors(), N_CELLS, N_STREAM); }) == FAILURE_BUSY);
        CHECK(current().failed == FAILURE_BUSY);
    }
    CHECK(!exists(folder + "/a") && !exists(folder + "/a.1"));
    current()      = options();
    current().kind = KIND_ANON;
    current().keep = KEEP_IT;
    CHECK(failure_of([] { make(some_tensors(), N_CELLS, N_STREAM); }) == FAILURE_UNSUPPORTED);
}

static void test_checksum() {
    // kept files contain checksums, so their values are part of the format
    const char text[] = "sixty-four bytes and a few more, so that there is a rest behind them all";
    CHECK(checksum(text, 0, 1) == 0xa9733ad94afd17c0ull);
    CHECK(checksum(text, 32, 1) == 0xddc4354574c0cd9dull);
    CHECK(checksum(text, sizeof(text), 7) == 0x1ffd069a41389813ull);

    std::vector<char> data(1000);
    for (size_t i = 0; i < data.size(); ++i) {
        data[i] = (char) (i*i);
    }
    std::set<uint64_t> seen;
    for (size_t n = 0; n <= data.size(); n += 1 + n/7) {
        CHECK(seen.insert(checksum(data.data(), n, 1)).second);
        CHECK(seen.insert(checksum(data.data(), n, 2)).second);
    }
    for (size_t i = 0; i < data.size(); ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            data[i] = (char) (data[i] ^ 1 << bit);
            CHECK(seen.insert(checksum(data.data(), data.size(), 1)).second);
            data[i] = (char) (data[i] ^ 1 << bit);
        }
    }
    std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + 32);
    CHECK(seen.insert(checksum(data.data(), data.size(), 1)).second);
}

// Every byte of the buffer for ggml can be written, and the buffer excludes the header and the cells of a file.
static void test_contract() {
    for (const bool huge : { false, true }) {
        for (const auto & opts : { anonymous(), named("contract") }) {
            auto asked = opts;
            asked.huge = huge;
            {
                cache c(asked);
                c.fill(0, 0, 10);
                if (c.mapped->get_is_kept()) {
                    c.mapped->flush(nullptr);
                }
                c.mapped->touch();
                char * begin = c.mapped->get_buffer();
                const size_t n = c.mapped->get_buffer_size();
                CHECK(begin + n == c.mapped->data() + c.mapped->size() && n == c.mapped->reserved());
                for (const auto & t : c.mapped->get_tensors()) {
                    CHECK(c.mapped->data() + t.offset >= begin && c.mapped->data() + t.offset + t.n_bytes <= begin + n);
                }
                for (const char byte : { 7, 0 }) {
                    std::memset(begin, byte, n);
                    CHECK(std::count(begin, begin + n, byte) == (ptrdiff_t) n);
                }
                c.fill(0, 0, 10);
                if (c.mapped->get_is_kept()) {
                    c.mapped->flush(nullptr);
                }
            }
            if (asked.keep == KEEP_IT) {
                cache c(asked);
                CHECK(c.mapped->get_is_resumed() && c.mapped->get_generation() == 2 && c.holds(0, 0, 10));
            }
        }
        ::unlink(named("contract").path.c_str());
    }
}

int main(int argc, char ** argv) {
    const std::map<std::string, void (*)()> groups = {
        { "answers",  test_answers  }, { "checksum", test_checksum }, { "copy",    test_copy    },
        { "counting", test_counting }, { "damaged",  test_damaged  }, { "dirty",   test_dirty   },
        { "foreign",  test_foreign  }, { "contract", test_contract }, { "keep",    test_keep    },
        { "owners",   test_owners   }, { "empty",    test_empty    },
        { "layout",   test_layout   }, { "lazy",     test_lazy     }, { "numbers", test_numbers },
        { "options",  test_options  }, { "power",    test_power    }, { "scratch", test_scratch },
        { "space",    test_space    }, { "trim",     test_trim     }, { "zero",    test_zero    },
    };

    if (argc < 3) {
        for (const auto & group : groups) {
            std::printf("%s\n", group.first.c_str());
        }
        return 0;
    }

    folder = argv[2];

    const auto found = groups.find(argv[1]);
    CHECK(found != groups.end());
    found->second();

    return 0;
}
