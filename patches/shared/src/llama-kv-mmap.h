#ifndef LLAMA_KV_MMAP_H
#define LLAMA_KV_MMAP_H

// KV cache in mapped memory. The operating system commits each page when its cells are first written, and the cache
// releases pages that it does not need. The memory is anonymous, an unlinked temporary file, or a persistent file.
//
//   mapping  one range of mapped memory
//   backing  the mapping of one cache: offsets of its tensors, release of free memory, reading and writing of its file
//
// A thread sets current() before it creates a cache. A thread that does not, or leaves the heap, gets the value of the
// environment variable LLAMA_KV_BACKING:
//   heap       upstream's allocation
//   mmap       anonymous memory
//   DIR        an unlinked temporary file in this directory
//   FILE       this file, whose path contains a '/'; its content is not kept
// LLAMA_KV_BACKING_HUGE=1 requests huge pages, which are faster to touch but are committed in units of 2 MB. A value that
// is not valid has no effect, and effective() describes it: a misspelled word never becomes the name of a file.
//
// Disk space is allocated before the file is mapped and is never freed while it is mapped: a full disk is an error when
// the cache is created, never a SIGBUS later. Therefore trim() releases the memory of a file, but not its disk space.
//
// Without LLAMA_KV_MMAP_SUPPORTED (or with LLAMA_KV_NO_MMAP), all kinds except the heap fail with FAILURE_UNSUPPORTED.
//
// This file uses no type of llama.cpp or ggml and is identical for all their versions. It requires C++11.

#if !defined(LLAMA_KV_NO_MMAP) && (defined(__linux__) || defined(__APPLE__))
#define LLAMA_KV_MMAP_SUPPORTED 1
#else
#define LLAMA_KV_MMAP_SUPPORTED 0
#endif

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if LLAMA_KV_MMAP_SUPPORTED
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/falloc.h>
#endif
#endif

namespace llama_kv_mmap {

enum kind {
    KIND_HEAP,
    KIND_ANON,
    KIND_TEMP, // an unlinked file
    KIND_FILE,
};

enum keep {
    KEEP_NOT,
    KEEP_IT,    // resume the content of the file; flush() saves the cache for a later process
    KEEP_FRESH, // discard the content of the file, then the same as KEEP_IT
};

enum failure {
    FAILURE_NONE,
    FAILURE_UNSUPPORTED, // by the platform or the file system
    FAILURE_MEMORY,
    FAILURE_SPACE,   // the disk is full, or a quota or the file size limit is exceeded
    FAILURE_BUSY,    // another context or process has locked the file
    FAILURE_DIRTY,   // the last owner of the file did not finish with flush()
    FAILURE_FOREIGN, // the file is no cache, or a cache of another model, build or shape
    FAILURE_DAMAGED,
    FAILURE_IO,
};

struct error : std::runtime_error {
    enum failure why;

    error(enum failure reason, const std::string & text) : std::runtime_error(text), why(reason) {}
};

struct options {
    enum kind   kind = KIND_HEAP;
    std::string path; // the file, or the directory for an unlinked file
    enum keep   keep = KEEP_NOT;
    bool        huge = false;

    // Identity of a kept file besides its shape: a file with other values is refused. 127 bytes of each are stored.
    std::string model;
    std::string build;

    uint32_t n_seq_max = 64; // maximum number of sequences; a kept file stores a bit for each per cell

    // Outputs. n_asked: number of caches with a named file since take_made(). failed: reason of the last failure.
    // on_heap: set by use_heap_for(), overrides kind. ignored: a text for each variable with a value that is not valid.
    std::vector<std::string> ignored;

    uint32_t     n_asked = 0;
    enum failure failed  = FAILURE_NONE;
    bool         on_heap = false;
};

// Return the options for the caches that this thread creates next. The reference stays valid in this thread.
inline options & current() {
    static thread_local options res;

    return res;
}

// One tensor of a cache.
struct tensor {
    std::string name;
    std::string type;

    int  layer  = -1;
    bool is_v   = false;
    bool by_row = true; // the values of a cell are contiguous; false: each value has a row of all cells (transposed V)

    size_t n_bytes = 0; // of all streams
    size_t n_cell  = 0; // bytes of a cell if by_row, else bytes of one value of a cell
    size_t offset  = 0; // in bytes from the start of the mapping

