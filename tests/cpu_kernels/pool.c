// The pool of threads, with workers that come late or never: every chunk of every job is computed once, and a job is over
// without those who took none of its chunks. Nothing here depends on time: what the pool waited for in vain, the program
// would wait for without end. Ends with 0.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void dawdle(void);
#define DAWDLE() dawdle()
#include "pool.h"

enum { CALLERS = 3, MOST = 60 };
static _Atomic int shut, held;           // workers are held up while it is shut; how many are just now
static __thread int computes_own;        // this thread calls, so nobody may hold it up for good
static __thread uint32_t state;
static uint32_t seed;

static uint32_t draw(uint32_t n) {
    if (!state) { static _Atomic uint32_t number; state = seed * 2654435761u + 97u * atomic_fetch_add(&number, 1) + 1; }
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
}
static void dawdle(void) {
    for (uint32_t n = draw(4) ? 0 : draw(50); n; n--) sched_yield();
    if (computes_own || !atomic_load(&shut)) return;
    atomic_fetch_add(&held, 1);
    while (atomic_load(&shut)) sched_yield();
    atomic_fetch_sub(&held, 1);
}

typedef struct { _Atomic int done[MOST]; } tally;
static void chunk(const void *job, int i) {
    for (uint32_t n = draw(8) ? 0 : draw(20); n; n--) sched_yield();
    atomic_fetch_add(&((tally *)job)->done[i], 1);
}
static void one_job(void) {
    tally list = {0};
    const int chunks = (int)draw(MOST);
    run(chunk, &list, chunks, draw(10) != 0);
    for (int i = 0; i < MOST; i++)
        if (atomic_load(&list.done[i]) != (i < chunks)) { printf("chunk %d of %d: %d times\n", i, chunks, list.done[i]); exit(1); }
}
static void *caller(void *unused) {
    (void)unused;
    computes_own = 1;
    for (int i = 0; i < 60; i++) one_job();
    return NULL;
}

// Some workers or all of them come no further than to the next place to be held up at.
static void without_workers(void) {
    atomic_store(&shut, 1);
    for (int i = 0; i < 60; i++) one_job();
    while (atomic_load(&held) < workers) one_job();          // now all of them, and still all is computed
    for (int i = 0; i < 20; i++) one_job();
    atomic_store(&shut, 0);
}

int main(int count, char **arguments) {
    seed = count > 1 ? (uint32_t)atoi(arguments[1]) : 1;
    computes_own = 1;
    if (bridle_threads(4) != 4 || bridle_threads(2) != 4) { printf("not four threads\n"); return 1; }
    for (int turn = 0; turn < 3; turn++) {
        without_workers();
        for (int i = 0; i < 60; i++) one_job();             // those who were held up have old tickets
    }
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) if (pthread_create(callers + i, NULL, caller, NULL)) return 1;
    for (int i = 0; i < 60; i++) one_job();
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    const pid_t child = fork();
    if (!child) {                                            // has no workers, then new ones
        for (int i = 0; i < 10; i++) one_job();
        if (bridle_threads(3) != 3) _exit(1);
        without_workers();
        _exit(0);
    }
    int status = 1;
    if (waitpid(child, &status, 0) != child || status) { printf("the child ended with %d\n", status); return 1; }
    printf("all ran\n");
    return 0;
}
