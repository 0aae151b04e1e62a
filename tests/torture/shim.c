/* Counts the calls of a program that change files below one folder, writes them down, and spoils one of them.
 *
 * Preloaded it does nothing until it is armed: by torture_arm(), or at the start of a program whose environment has
 * TORTURE, a list of NAME=VALUE separated by newlines:
 *   root     folder whose files count
 *   control  file of 8 bytes, in which the calls are counted, shared by all processes of a program
 *   log      file that gets a record of each call, for a replay; none: nothing is written down
 *   nth      number of the call to spoil, from 1; 0: none
 *   action   what happens at that call: signal:N, errno:N, from:N (that errno from then on), short, delay, or clock:N
 *            (the clock of the day is N seconds off from then on)
 *   reads    1: calls that read count in place of those that write
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, LINK, READ, MMAP };
enum { NOTHING, SIGNAL, ERRNO, FROM, SHORT, DELAY, CLOCK };

static char root[PATH_MAX];
static size_t root_length;
static int armed, log_fd = -1, action, reads;
static long number, nth;
static int64_t *count;
static __thread int inside;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static void read_setting(const char *key, char *out, size_t size) {
    const char *text = getenv("TORTURE");
    size_t length = strlen(key);
    out[0] = 0;
    while (text && *text) {
        const char *end = strchrnul(text, '\n');
        if (!strncmp(text, key, length) && text[length] == '=')
            snprintf(out, size, "%.*s", (int)(end - text - length - 1), text + length + 1);
        text = *end ? end + 1 : end;
    }
}

/* Arms this process, and with it those that it forks; torture_arm() without TORTURE disarms it. */
void torture_arm(void) {
    static const char *names[] = {"", "signal", "errno", "from", "short", "delay", "clock"};
    char text[PATH_MAX];
    armed = 0;
    action = NOTHING;
    if (!getenv("TORTURE")) return;
    inside = 1;
    read_setting("root", root, sizeof root);
    root_length = strlen(root);
    read_setting("nth", text, sizeof text);
    nth = atol(text);
    read_setting("reads", text, sizeof text);
    reads = atoi(text);
    read_setting("action", text, sizeof text);
    char *colon = strchr(text, ':');
    number = colon ? atol(colon + 1) : 0;
    if (colon) *colon = 0;
    for (int each = 1; each < 7; each++)
        if (!strcmp(text, names[each])) action = each;
    read_setting("control", text, sizeof text);
    int fd = syscall(SYS_openat, AT_FDCWD, text, O_RDWR | O_CLOEXEC);
    void *page = fd < 0 ? MAP_FAILED : (void *)syscall(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) syscall(SYS_close, fd);
    count = page == MAP_FAILED ? NULL : page;
    read_setting("log", text, sizeof text);
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = *text ? syscall(SYS_openat, AT_FDCWD, text, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    inside = 0;
    armed = count != NULL && root_length > 0;
}

__attribute__((constructor)) static void start(void) {
    if (getenv("TORTURE")) torture_arm();
}

static int is_below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The whole path of a file, with `.` and `..` as they are; empty if it is not known. */
static void name_path(int folder, const char *path, char *out) {
    char base[PATH_MAX];
    if (path && path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    char link[64];
    if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
    base[length > 0 ? length : 0] = 0;
    if (path && *path) snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
    else snprintf(out, PATH_MAX, "%s", base);
}

static void write_down(int kind, const char *path, const char *other, int64_t offset, int64_t size, const void *data) {
    struct { uint32_t kind, path, other, data; int64_t offset, size; } head;
    struct iovec parts[4];
    if (log_fd < 0) return;
    head.kind = kind;
    head.path = strlen(path);
    head.other = other ? strlen(other) : 0;
    head.data = data ? size : 0;
    head.offset = offset;
    head.size = size;
    parts[0] = (struct iovec){&head, sizeof head};
    parts[1] = (struct iovec){(void *)path, head.path};
    parts[2] = (struct iovec){(void *)other, head.other};
    parts[3] = (struct iovec){(void *)data, head.data};
    syscall(SYS_writev, log_fd, parts, 4);
}

/* What to do at a call: 0 to let it pass, -1 to fail with errno, 1 to do a part of it. */
static int meet(int kind, const char *path, const char *other, int64_t offset, int64_t size, const void *data) {
    if (!armed || inside || !is_below(path)) return 0;
    if (reads != (kind == READ || kind == MMAP)) return 0;
    inside = 1;
    write_down(kind, path, other, offset, size, data);
    long place = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    int result = 0;
    if (nth && (place == nth || (action == FROM && place > nth))) {
        if (action == SIGNAL) kill(getpid(), number);
        if (action == DELAY) usleep(100000);
        if (action == SHORT) result = 1;
        if (action == ERRNO || (action == FROM && kind != UNLINK && kind != RMDIR)) {
            errno = number;
            result = -1;
        }
    }
    inside = 0;
    return result;
}

static int meet_open(int folder, const char *path, int flags) {
    char whole[PATH_MAX];
    if (!armed || inside) return 0;
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT))) return 0;
    name_path(folder, path, whole);
    return meet(OPEN, whole, NULL, flags, 0, NULL);
}