    // Bytes of the pages that the tensor occupies, and how many of them are resident in this process.
    size_t n_reserved  = 0;
    size_t n_committed = 0;
};

// Return a checksum of n bytes that detects accidental damage, not manipulation. The seed chains several ranges. Four
// independent sums are computed in parallel, so that the function is as fast as memory is read.
inline uint64_t checksum(const void * data, size_t n, uint64_t seed) {
    const uint64_t a = 0x9e3779b97f4a7c15ull;
    const uint64_t b = 0xd6e8feb86659fd93ull;

    const auto mix = [=](uint64_t sum, uint64_t word) {
        sum = (sum ^ word) * a;
        return sum ^ (sum >> 29);
    };

    const char * at = (const char *) data;

    uint64_t sums[4] = { seed ^ a, seed + b, ~seed, seed ^ (a + b) };
    uint64_t words[4];

    size_t left = n;

    for (; left >= sizeof(words); left -= sizeof(words), at += sizeof(words)) {
        std::memcpy(words, at, sizeof(words));

        for (int i = 0; i < 4; ++i) {
            sums[i] = mix(sums[i], words[i]);
        }
    }

    std::memset(words, 0, sizeof(words));
    std::memcpy(words, at, left);

    uint64_t res = n;

    for (int i = 0; i < 4; ++i) {
        res = mix(res, mix(sums[i], words[i]));
    }

    return res ^ (res >> 32);
}

#if LLAMA_KV_MMAP_SUPPORTED

inline size_t page_size() {
    static const size_t res = (size_t) sysconf(_SC_PAGESIZE);

    return res;
}

inline size_t round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

inline std::string why(const std::string & what, int code) {
    return what + ": " + std::strerror(code);
}

inline enum failure kind_of(int code) {
    return code == ENOSPC || code == EFBIG || code == EDQUOT ? FAILURE_SPACE :
           code == ENOMEM                                    ? FAILURE_MEMORY :
           code == EOPNOTSUPP || code == ENOSYS              ? FAILURE_UNSUPPORTED : FAILURE_IO;
}

// The descriptors of open files. A child of a fork closes them: a lock lasts until the last process that has its
// descriptor, or a mapping of it, ends. Mappings of files are not inherited either.
class open_files {
public:
    static open_files & get() {
        static open_files res;
        return res;
    }

    void add(int * fd) {
        std::lock_guard<std::mutex> lock(mtx);
        all.insert(fd);
    }

    // Close a descriptor; in a child, it was closed already.
    void close(int * fd) {
        std::lock_guard<std::mutex> lock(mtx);
        all.erase(fd);

        if (*fd >= 0) {
            ::close(*fd);
            *fd = -1;
        }
    }

private:
    open_files() {
        ::pthread_atfork([]() { get().mtx.lock(); }, []() { get().mtx.unlock(); }, []() {
            for (int * fd : get().all) {
                ::close(*fd);
                *fd = -1;
            }
            get().mtx.unlock();
        });
    }

    std::mutex      mtx;
    std::set<int *> all;
};

// An open file. A named file is locked until the destructor closes it, so that it has one owner.
class file {
public:
    file() = default;

    file(const file &) = delete;
    file & operator=(const file &) = delete;

    ~file() {
        if (fd >= 0) {
            open_files::get().close(&fd);
        }
    }

    // Open or create the file at path and lock it; if path is a directory, create an unlinked file there. Throws error:
    // FAILURE_BUSY if another owner has the lock, FAILURE_UNSUPPORTED if path is no regular file or not on Linux.
    void open(const std::string & path) {
#ifdef __linux__
        struct stat st;

        if (::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) {
            fd = open_temporary(path);
            if (fd < 0) {
                throw error(kind_of(errno), why("no temporary file in " + path, errno));
            }
            open_files::get().add(&fd);
            return;
        }

        fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT) {
            fd    = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
            is_new = fd >= 0;

            // another process created the file after the first open()
            if (fd < 0 && errno == EEXIST) {
                fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
            }
        }

        if (fd < 0) {
            throw error(kind_of(errno), why(path, errno));
        }
        open_files::get().add(&fd);

        if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
            const int code = errno;
            throw error(code == EWOULDBLOCK ? FAILURE_BUSY : kind_of(code),
                code == EWOULDBLOCK ? path + " is in use by another context or process" : why(path, code));
        }

        if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
            throw error(FAILURE_UNSUPPORTED, path + " is no regular file");
        }
#else
        throw error(FAILURE_UNSUPPORTED, path + ": files as memory of a KV cache need Linux, where their space can be secured");
