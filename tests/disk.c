/* A disk that can be slow, or read-only from one moment to the next, for the process that has this preloaded.
 *
 * Only for files under $REEF_DISK; while $REEF_DISK.slow is there no sync ends ($REEF_DISK.syncing says that one has
 * begun), while $REEF_DISK.read-only is there nothing is written. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is(const char *state) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s.%s", getenv("REEF_DISK"), state);
  return access(path, F_OK) == 0;
}

static int here(const char *path) {
  const char *disk = getenv("REEF_DISK");
  return strncmp(path, disk, strlen(disk)) == 0 && path[strlen(disk)] == '/';
}

static int open_here(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  return here(path);
}

static int refused(int is_here) {
  if (!is_here || !is("read-only")) return 0;
  errno = EROFS;
  return 1;
}

static void take_time(int fd) {
  if (!open_here(fd) || !is("slow")) return;
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s.syncing", getenv("REEF_DISK"));
  int marker = REAL(open)(path, O_WRONLY | O_CREAT, 0600);
  if (marker >= 0) close(marker);
  while (is("slow")) usleep(10000);
}

int fsync(int fd) { take_time(fd); return REAL(fsync)(fd); }
int fdatasync(int fd) { take_time(fd); return REAL(fdatasync)(fd); }

ssize_t write(int fd, const void *data, size_t size) {
  return refused(open_here(fd)) ? -1 : REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  return refused(open_here(fd)) ? -1 : REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  return refused(open_here(fd)) ? -1 : REAL(pwrite64)(fd, data, size, at);
}

#define OPEN(name)                                                          \
  int name(const char *path, int flags, ...) {                              \
    va_list rest;                                                           \
    va_start(rest, flags);                                                  \
    mode_t mode = va_arg(rest, mode_t);                                     \
    va_end(rest);                                                           \
    int writes = (flags & (O_ACCMODE | O_CREAT)) != O_RDONLY;               \
    return refused(writes && here(path)) ? -1 : REAL(name)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)