#define OPENING(name)                                                                   \
    int name(const char *path, int flags, ...) {                                        \
        va_list list;                                                                   \
        va_start(list, flags);                                                          \
        mode_t mode = va_arg(list, mode_t);                                             \
        va_end(list);                                                                   \
        return meet_open(AT_FDCWD, path, flags) < 0 ? -1 : REAL(name)(path, flags, mode); \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                                                       \
    int name(int folder, const char *path, int flags, ...) {                                   \
        va_list list;                                                                          \
        va_start(list, flags);                                                                 \
        mode_t mode = va_arg(list, mode_t);                                                    \
        va_end(list);                                                                          \
        return meet_open(folder, path, flags) < 0 ? -1 : REAL(name)(folder, path, flags, mode); \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

static int meet_fd(int kind, int fd, int64_t offset, int64_t size, const void *data) {
    char path[PATH_MAX];
    if (!armed || inside) return 0;
    int before = errno;
    name_path(fd, NULL, path);
    if (kind == WRITE && offset < 0) {
        struct stat status;
        int flags = fcntl(fd, F_GETFL);
        if ((flags & O_APPEND) && !fstat(fd, &status)) offset = status.st_size;
        else offset = lseek(fd, 0, SEEK_CUR);
    }
    errno = before;
    return meet(kind, path, NULL, offset, size, data);
}

ssize_t write(int fd, const void *data, size_t size) {
    int met = meet_fd(WRITE, fd, -1, size, data);
    return met < 0 ? -1 : REAL(write)(fd, data, met && size > 1 ? size / 2 : size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    int met = meet_fd(WRITE, fd, offset, size, data);
    return met < 0 ? -1 : REAL(pwrite64)(fd, data, met && size > 1 ? size / 2 : size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int number_of_parts) {
    /* As the writes that it stands for: a part of it is its first. */
    ssize_t done = 0;
    if (!armed || inside) return REAL(writev)(fd, parts, number_of_parts);
    for (int each = 0; each < number_of_parts; each++) {
        if (!parts[each].iov_len) continue;
        ssize_t written = write(fd, parts[each].iov_base, parts[each].iov_len);
        if (written < 0) return done ? done : -1;
        done += written;
        if ((size_t)written < parts[each].iov_len) break;
    }
    return done;
}

ssize_t read(int fd, void *data, size_t size) {
    int met = meet_fd(READ, fd, 0, size, NULL);
    return met < 0 ? -1 : REAL(read)(fd, data, met && size > 1 ? size / 2 : size);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    int met = meet_fd(READ, fd, offset, size, NULL);
    return met < 0 ? -1 : REAL(pread64)(fd, data, met && size > 1 ? size / 2 : size, offset);
}

#define MAPPING(name, offset_type)                                                             \
    void *name(void *at, size_t size, int protection, int flags, int fd, offset_type offset) { \
        if (armed && fd >= 0 && meet_fd(MMAP, fd, offset, size, NULL) < 0) return MAP_FAILED;  \
        return REAL(name)(at, size, protection, flags, fd, offset);                            \
    }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

int fsync(int fd) { return meet_fd(SYNC, fd, 0, 0, NULL) < 0 ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return meet_fd(SYNC, fd, 0, 0, NULL) < 0 ? -1 : REAL(fdatasync)(fd); }
int ftruncate64(int fd, off64_t size) {
    return meet_fd(TRUNCATE, fd, size, 0, NULL) < 0 ? -1 : REAL(ftruncate64)(fd, size);
}

static int meet_path(int kind, int folder, const char *path, int other_folder, const char *other) {
    char whole[PATH_MAX], second[PATH_MAX];
    if (!armed || inside) return 0;
    name_path(folder, path, whole);
    if (other) name_path(other_folder, other, second);
    return meet(kind, whole, other ? second : NULL, 0, 0, NULL);
}

int rename(const char *old, const char *new) {
    return meet_path(RENAME, AT_FDCWD, old, AT_FDCWD, new) < 0 ? -1 : REAL(rename)(old, new);
}
int renameat(int a, const char *old, int b, const char *new) {
    return meet_path(RENAME, a, old, b, new) < 0 ? -1 : REAL(renameat)(a, old, b, new);
}
int link(const char *old, const char *new) {
    return meet_path(LINK, AT_FDCWD, old, AT_FDCWD, new) < 0 ? -1 : REAL(link)(old, new);
}
int unlink(const char *path) { return meet_path(UNLINK, AT_FDCWD, path, 0, NULL) < 0 ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return meet_path(RMDIR, AT_FDCWD, path, 0, NULL) < 0 ? -1 : REAL(rmdir)(path); }
int unlinkat(int folder, const char *path, int flags) {
    int kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    return meet_path(kind, folder, path, 0, NULL) < 0 ? -1 : REAL(unlinkat)(folder, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    return meet_path(MKDIR, AT_FDCWD, path, 0, NULL) < 0 ? -1 : REAL(mkdir)(path, mode);
}

static int64_t clock_error(void) {
    return armed && action == CLOCK && *count >= nth ? number : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += clock_error();
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