#endif
    }

    size_t size() const {
        struct stat st;

        return ::fstat(fd, &st) == 0 ? (size_t) st.st_size : 0;
    }

    // Return the bytes that are allocated on disk.
    size_t size_on_disk() const {
        struct stat st;

        return ::fstat(fd, &st) == 0 ? (size_t) st.st_blocks*512 : 0;
    }

    bool read(void * data, size_t n) const {
        return ::pread(fd, data, n, 0) == (ssize_t) n;
    }

    void empty() {
        if (::ftruncate(fd, 0) != 0) {
            throw error(kind_of(errno), why("emptying the file of the KV cache", errno));
        }
    }

    // Throw FAILURE_SPACE if RLIMIT_FSIZE is below n bytes. Exceeding the limit raises SIGXFSZ.
    static void expect(size_t n) {
        struct rlimit limit;

        if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && n > limit.rlim_cur) {
            throw error(FAILURE_SPACE, "files may not have the " + std::to_string(n) + " bytes of the KV cache here (ulimit -f)");
        }
    }

    // Write n bytes at the start of the file. to_disk: return only after they are on disk. Throws error.
    void begin(const void * data, size_t n, bool to_disk) {
        const ssize_t res = ::pwrite(fd, data, n, 0);

        if (res != (ssize_t) n || (to_disk && ::fsync(fd) != 0)) {
            const int code = res >= 0 && res < (ssize_t) n ? ENOSPC : errno;
            throw error(kind_of(code), why("beginning the file of the KV cache", code));
        }
    }

    // Allocate disk blocks for the first n bytes, so that no later write can run out of space. Throws error.
    void secure(size_t n) {
        expect(n);
#ifdef __linux__
        // posix_fallocate() falls back to writing to each block, which does not reserve space on every file system
        int code;
        do {
            code = ::fallocate(fd, 0, 0, (off_t) n) == 0 ? 0 : errno;
        } while (code == EINTR);

        if (code != 0) {
            throw error(kind_of(code), why("securing " + std::to_string(n) + " bytes for the KV cache", code));
        }
#endif
    }

    // Make a range read as zeros, free its memory, and keep its disk space. Return false if the file system cannot.
    bool zero(size_t offset, size_t n) {
#ifdef __linux__
        int code;
        do {
            code = ::fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, (off_t) offset, (off_t) n) == 0 ? 0 : errno;
        } while (code == EINTR);

        return code == 0;
#else
        (void) offset;
        (void) n;

        return false;
#endif
    }

    bool is_open() const { return fd >= 0; }

    int  fd     = -1;
    bool is_new = false; // created by open()

private:
#ifdef __linux__
    static int open_temporary(const std::string & dir) {
        int res = ::open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

        if (res < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
            std::string name = dir + "/llama-kv-XXXXXX";

            res = ::mkostemp(&name[0], O_CLOEXEC);
            if (res >= 0) {
                ::unlink(name.c_str());
            }
        }

        return res;
    }
#endif
};

// A range of mapped memory. It reads as zeros, or as the content of its file, until it is written.
class mapping {
public:
    // Map len bytes of the file `behind`, which is open, has at least len bytes and must outlive the mapping; nullptr
    // maps anonymous memory. huge: request huge pages. Throws error.
    mapping(file * behind, size_t len, bool huge) : f(behind), n(len) {
        // MAP_NORESERVE: most of a cache may never be written, so no swap space is reserved for it
        const int flags = f ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

        void * res = ::mmap(nullptr, n, PROT_READ | PROT_WRITE, flags, f ? f->fd : -1, 0);
        if (res == MAP_FAILED) {
            throw error(kind_of(errno), why("mapping " + std::to_string(n) + " bytes for the KV cache", errno));
        }

        base = (char *) res;
#ifdef __linux__
        // Without `huge`, huge pages are disabled: the first cell of a tensor would commit 2 MB. A kernel without huge
        // pages fails this call and uses small pages, so the result is ignored.
        ::madvise(base, n, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);

        if (f) {
            ::madvise(base, n, MADV_DONTFORK); // see open_files; a child would also write into the file
        }
#else
        (void) huge;
#endif
    }

    mapping(const mapping &) = delete;
    mapping & operator=(const mapping &) = delete;

    ~mapping() {
        ::munmap(base, n);
    }

    char * data() const { return base; }
    size_t size() const { return n; }

    // Release the whole pages within a range; they read as zeros afterwards. Return the number of bytes released.
    size_t release(size_t offset, size_t len) {
        const size_t begin = round_up(offset, page_size());
        const size_t end   = (offset + len) / page_size() * page_size();

        return begin < end && drop(begin, end - begin) ? end - begin : 0;
    }

    // Set a range to zero. Whole pages are released if the system can, so that they use no memory.
    void zero(size_t offset, size_t len) {
        const size_t n_released = release(offset, len);
        const size_t begin      = round_up(offset, page_size());

        if (n_released == 0) {
            std::memset(base + offset, 0, len);
            return;
        }

        std::memset(base + offset, 0, begin - offset);
        std::memset(base + begin + n_released, 0, offset + len - begin - n_released);
    }

