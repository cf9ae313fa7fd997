/* A clock that is set while a process runs, and a disk that is slow or fails, for one process and its children.

   LD_PRELOAD this, with MEGA_FAULT naming a file of two doubles, which may be written at any time: seconds that are
   added to the time of day, and seconds that each sync takes; below zero it fails. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const double none[2];
static const volatile double *fault = none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("MEGA_FAULT");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) fault = found;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += (time_t)fault[0];
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    if (clock_gettime(CLOCK_REALTIME, &time)) return -1;
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place != NULL) *place = now.tv_sec;
    return now.tv_sec;
}

int fsync(int file) {
    static int (*real)(int);
    if (real == NULL) real = dlsym(RTLD_NEXT, "fsync");
    if (fault[1] < 0) {
        errno = EIO;
        return -1;
    }
    usleep((useconds_t)(1e6 * fault[1]));
    return real(file);
}
