/* Inject a fault into the n-th change of a file below a directory, in a process and its children.
 *
 * Loaded by LD_PRELOAD. The environment has the parameters, read when the process starts and again
 * by plf_arm(): PLF_ROOT (the directory), PLF_SHARED (a file with the counts of all processes),
 * PLF_AT (index of the change, from 1), PLF_DO (the fault: see `act`), PLF_GROUP (the process group
 * to kill) and PLF_CLOCK (seconds that the clock jumps at that change).
 *
 * Without PLF_DO changes are only counted. Names are compared as they are given, so PLF_ROOT and
 * all processes must use the real, absolute path; relative names are resolved against the current
 * directory or the descriptor.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(result, name, ...)                                  \
    static result (*real_##name)(__VA_ARGS__);                   \
    if (!real_##name) real_##name = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* Shared memory of all processes of an attempt; the driver maps it too. */
struct shared {
    _Atomic long count;   /* changes so far */
    _Atomic long stopped; /* the process that stopped itself, 0 before */
    _Atomic long hit;     /* number of injected faults, or of limits that were reached */
};

static struct shared *shared;
static char root[4096];
static size_t root_length;
static long at;
static long group;
static long clock_jump;
static char todo[16];

static const char *variable(const char *name) {
    const char *found = getenv(name);
    return found ? found : "";
}