    // Write the pages of a range to the file and wait until they are on disk. Throws error.
    void sync(size_t offset, size_t len) {
        const size_t begin = offset / page_size() * page_size();

        if (::msync(base + begin, offset + len - begin, MS_SYNC) != 0) {
            throw error(kind_of(errno), why("writing the KV cache to its file", errno));
        }
    }

private:
    bool drop(size_t offset, size_t len) {
        if (f) {
            return f->zero(offset, len);
        }
#ifdef __linux__
        return ::madvise(base + offset, len, MADV_DONTNEED) == 0;
#else
        // other systems may keep the content of pages after MADV_DONTNEED
        return ::mmap(base + offset, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
#endif
    }

    file * f;
    char * base = nullptr;
    size_t n;
};

// Return the resident bytes of a range of whole pages; 0 if the system does not report them.
inline size_t count_committed(const char * begin, size_t n) {
    const size_t n_pages = n/page_size();

    size_t res = 0;
#ifdef __linux__
    // bits of an entry of pagemap; EXCLUSIVE: no other process maps the page
    const uint64_t PRESENT   = 1ull << 63;
    const uint64_t OF_FILE   = 1ull << 61;
    const uint64_t EXCLUSIVE = 1ull << 56;

    // A page that was only read is the kernel's page of zeros, which uses no memory: it is present, anonymous and not
    // exclusive. So is a page that a forked process shares, which has content.
    const auto is_zero = [](const char * page) {
        return *page == 0 && std::memcmp(page, page + 1, page_size() - 1) == 0;
    };

    std::vector<uint64_t> entries(n_pages);

    const int     fd     = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    const size_t  n_read = n_pages*sizeof(uint64_t);
    const ssize_t n_done = fd < 0 ? -1 : ::pread(fd, entries.data(), n_read, (off_t) ((uintptr_t) begin/page_size()*sizeof(uint64_t)));

    if (fd >= 0) {
        ::close(fd);
    }

    if (n_done == (ssize_t) n_read) {
        for (size_t i = 0; i < n_pages; ++i) {
            if (entries[i] & PRESENT && (entries[i] & (OF_FILE | EXCLUSIVE) || !is_zero(begin + i*page_size()))) {
                res += page_size();
            }
        }

        return res;
    }

    std::vector<unsigned char> pages(n_pages);
#else
    std::vector<char> pages(n_pages);
#endif
    // counts pages of zeros too
    if (::mincore((void *) (uintptr_t) begin, n, pages.data()) == 0) {
        for (const auto page : pages) {
            res += page & 1 ? page_size() : 0;
        }
    }

    return res;
}

// The header of a kept file. It is followed by the search heads of all streams (uint64_t), the sequences (n_words
// uint64_t per cell), positions (int32_t) and tokens (int32_t) of all cells, and then the tensors at their offsets.
struct header {
    char     magic[8];
    uint32_t format;
    uint32_t state; // not covered by sum

    uint64_t sum;        // of all fields after this one
    uint64_t sum_cells;  // of the heads, sequences, positions and tokens
    uint64_t sum_data;   // of the data, up to the last used cell of each stream
    uint64_t generation; // number of flushes
    uint64_t n_bytes;    // size of the file
    uint64_t n_page;     // page size in bytes
    uint32_t n_cells;    // per stream
    uint32_t n_stream;
    uint32_t n_words;    // per cell; one bit per sequence
    uint32_t n_tensors;
    uint64_t layout;     // checksum of the names, types, sizes and offsets of all tensors

    char shape[128];
    char model[128];
    char build[128];
};

// Values of header::state. They differ in every byte, so that a damaged byte does not turn one into another.
enum : uint32_t {
    STATE_SCRATCH = 0x96699669, // the file is not kept
    STATE_DIRTY   = 0x5aa55aa5,
    STATE_CLEAN   = 0xc33cc33c,
};

inline const char * magic() { return "llama-kv"; }

enum : uint32_t { FORMAT = 3 };

// The mapping of one cache, and its file if it has one.
class backing {
public:
    // Callbacks that read and write all cells of a stream. pos: one per cell, -1 if free. seqs: n_words words per cell,
    // one bit per sequence. head, the result of cells_read: the index where the search for free cells starts, so that a
    // resumed cache uses the same cells.
    using cells_read  = std::function<uint32_t(uint32_t stream, int32_t * pos, uint64_t * seqs, uint32_t n_words)>;
    using cells_write = std::function<void(uint32_t stream, const int32_t * pos, const uint64_t * seqs, uint32_t n_words, uint32_t head)>;

    // Map the memory for the tensors `list` and set their offsets. number: index of the cache in its context; cache 0
    // uses the file asked.path, the others asked.path + "." + number. cells: per stream. Throws error.
    backing(const options & asked, uint32_t number, std::vector<tensor> list, uint32_t cells, uint32_t streams) :
        opts(asked), n_cells(cells), n_stream(streams), n_words((asked.n_seq_max + 63)/64), tensors(std::move(list)) {

        path = number == 0 ? opts.path : opts.path + "." + std::to_string(number);

        // The tensors follow the head in whole pages without gaps, so that all memory after the head can be one buffer
        // of ggml, and no page contains parts of two tensors.
        const size_t unit = opts.huge ? 2u << 20 : page_size();

        n_head = opts.kind == KIND_ANON ? 0 : round_up(sizeof(header) + n_meta(), unit);

        size_t n = n_head;

        for (auto & t : tensors) {
            t.offset     = n;
            t.n_reserved = round_up(std::max<size_t>(t.n_bytes, 1), unit);

            n += t.n_reserved;
        }

        if (opts.kind != KIND_ANON) {
            open_file(n);
        }

        map.reset(new mapping(f.is_open() ? &f : nullptr, n, opts.huge));

        if (has_content) {
            verify();
        }
    }

