/* A disk that is full, that cannot be read or that refuses a rename, for one folder of one family of processes; and their clock.

   Loaded by LD_PRELOAD. FAULT_FOLDER names the folder. FAULT_STATE names a file of seven numbers of 64 bits that all processes
   share: how many changes to the folder there were (writes, new files, new folders, renames, syncs), after how many of them the
   disk is full (0 = never), whether the file that FAULT_UNREADABLE names can be read (0 = yes), how many renames there were, which
   of them fails (0 = none) and with what error, and by how many seconds the wall clock is wrong. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY)

struct state { int64_t changes, full_after, unreadable, renames, refused, error, seconds; };

static struct state *shared(void) {
    static struct state *found = NULL;
    if (found) return found;
    const char *path = getenv("FAULT_STATE");
    if (!path) return NULL;
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real(path, O_RDWR);
    if (fd < 0) return NULL;
    void *at = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) found = at;
    return found;
}

static int inside(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    size_t length;
    if (!folder || !path) return 0;
    length = strlen(folder);
    return !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0);
}

static int fd_inside(int fd) {
    char link[64], path[PATH_MAX];
    ssize_t length;
    if (fd <= 2) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return inside(path);
}

static int at_inside(int dir, const char *path) {
    if (path && path[0] == '/') return inside(path);
    return dir != AT_FDCWD && fd_inside(dir);
}

/* Counts a change and says whether the disk has no room for it. */
static int full(void) {
    struct state *state = shared();
    int64_t number;
    if (!state) return 0;
    number = __atomic_add_fetch(&state->changes, 1, __ATOMIC_SEQ_CST);
    if (!state->full_after || number <= state->full_after) return 0;
    errno = ENOSPC;
    return 1;
}

/* Counts a rename and says whether it is the one that fails. */
static int refused(void) {
    struct state *state = shared();
    if (!state || __atomic_add_fetch(&state->renames, 1, __ATOMIC_SEQ_CST) != state->refused) return 0;
    errno = state->error;
    return 1;
}

static int unreadable(const char *path, int flags) {
    const char *name = getenv("FAULT_UNREADABLE");
    struct state *state = shared();
    if (WRITES(flags) || !state || !state->unreadable || !name || !path || strcmp(path, name)) return 0;
    errno = EIO;
    return 1;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static int (*real)(const char *, int, ...) = NULL; \
        MODE(flags) \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        if (unreadable(path, flags)) return -1; \
        if (WRITES(flags) && inside(path) && full()) return -1; \
        return real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        static int (*real)(int, const char *, int, ...) = NULL; \
        MODE(flags) \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        if (unreadable(path, flags)) return -1; \
        if (WRITES(flags) && at_inside(dir, path) && full()) return -1; \
        return real(dir, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define ON_FD(type, name, arguments, ...) \
    type name arguments { \
        static type (*real) arguments = NULL; \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        if (fd_inside(fd) && full()) return -1; \
        return real(__VA_ARGS__); \
    }
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
ON_FD(ssize_t, writev, (int fd, const struct iovec *parts, int count), fd, parts, count)
ON_FD(int, fsync, (int fd), fd)
ON_FD(int, fdatasync, (int fd), fd)
ON_FD(int, ftruncate64, (int fd, off64_t size), fd, size)

int mkdir(const char *path, mode_t mode) {
    static int (*real)(const char *, mode_t) = NULL;
    if (!real) real = dlsym(RTLD_NEXT, "mkdir");
    if (inside(path) && full()) return -1;
    return real(path, mode);
}

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *) = NULL;
    if (!real) real = dlsym(RTLD_NEXT, "rename");
    if (inside(to) && (full() || refused())) return -1;
    return real(from, to);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *) = NULL;
    struct state *state = shared();
    int failed;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME && state) now->tv_sec += state->seconds;
    return failed;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
