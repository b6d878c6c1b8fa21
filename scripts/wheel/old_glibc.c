// Linked into the files of the wheel: what a static libstdc++ of a newer system needs from glibc
// and glibc 2.28 does not have, in terms of what it has.
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#define STAT_VERSION 1
#else
#define OLDEST "GLIBC_2.17"
#define STAT_VERSION 0
#endif
#define HIDDEN __attribute__((visibility("hidden")))

// exp2 and log2 have a version of 2.29, which computes the same and reports errors in another way.
#define OF_THE_OLDEST(function)                                   \
  double oldest_##function(double x);                             \
  __asm__(".symver oldest_" #function ", " #function "@" OLDEST); \
  HIDDEN double function(double x) { return oldest_##function(x); }
OF_THE_OLDEST(exp2)
OF_THE_OLDEST(log2)

// Functions since 2.33; before, they were macros of <sys/stat.h>.
struct stat;
int __xstat(int version, const char* path, struct stat* found);
int __lxstat(int version, const char* path, struct stat* found);
int __fxstat(int version, int file, struct stat* found);
HIDDEN int stat(const char* path, struct stat* found) { return __xstat(STAT_VERSION, path, found); }
HIDDEN int lstat(const char* path, struct stat* found) {
  return __lxstat(STAT_VERSION, path, found);
}
HIDDEN int fstat(int file, struct stat* found) { return __fxstat(STAT_VERSION, file, found); }
HIDDEN int stat64(const char* path, struct stat* found) { return stat(path, found); }
HIDDEN int lstat64(const char* path, struct stat* found) { return lstat(path, found); }
HIDDEN int fstat64(int file, struct stat* found) { return fstat(file, found); }

// Since 2.32: nonzero while there is one thread. Zero is always right.
HIDDEN char __libc_single_threaded = 0;

// Since 2.36.
int getentropy(void* buffer, size_t length);
HIDDEN uint32_t arc4random(void) {
  uint32_t number = 0;
  if (getentropy(&number, sizeof number) != 0) __builtin_trap();
  return number;
}
