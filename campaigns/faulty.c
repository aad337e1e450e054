// Stands between a process and the C library (LD_PRELOAD): counts the calls that change what is below one folder, and
// at one of them fails, writes less, or sends the process a signal. Without `faulty_arm` it does nothing.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, RENAME = 4, UNLINK = 8, MAKE = 16, CUT = 32 };  // kinds of calls; also in faulty.py
enum { FAIL = 1, SHORTEN = 2, SIGNAL = 3 };                                  // what happens at the call

static char folder[PATH_MAX], beside[PATH_MAX];
static long at = -1, calls, done;
static int what, number, kinds, lasting, record = -1;

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

// Begin: at the call number `at`, or the first of these kinds after it, do `what`; where it is `lasting`, at all later
// ones too, which fail after a short one.
// `log` gets a line for each call that was made; what a rename replaces is kept beside it.
void faulty_arm(const char *below, long call, int action, int error_or_signal, int of_kinds, int is_lasting, const char *log) {
  snprintf(folder, sizeof folder, "%s/", below);
  snprintf(beside, sizeof beside, "%s", log);
  record = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  what = action, number = error_or_signal, kinds = of_kinds, lasting = is_lasting, calls = 0, done = 0, at = call;
}

// Whether a path is that of the folder, which is synced too, or below it.
static int ours(const char *path) {
  size_t size = strlen(folder) - 1;
  return record >= 0 && !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}

// The path of a descriptor, or of a name below a descriptor.
static const char *path_of(int descriptor, const char *name, char *room) {
  if (record < 0) return "";
  if (name && name[0] == '/') return name;
  char link[64];
  snprintf(link, sizeof link, descriptor == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", descriptor);
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, room, PATH_MAX - 1);
  if (size < 0) return "";
  room[size] = 0;
  if (name) snprintf(room + size, PATH_MAX - size, "/%s", name);
  return room;
}

// What is to happen at this call: 0, FAIL or SHORTEN. A signal is sent here; KILL and STOP take effect at once.
static int due(int kind) {
  long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  if (at < 1 || call < at || !(kinds & kind)) return 0;
  int later = __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST) > 1;
  if (later && !lasting) return 0;
  if (later && what == SHORTEN) return FAIL;
  if (what == SIGNAL) kill(getpid(), number);
  return what == SIGNAL ? 0 : what;
}