    backing(const backing &) = delete;
    backing & operator=(const backing &) = delete;

    ~backing() {
        // remove a file that this object created, unless it is kept and was changed or flushed
        if (f.is_new && !(get_is_kept() && is_touched)) {
            ::unlink(path.c_str());
        }
    }

    // The whole mapping: offsets of tensors are relative to it.
    char * data() const { return map->data(); }
    size_t size() const { return map->size(); }

    // The memory of all tensors. Every byte of it may be read and written.
    char * get_buffer()      const { return data() + n_head; }
    size_t get_buffer_size() const { return size() - n_head; }

    const std::vector<tensor> & get_tensors() const { return tensors; }

    const std::string & get_path() const { return path; }

    enum kind get_kind()       const { return opts.kind; }
    uint32_t  get_n_cells()    const { return n_cells; }
    uint32_t  get_n_stream()   const { return n_stream; }
    bool      get_is_kept()    const { return opts.keep != KEEP_NOT; }
    bool      get_is_resumed() const { return has_content; }
    uint64_t  get_generation() const { return f.is_open() ? head()->generation : 0; }
    size_t    get_file_bytes() const { return f.is_open() ? f.size_on_disk() : 0; }

    // Set the callbacks, after the cache is created, and write the cells of a resumed file to the cache.
    void attach(cells_read f_read, cells_write f_write) {
        is_made = true;
        read    = std::move(f_read);
        write   = std::move(f_write);

        for (uint32_t s = 0; has_content && s < n_stream; ++s) {
            write(s, pos(s), seqs(s), n_words, (uint32_t) std::min<uint64_t>(heads()[s], n_cells - 1));
        }
    }

    // Mark a kept file as dirty and wait until the mark is on disk. Call this before each change of the data.
    void touch() {
        is_touched = true;

        if (get_is_kept() && head()->state == STATE_CLEAN) {
            head()->state = STATE_DIRTY;
            map->sync(0, sizeof(header));
        }
    }

    // Set all data to zero. Does nothing before attach(): new memory is zero, and the data of a resumed file stays.
    void clear() {
        if (!is_made) {
            return;
        }

        touch();

        for (const auto & t : tensors) {
            map->zero(t.offset, t.n_bytes);
        }
    }

    // Release the memory of the free cells after the last used cell of each stream. Return the resident bytes released.
    // Requires that nothing is pending: a pending copy may read the data of cells that are already free.
    size_t trim() {
        if (!read) {
            return 0;
        }

        const auto before = committed();

        for (uint32_t s = 0; s < n_stream; ++s) {
            const uint32_t n_used = used_max(s);

            touch();
            each_range(s, [&](const tensor &, size_t begin, size_t n_one) {
                map->release(begin + n_used*n_one, (n_cells - n_used)*n_one);
            }, n_used == 0);
        }

        const auto after = committed();

        return before > after ? before - after : 0;
    }

    // Copy the data of stream src to stream dst, up to the last cell that any stream uses: copying all cells would
    // commit all pages of dst.
    void copy(uint32_t src, uint32_t dst) {
        // the maximum of all streams: src may contain data of an earlier copy although its cells are free again
        uint32_t n_used = 0;
        for (uint32_t s = 0; s < n_stream; ++s) {
            n_used = std::max(n_used, used_max(s));
        }

        touch();
        each_range(src, [&](const tensor & t, size_t begin, size_t n_one) {
            const size_t n_part = t.n_bytes/n_stream;

            std::memcpy(data() + begin - src*n_part + dst*n_part, data() + begin, n_used*n_one);
        }, false);
    }

    bool owns(const void * p) const {
        return p >= data() && p < data() + size();
    }

    // Return the resident bytes of all tensors, and update n_committed of each.
    size_t committed() {
        size_t res = 0;
        for (auto & t : tensors) {
            t.n_committed = count_committed(data() + t.offset, t.n_reserved);

            res += t.n_committed;
        }

        return res;
    }

    size_t reserved() const {
        size_t res = 0;
        for (const auto & t : tensors) {
            res += t.n_reserved;
        }

        return res;
    }

    // Write all data and cells to the file and mark it clean. tokens: one for each cell of all streams, or nullptr,
    // which stores -1. Requires attach(), and that nothing is pending. Throws error.
    void flush(const int32_t * tokens) {
        if (!get_is_kept()) {
            throw error(FAILURE_UNSUPPORTED, "this KV cache is not kept: there is nothing to flush");
        }

        header * h = head();

        is_touched = true;

        if (h->state != STATE_DIRTY) {
            h->state = STATE_DIRTY;
            map->sync(0, sizeof(header));
        }

        for (uint32_t s = 0; s < n_stream; ++s) {
            heads()[s] = read(s, pos(s), seqs(s), n_words);
        }

        for (size_t i = 0; i < (size_t) n_stream*n_cells; ++i) {
            cell_tokens()[i] = tokens ? tokens[i] : -1;
        }

        h->sum_cells = checksum((const char *) (h + 1), n_meta(), 1);
        h->sum_data  = sum_data();
        h->generation++;
        h->sum = sum_header(*h);

        // the state is written last: after an interruption before that, the file is dirty
        map->sync(0, n_head);
        for (const auto & t : tensors) {
            map->sync(t.offset, t.n_reserved);
        }

        h->state = STATE_CLEAN;
        map->sync(0, sizeof(header));
    }