void plf_arm(void) {
    REAL(int, open, const char *, int, ...);
    root_length = 0;
    if (shared) munmap(shared, sizeof *shared);
    shared = NULL;
    snprintf(root, sizeof root, "%s", variable("PLF_ROOT"));
    snprintf(todo, sizeof todo, "%s", variable("PLF_DO"));
    at = atol(variable("PLF_AT"));
    group = atol(variable("PLF_GROUP"));
    clock_jump = atol(variable("PLF_CLOCK"));
    int file = *variable("PLF_SHARED") ? real_open(variable("PLF_SHARED"), O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *place = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (place == MAP_FAILED) return;
    shared = place;
    root_length = strlen(root);
}

__attribute__((constructor)) static void begin(void) { plf_arm(); }

/* Kinds of changes: those that need space, those that may fail otherwise, and removals, which fail
 * for neither reason but count as locations for a kill. */
enum kind { ROOM, PLAIN, REMOVAL };

/* Return 0 to allow a change, an errno to fail it, or -1 to write half of the data. */
static int act(enum kind kind, int is_write) {
    long number = atomic_fetch_add(&shared->count, 1) + 1;
    if (!*todo || number < at) return 0;
    int first = number == at;
    if (!strcmp(todo, "full")) {
        if (kind != ROOM) return 0;
        return atomic_fetch_add(&shared->hit, 1) == 0 && is_write ? -1 : ENOSPC;
    }
    if (!strcmp(todo, "once") || !strcmp(todo, "eio")) {
        if (kind == REMOVAL || (kind == PLAIN && *todo == 'o')) return 0;
        if (atomic_fetch_add(&shared->hit, 1)) return 0;
        return *todo == 'o' ? ENOSPC : EIO;
    }
    if (!first) return 0;
    atomic_fetch_add(&shared->hit, 1);
    if (!strcmp(todo, "kill") || !strcmp(todo, "one")) return is_write ? -1 : -2;
    if (!strcmp(todo, "stop")) {
        atomic_store(&shared->stopped, getpid());
        raise(SIGSTOP);
    }
    return 0;
}

static void die(void) {
    if (!strcmp(todo, "kill") && group > 0) kill((pid_t)-group, SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Count errors for lack of space on the disk or in one file; return the result unchanged. */
static long met(long result) {
    if (result < 0 && (errno == ENOSPC || errno == EFBIG) && shared && !*todo) {
        atomic_fetch_add(&shared->hit, 1);
    }
    return result;
}

/* Return whether a path is below the directory. */
static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int mine_at(int dir, const char *path) {
    char place[4096 + 64];
    if (!shared || !root_length || !path) return 0;
    if (*path == '/') return below(path);
    if (dir == AT_FDCWD) return getcwd(place, sizeof place) && below(place);
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t n = readlink(link, place, sizeof place - 1);
    if (n < 0) return 0;
    place[n] = 0;
    return below(place);
}

static int mine(int file) {
    struct stat facts;
    int kept = errno;
    int found = shared && root_length && !fstat(file, &facts) && S_ISREG(facts.st_mode) &&
                mine_at(file, "");
    errno = kept;
    return found;
}

static int strike(enum kind kind) {
    int kept = errno;
    int what = act(kind, 0);
    errno = kept;
    if (what == -2) die();
    return what > 0 ? what : 0;
}

#define CHANGE(kind, condition)                        \
    if (condition) {                                   \
        int wrong = strike(kind);                      \
        if (wrong) {                                   \
            errno = wrong;                             \
            return -1;                                 \
        }                                              \
    }

#define WRITES (O_CREAT | O_TRUNC)

static int opening(int dir, const char *path, int flags) {
    return (flags & WRITES) && mine_at(dir, path);
}

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        REAL(int, name, const char *, int, ...);                          \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                     \
        CHANGE(ROOM, opening(AT_FDCWD, path, flags))                      \
        return (int)met(real_##name(path, flags, mode));                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    int name(int dir, const char *path, int flags, ...) {                 \
        REAL(int, name, int, const char *, int, ...);                     \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                     \
        CHANGE(ROOM, opening(dir, path, flags))                           \
        return (int)met(real_##name(dir, path, flags, mode));             \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        REAL(FILE *, name, const char *, const char *);                   \
        if (mode && *mode != 'r' && mine_at(AT_FDCWD, path)) {            \
            int wrong = strike(ROOM);                                     \
            if (wrong) {                                                  \
                errno = wrong;                                            \
                return NULL;                                              \
            }                                                             \
        }                                                                 \
        FILE *file = real_##name(path, mode);                             \
        if (!file) met(-1);                                               \
        return file;                                                      \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* A write that is interrupted by a kill or a full disk writes half of its data. */
#define WRITE(name, count_type, first, parameters, arguments, halved)     \
    ssize_t name parameters {                                             \
        static ssize_t (*real) parameters;                                \
        if (!real) real = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name); \
        if (mine(first)) {                                                \
            int kept = errno;                                             \
            int what = act(ROOM, size > 1);                               \
            errno = kept;                                                 \
            if (what == -1) {                                             \
                size /= 2;                                                \
                ssize_t done = real halved;                               \
                if (strcmp(todo, "full")) die();                          \
                return done;                                              \
            }                                                             \
            if (what == -2) die();                                        \
            if (what > 0) {                                               \
                errno = what;                                             \
                return -1;                                                \
            }                                                             \
        }                                                                 \
        return met(real arguments);                                       \
    }
WRITE(write, size_t, file, (int file, const void *data, size_t size), (file, data, size),
      (file, data, size))
WRITE(pwrite, size_t, file, (int file, const void *data, size_t size, off_t where),
      (file, data, size, where), (file, data, size, where))
WRITE(pwrite64, size_t, file, (int file, const void *data, size_t size, off64_t where),
      (file, data, size, where), (file, data, size, where))
WRITE(sendfile, size_t, file, (int file, int from, off_t *where, size_t size),
      (file, from, where, size), (file, from, where, size))
WRITE(sendfile64, size_t, file, (int file, int from, off64_t *where, size_t size),
      (file, from, where, size), (file, from, where, size))
WRITE(copy_file_range, size_t, file,
      (int from, off64_t *there, int file, off64_t *where, size_t size, unsigned flags),
      (from, there, file, where, size, flags), (from, there, file, where, size, flags))

#define SIMPLE(kind, name, condition, parameters, arguments)              \
    int name parameters {                                                 \
        static int (*real) parameters;                                    \
        if (!real) real = (int (*) parameters)dlsym(RTLD_NEXT, #name);    \
        CHANGE(kind, condition)                                           \
        return (int)met(real arguments);                                  \
    }
SIMPLE(PLAIN, rename, mine_at(AT_FDCWD, to), (const char *from, const char *to), (from, to))
SIMPLE(PLAIN, renameat, mine_at(b, to), (int a, const char *from, int b, const char *to),
       (a, from, b, to))
SIMPLE(PLAIN, renameat2, mine_at(b, to),
       (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags))
SIMPLE(ROOM, link, mine_at(AT_FDCWD, to), (const char *from, const char *to), (from, to))
SIMPLE(ROOM, linkat, mine_at(b, to), (int a, const char *from, int b, const char *to, int flags),
       (a, from, b, to, flags))
SIMPLE(ROOM, symlink, mine_at(AT_FDCWD, to), (const char *from, const char *to), (from, to))
SIMPLE(ROOM, symlinkat, mine_at(b, to), (const char *from, int b, const char *to), (from, b, to))
SIMPLE(ROOM, mkdir, mine_at(AT_FDCWD, path), (const char *path, mode_t mode), (path, mode))
SIMPLE(ROOM, mkdirat, mine_at(dir, path), (int dir, const char *path, mode_t mode),
       (dir, path, mode))
SIMPLE(REMOVAL, unlink, mine_at(AT_FDCWD, path), (const char *path), (path))
SIMPLE(REMOVAL, unlinkat, mine_at(dir, path), (int dir, const char *path, int flags),
       (dir, path, flags))
SIMPLE(REMOVAL, rmdir, mine_at(AT_FDCWD, path), (const char *path), (path))
SIMPLE(PLAIN, ftruncate, mine(file), (int file, off_t size), (file, size))
SIMPLE(PLAIN, ftruncate64, mine(file), (int file, off64_t size), (file, size))
SIMPLE(ROOM, fallocate, mine(file), (int file, int mode, off_t from, off_t size),
       (file, mode, from, size))
SIMPLE(ROOM, fallocate64, mine(file), (int file, int mode, off64_t from, off64_t size),
       (file, mode, from, size))
SIMPLE(PLAIN, fsync, mine(file), (int file), (file))
SIMPLE(PLAIN, fdatasync, mine(file), (int file), (file))
/* The file of a mapping is unknown here, so every msync() counts. */
SIMPLE(PLAIN, msync, shared && root_length, (void *from, size_t size, int flags),
       (from, size, flags))

/* After the change at which it jumps, the clock is wrong for all processes. */
static long jump(void) {
    if (!clock_jump || !shared || shared->count < at) return 0;
    atomic_fetch_add(&shared->hit, 1);
    return clock_jump;
}

int clock_gettime(clockid_t which, struct timespec *time) {
    REAL(int, clock_gettime, clockid_t, struct timespec *);
    int done = real_clock_gettime(which, time);
    if (!done && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) time->tv_sec += jump();
    return done;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    REAL(int, gettimeofday, struct timeval *, void *);
    int done = real_gettimeofday(time, zone);
    if (!done) time->tv_sec += jump();
    return done;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