static void tell(char kind, const char *path, const char *more, long size) {
  int kept = errno;
  char line[2 * PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%c\t%s\t%s\t%ld\n", kind, path, more, size);
  if (syscall(SYS_write, record, line, length) != length) abort();
  errno = kept;
}

#define FAILING(kind) (due(kind) == FAIL)

static ssize_t writing(int descriptor, const void *data, size_t size, off_t place, ssize_t (*write_it)(int, const void *, size_t, off_t)) {
  char room[PATH_MAX];
  const char *path = path_of(descriptor, 0, room);
  if (!ours(path)) return write_it(descriptor, data, size, place);
  int fault = due(WRITE);
  if (fault == FAIL) { errno = number; return -1; }
  ssize_t written = write_it(descriptor, data, fault == SHORTEN && size > 1 ? size / 2 : size, place);
  tell('w', path, "", written);
  return written;
}

static ssize_t plainly(int d, const void *data, size_t size, off_t place) { (void)place; REAL(write); return real(d, data, size); }
static ssize_t placed(int d, const void *data, size_t size, off_t place) { REAL(pwrite); return real(d, data, size, place); }

ssize_t write(int d, const void *data, size_t size) { return writing(d, data, size, 0, plainly); }
ssize_t pwrite(int d, const void *data, size_t size, off_t place) { return writing(d, data, size, place, placed); }
ssize_t pwrite64(int d, const void *data, size_t size, off_t place) { return writing(d, data, size, place, placed); }

ssize_t writev(int d, const struct iovec *parts, int count) {
  char room[PATH_MAX];
  REAL(writev);
  const char *path = path_of(d, 0, room);
  if (!ours(path)) return real(d, parts, count);
  int fault = due(WRITE);
  if (fault == FAIL) { errno = number; return -1; }
  ssize_t written = real(d, parts, fault == SHORTEN && count > 1 ? 1 : count);
  tell('w', path, "", written);
  return written;
}

static int syncing(int d, int (*sync_it)(int)) {
  char room[PATH_MAX];
  const char *path = path_of(d, 0, room);
  if (!ours(path)) return sync_it(d);
  if (FAILING(SYNC)) { errno = number; return -1; }
  struct stat found;
  long size = fstat(d, &found) ? 0 : found.st_size;
  tell('s', path, "", size);
  return sync_it(d);
}

static int sync_all(int d) { REAL(fsync); return real(d); }
static int sync_data(int d) { REAL(fdatasync); return real(d); }
int fsync(int d) { return syncing(d, sync_all); }
int fdatasync(int d) { return syncing(d, sync_data); }

static int renaming(int from, const char *old, int to, const char *new, unsigned flags) {
  char room[PATH_MAX], other[PATH_MAX], kept[PATH_MAX + 32];
  const char *source = path_of(from, old, room), *target = path_of(to, new, other);
  if (!ours(target)) return syscall(SYS_renameat2, from, old, to, new, flags);
  if (FAILING(RENAME)) { errno = number; return -1; }
  snprintf(kept, sizeof kept, "%s-%ld", beside, calls);
  int is_kept = !syscall(SYS_linkat, AT_FDCWD, target, AT_FDCWD, kept, 0);
  int status = syscall(SYS_renameat2, from, old, to, new, flags);
  if (!status) tell('r', source, target, is_kept ? calls : 0);
  return status;
}

int rename(const char *old, const char *new) { return renaming(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int a, const char *old, int b, const char *new) { return renaming(a, old, b, new, 0); }
int renameat2(int a, const char *old, int b, const char *new, unsigned flags) { return renaming(a, old, b, new, flags); }

static int removing(int d, const char *name, int flags) {
  char room[PATH_MAX];
  const char *path = path_of(d, name, room);
  if (!ours(path)) return syscall(SYS_unlinkat, d, name, flags);
  if (FAILING(UNLINK)) { errno = number; return -1; }
  int status = syscall(SYS_unlinkat, d, name, flags);
  if (!status) tell('u', path, "", 0);
  return status;
}

int unlink(const char *name) { return removing(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return removing(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int d, const char *name, int flags) { return removing(d, name, flags); }

static int making(int d, const char *name, mode_t mode) {
  char room[PATH_MAX];
  const char *path = path_of(d, name, room);
  if (!ours(path)) return syscall(SYS_mkdirat, d, name, mode);
  if (FAILING(MAKE)) { errno = number; return -1; }
  int status = syscall(SYS_mkdirat, d, name, mode);
  if (!status) tell('m', path, "", 0);
  return status;
}

int mkdir(const char *name, mode_t mode) { return making(AT_FDCWD, name, mode); }
int mkdirat(int d, const char *name, mode_t mode) { return making(d, name, mode); }

static int opening(int d, const char *name, int flags, mode_t mode) {
  char room[PATH_MAX];
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
  const char *path = writes ? path_of(d, name, room) : "";
  if (!writes || !ours(path)) return syscall(SYS_openat, d, name, flags, mode);
  if (FAILING(MAKE)) { errno = number; return -1; }
  int opened = syscall(SYS_openat, d, name, flags, mode);
  struct stat found;
  if (opened >= 0) tell(flags & O_TRUNC ? 't' : 'o', path, "", fstat(opened, &found) ? 0 : found.st_size);
  return opened;
}

#define MODE(last) va_list rest; va_start(rest, last); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest)
int open(const char *name, int flags, ...) { MODE(flags); return opening(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags); return opening(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int d, const char *name, int flags, ...) { MODE(flags); return opening(d, name, flags, mode); }
int openat64(int d, const char *name, int flags, ...) { MODE(flags); return opening(d, name, flags | O_LARGEFILE, mode); }

static int cutting(int d, off_t size) {
  char room[PATH_MAX];
  REAL(ftruncate);
  const char *path = path_of(d, 0, room);
  if (!ours(path)) return real(d, size);
  if (FAILING(CUT)) { errno = number; return -1; }
  int status = real(d, size);
  if (!status) tell('c', path, "", size);
  return status;
}

int ftruncate(int d, off_t size) { return cutting(d, size); }
int ftruncate64(int d, off_t size) { return cutting(d, size); }

int truncate(const char *name, off_t size) {
  char room[PATH_MAX];
  REAL(truncate);
  const char *path = path_of(AT_FDCWD, name, room);
  if (!ours(path)) return real(name, size);
  if (FAILING(CUT)) { errno = number; return -1; }
  int status = real(name, size);
  if (!status) tell('c', path, "", size);
  return status;
}