    // Return the tokens that the last flush() stored, n_cells*n_stream of them, owned by the mapping. Requires a file.
    const int32_t * get_tokens() const { return cell_tokens(); }

private:
    size_t n_meta() const {
        return n_stream*(sizeof(uint64_t) + n_cells*(n_words*sizeof(uint64_t) + 2*sizeof(int32_t)));
    }

    header * head() const { return (header *) map->data(); }

    uint64_t * heads() const { return (uint64_t *) (head() + 1); }

    uint64_t * seqs(uint32_t s) const { return heads() + n_stream + (size_t) s*n_cells*n_words; }

    int32_t * pos(uint32_t s) const { return (int32_t *) seqs(n_stream) + (size_t) s*n_cells; }

    int32_t * cell_tokens() const { return pos(n_stream); }

    // Return the index of the last used cell plus one; 0 if no cell is used.
    uint32_t used_max(uint32_t s) const {
        std::vector<int32_t>  p(n_cells);
        std::vector<uint64_t> q((size_t) n_cells*n_words);

        read(s, p.data(), q.data(), n_words);

        uint32_t res = n_cells;
        while (res > 0 && p[res - 1] < 0) {
            --res;
        }

        return res;
    }

    // Call visit(tensor, offset of the first cell, bytes per cell) for each contiguous run of all cells of stream s:
    // once per tensor if by_row, else once per row. whole: always once per tensor, with the bytes per cell of all rows.
    template <typename F>
    void each_range(uint32_t s, F visit, bool whole) const {
        for (const auto & t : tensors) {
            const size_t n_part = t.n_bytes/n_stream;
            const size_t n_row  = n_cells*t.n_cell;

            if (n_part == 0) {
                continue;
            }

            if (whole) {
                visit(t, t.offset + s*n_part, n_part/n_cells);
                continue;
            }

            for (size_t at = 0; at + n_row <= n_part; at += n_row) {
                visit(t, t.offset + s*n_part + at, t.n_cell);
            }
        }
    }

    uint64_t sum_data() const {
        uint64_t res = 0;

        for (uint32_t s = 0; s < n_stream; ++s) {
            uint32_t n_used = n_cells;
            while (n_used > 0 && pos(s)[n_used - 1] < 0) {
                --n_used;
            }

            each_range(s, [&](const tensor &, size_t begin, size_t n_one) {
                res = checksum(data() + begin, n_used*n_one, res);
            }, false);
        }

        return res;
    }

    static uint64_t sum_header(const header & h) {
        const char * begin = (const char *) &h.sum_cells;

        return checksum(begin, (const char *) (&h + 1) - begin, FORMAT);
    }

    void fill_header(header * h) const {
        std::memset((void *) h, 0, sizeof(*h));
        std::memcpy(h->magic, magic(), sizeof(h->magic));

        h->format    = FORMAT;
        h->state     = get_is_kept() ? STATE_DIRTY : STATE_SCRATCH;
        h->n_bytes   = n_file;
        h->n_page    = page_size();
        h->n_cells   = n_cells;
        h->n_stream  = n_stream;
        h->n_words   = n_words;
        h->n_tensors = (uint32_t) tensors.size();

        std::string type_k = "none";
        std::string type_v = "none";
        bool        by_row = true;

        for (const auto & t : tensors) {
            h->layout = checksum(t.name.data(), t.name.size(), h->layout);
            h->layout = checksum(t.type.data(), t.type.size(), h->layout);

            const uint64_t numbers[] = { t.by_row, t.n_bytes, t.n_cell, t.offset };
            h->layout = checksum(numbers, sizeof(numbers), h->layout);

            (t.is_v ? type_v : type_k) = t.type;
            by_row = by_row && t.by_row;
        }

        std::snprintf(h->shape, sizeof(h->shape), "%u x %u cells, %u tensors, K %s, V %s by %s", n_stream, n_cells,
            (unsigned) tensors.size(), type_k.c_str(), type_v.c_str(), by_row ? "rows" : "columns");
        std::snprintf(h->model, sizeof(h->model), "%s", opts.model.c_str());
        std::snprintf(h->build, sizeof(h->build), "%s", opts.build.c_str());

        h->sum = sum_header(*h);
    }

