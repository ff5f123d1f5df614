/* Preloaded into the build tool: no chance, no time and no marks of files get into what it builds.

   The tool runs the interpreter once and keeps a picture of its memory, where all of these would show. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>

enum { NOW = 1577836800 };

ssize_t getrandom(void *bytes, size_t count, unsigned flags) {
  (void)flags;
  memset(bytes, 7, count);
  return (ssize_t)count;
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  long value[6];
  va_list values;
  va_start(values, number);
  for (int i = 0; i < 6; i++) value[i] = va_arg(values, long);
  va_end(values);
  if (number == SYS_getrandom) return getrandom((void *)value[0], (size_t)value[1], (unsigned)value[2]);
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, value[0], value[1], value[2], value[3], value[4], value[5]);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  (void)clock;
  time->tv_sec = NOW;
  time->tv_nsec = 0;
  return 0;
}

int statx(int folder, const char *path, int flags, unsigned mask, struct statx *found) {
  static int (*real)(int, const char *, int, unsigned, struct statx *);
  if (!real) real = (int (*)(int, const char *, int, unsigned, struct statx *))dlsym(RTLD_NEXT, "statx");
  int result = real(folder, path, flags, mask, found);
  if (!result) {
    memset(&found->stx_atime, 0, sizeof found->stx_atime);
    found->stx_mtime = found->stx_ctime = found->stx_btime = found->stx_atime;
    found->stx_ino = 1;
  }
  return result;
}