    void open_file(size_t n) {
        n_file = n;

        f.open(path);

        if (opts.kind == KIND_FILE && f.size() > 0) {
            check_header();
        }

        if (!has_content) {
            header h;
            fill_header(&h);

            try {
                // the header is written first, so that the file is identified as a cache after an interruption
                f.empty();
                f.expect(n);
                f.begin(&h, sizeof(h), opts.kind == KIND_FILE);
                f.secure(n);
            } catch (...) {
                if (f.is_new) {
                    ::unlink(path.c_str());
                } else if (::ftruncate(f.fd, 0) != 0) {
                    // ignored: the file is unchanged or empty, or its header is incomplete, dirty or scratch
                }
                throw;
            }
        }
    }

    // Check the header of an existing file. Set has_content if the file is resumed; leave it unset if the file may be
    // overwritten. Throws error, and leaves the file unchanged, if it is dirty, foreign or damaged.
    void check_header() {
        header found;
        header want;

        fill_header(&want);

        const size_t n_found = std::min(f.size(), sizeof(found));

        if (n_found < sizeof(found.magic) || !f.read(&found, n_found) ||
            std::memcmp(found.magic, magic(), sizeof(found.magic)) != 0) {
            throw error(FAILURE_FOREIGN, path + " holds something else than a KV cache and is left as it is");
        }

        // an interrupted write left an incomplete header
        if (n_found < sizeof(found)) {
            if (opts.keep == KEEP_FRESH) {
                return;
            }
            throw dirty();
        }

        if (opts.keep == KEEP_FRESH || (opts.keep == KEEP_NOT && found.state == STATE_SCRATCH)) {
            return;
        }

        if (opts.keep == KEEP_NOT) {
            throw error(FAILURE_FOREIGN, path + " holds a kept KV cache: ask to keep it, or choose another file");
        }

        if (found.format != FORMAT) {
            throw error(FAILURE_FOREIGN, path + " has format " + std::to_string(found.format) + ", expected " + std::to_string(FORMAT));
        }

        if (found.state == STATE_SCRATCH) {
            return;
        }

        if (found.state != STATE_DIRTY && found.state != STATE_CLEAN) {
            throw error(FAILURE_DAMAGED, path + " is damaged: nothing says in which state it is");
        }

        if (found.sum != sum_header(found)) {
            throw found.state == STATE_DIRTY ? dirty() : error(FAILURE_DAMAGED, path + " is damaged: the sum of its header is wrong");
        }

        for (auto * text : { found.shape, found.model, found.build }) {
            text[sizeof(found.shape) - 1] = 0;
        }

        if (std::strcmp(found.model, want.model) != 0) {
            throw error(FAILURE_FOREIGN, path + " was kept for another model (" + found.model + ", this one is " + want.model + ")");
        }

        if (std::strcmp(found.build, want.build) != 0) {
            throw error(FAILURE_FOREIGN, path + " was kept by another build (" + found.build + ", this one is " + want.build + ")");
        }

        if (found.n_page != want.n_page || found.n_cells != want.n_cells || found.n_stream != want.n_stream ||
            found.n_words != want.n_words || found.n_tensors != want.n_tensors || found.layout != want.layout ||
            found.n_bytes != want.n_bytes) {
            throw error(FAILURE_FOREIGN, path + " has another shape: " + found.shape + ", expected " + want.shape);
        }

        if (found.state != STATE_CLEAN) {
            throw dirty();
        }

        if (f.size() < n_file) {
            throw error(FAILURE_DAMAGED, path + " is damaged: it has " + std::to_string(f.size()) + " bytes of " + std::to_string(n_file));
        }

        // a copied file may be sparse, without blocks for ranges of zeros
        f.secure(n_file);

        has_content = true;
    }

    error dirty() const {
        return error(FAILURE_DIRTY, path + " is dirty: its last owner wrote to it and did not finish");
    }

    void verify() const {
        if (head()->sum_cells != checksum((const char *) (head() + 1), n_meta(), 1) || head()->sum_data != sum_data()) {
            throw error(FAILURE_DAMAGED, path + " is damaged: the sum of its content is wrong");
        }
    }

    const options opts;

    const uint32_t n_cells;
    const uint32_t n_stream;
    const uint32_t n_words;

    std::string path;

    std::vector<tensor> tensors;

    size_t n_head = 0;
    size_t n_file = 0;

    bool has_content = false;
    bool is_made     = false;
    bool is_touched  = false;

    file f;

    std::unique_ptr<mapping> map;

    cells_read  read;
    cells_write write;
};

#else

// Stub with the same interface. The constructor throws, so no object exists and no other function is called.
class backing {
public:
    using cells_read  = std::function<uint32_t(uint32_t, int32_t *, uint64_t *, uint32_t)>;
    using cells_write = std::function<void(uint32_t, const int32_t *, const uint64_t *, uint32_t, uint32_t)>;

    backing(const options &, uint32_t, std::vector<tensor>, uint32_t, uint32_t) {
        throw error(FAILURE_UNSUPPORTED, "this platform has no mapped memory for the KV cache: use the heap");
    }

    char * data() const { return nullptr; }
    size_t size() const { return 0; }
    char * get_buffer() const { return nullptr; }
    size_t get_buffer_size() const { return 0; }

    const std::vector<tensor> & get_tensors() const { return tensors; }

    const std::string & get_path() const { return path; }

    enum kind get_kind()       const { return KIND_HEAP; }
    uint32_t  get_n_cells()    const { return 0; }
    uint32_t  get_n_stream()   const { return 0; }
    bool      get_is_kept()    const { return false; }
    bool      get_is_resumed() const { return false; }
    uint64_t  get_generation() const { return 0; }
    size_t    get_file_bytes() const { return 0; }

    void attach(cells_read, cells_write) {}
    void touch() {}
    void clear() {}
    size_t trim() { return 0; }
    void copy(uint32_t, uint32_t) {}
    bool owns(const void *) const { return false; }
    size_t committed() { return 0; }
    size_t reserved() const { return 0; }
    void flush(const int32_t *) {}
    const int32_t * get_tokens() const { return nullptr; }

private:
    std::vector<tensor> tensors;
    std::string         path;
};

#endif

// Return whether path is a directory.
inline bool is_directory(const std::string & path) {
#if LLAMA_KV_MMAP_SUPPORTED
    struct stat st;

    return ::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
#else
    (void) path;

    return false;
#endif
}

// Return the value of a variable; an empty text if it is not set.
inline std::string get_variable(const char * name) {
    const char * res = std::getenv(name);

    return res ? res : "";
}

// Return current(), or the options of the environment for what it leaves at the default. A path that is a directory
// selects KIND_TEMP.
inline options effective() {
    options res = current();

    const std::string backing = get_variable("LLAMA_KV_BACKING");
    const std::string huge    = get_variable("LLAMA_KV_BACKING_HUGE");

    const auto ignore = [&](const char * name, const std::string & value, const char * expected) {
        res.ignored.push_back(std::string(name) + " is '" + value.substr(0, 100) + "', which is ignored; expected " + expected);
    };

    const bool is_path = backing.find('/') != std::string::npos || is_directory(backing);

    if (!backing.empty() && backing != "heap" && backing != "mmap" && !is_path) {
        ignore("LLAMA_KV_BACKING", backing, "heap, mmap, a directory, or a file whose path contains a '/'");
    } else if (!backing.empty() && res.kind == KIND_HEAP) {
        res.kind = backing == "heap" ? KIND_HEAP : backing == "mmap" ? KIND_ANON : KIND_FILE;
        res.path = res.kind == KIND_FILE ? backing : "";
        res.keep = KEEP_NOT;
    }

    if (huge == "1") {
        res.huge = true;
    } else if (!huge.empty() && huge != "0") {
        ignore("LLAMA_KV_BACKING_HUGE", huge, "1 or 0");
    }

    if (res.on_heap) {
        res.kind = KIND_HEAP;
        res.keep = KEEP_NOT;
    }

    if (res.kind == KIND_FILE && is_directory(res.path)) {
        res.kind = KIND_TEMP;
    }

    return res;
}

// Call this before the memory of a context is created. Return whether the options select mapped memory, which a model
// of this architecture does not support: the caches are then on the heap until take_made(). DeepSeek V4 stores rows that
// summarize several tokens and have no cells. Copying and trimming up to the last used cell would lose them.
inline bool use_heap_for(const std::string & arch) {
    current().on_heap = false;
    current().on_heap = arch == "deepseek4" && effective().kind != KIND_HEAP;

    return current().on_heap;
}

// Return the list of caches that this thread created since the last take_made().
inline std::vector<std::weak_ptr<backing>> & made() {
    static thread_local std::vector<std::weak_ptr<backing>> res;

    return res;
}

// Return the live entries of made(), clear it, and reset n_asked and on_heap. Call this once per context.
inline std::vector<std::weak_ptr<backing>> take_made() {
    std::vector<std::weak_ptr<backing>> res;

    // contexts whose creation failed leave expired entries
    for (const auto & one : made()) {
        if (!one.expired()) {
            res.push_back(one);
        }
    }

    made().clear();

    current().n_asked = 0;
    current().on_heap = false;

    return res;
}

// Create the backing of one cache and add it to made(). Return nullptr if the options select the heap. Throws error and
// stores its reason in current().failed.
inline std::shared_ptr<backing> make(std::vector<tensor> tensors, uint32_t n_cells, uint32_t n_stream) {
    const auto opts = effective();

    if (opts.kind == KIND_HEAP) {
        return nullptr;
    }

    try {
        if (opts.keep != KEEP_NOT && opts.kind != KIND_FILE) {
            throw error(FAILURE_UNSUPPORTED, "a KV cache without a file of its own cannot be kept");
        }

        const auto number = opts.kind == KIND_FILE ? current().n_asked++ : 0;

        auto res = std::make_shared<backing>(opts, number, std::move(tensors), n_cells, n_stream);

        made().push_back(res);

        return res;
    } catch (const error & e) {
        current().failed = e.why;
        throw;
    }
}

} // namespace llama_kv_mmap

#endif // LLAMA_KV_MMAP_H
