// Threads that share work by tickets: who comes takes the next chunk, so a late worker delays nobody by more than the
// chunk that it has begun. Workers look for work for a while and then sleep. One job at a time: whoever finds the pool
// taken computes its own job alone.
//
// Tickets go round the stretches of a job, one for each thread: threads that take turns read each its own stretch on end,
// which memory gives faster than chunks from here and there.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include "simd.h"

typedef void (*chunk_fn)(const void *job, int chunk);

// Where a thread may be held up for any time. Tests hold it there.
#ifndef DAWDLE
#define DAWDLE()
#endif

enum { MAX_WORKERS = 255, SPINS = 4000, PATIENCE = 1000 };
typedef struct { chunk_fn fn; const void *job; int chunks, stretches; } work_list;
static work_list shared;
static _Atomic uint64_t ticket;          // generation << 32 | next chunk
static _Atomic int finished;             // chunks of this generation that are done
static _Atomic uint32_t generation;      // of the newest job
static _Atomic int sleepers;
static int workers;
static uint32_t last_generation;
static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

INL void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}

// The chunk that a ticket is for: tickets 0, 1, 2, ... are for the first of each stretch, and then for the second.
INL int chunk_of(int t, int chunks, int stretches) {
    const int stretch = t % stretches, length = chunks / stretches, longer = chunks % stretches;
    return stretch * length + (stretch < longer ? stretch : longer) + t / stretches;
}

// What is done is counted when nothing is left, since threads wait for each other's counting. The caller of `run` waits for it,
// so it is of this generation.
static void take_chunks(uint32_t mine, work_list list) {
    for (int done = 0;; done++) {
        uint64_t t = atomic_load(&ticket);
        DAWDLE();
        do {
            if ((uint32_t)(t >> 32) != mine || (int64_t)(uint32_t)t >= list.chunks) {
                if (done) atomic_fetch_add(&finished, done);
                return;
            }
        } while (!atomic_compare_exchange_weak(&ticket, &t, t + 1));
        list.fn(list.job, chunk_of((int)(uint32_t)t, list.chunks, list.stretches));
    }
}

static void *work(void *unused) {
    (void)unused;
    for (uint32_t seen = 0;;) {
        uint32_t now = atomic_load(&generation);
        for (int i = 0; now == seen && i < SPINS; i++) { relax(); now = atomic_load(&generation); }
        if (now == seen) {
            pthread_mutex_lock(&sleep_lock);
            atomic_fetch_add(&sleepers, 1);
            while ((now = atomic_load(&generation)) == seen) pthread_cond_wait(&woken, &sleep_lock);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&sleep_lock);
        }
        seen = now;
        DAWDLE();
        // Fields that are just being rewritten do no harm: their tickets are of another generation.
        take_chunks(now, shared);
    }
    return NULL;
}

// A child of fork() has none of its parent's threads.
static void forget_workers(void) {
    workers = 0; atomic_store(&sleepers, 0);
    pthread_mutex_init(&taken, NULL); pthread_mutex_init(&sleep_lock, NULL); pthread_cond_init(&woken, NULL);
}

// So many threads compute from now on, the caller's among them; never fewer than before. Gives how many there are.
API int bridle_threads(int threads) {
    static int is_registered;
    pthread_mutex_lock(&taken);
    if (!is_registered) { pthread_atfork(NULL, NULL, forget_workers); is_registered = 1; }
    while (workers < threads - 1 && workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) break;
        pthread_detach(thread);
        workers++;
    }
    const int count = workers + 1;
    pthread_mutex_unlock(&taken);
    return count;
}

static void run(chunk_fn fn, const void *job, int chunks, int parallel) {
    if (!parallel || chunks < 2 || !workers || pthread_mutex_trylock(&taken)) {
        for (int i = 0; i < chunks; i++) fn(job, i);
        return;
    }
    const uint32_t mine = ++last_generation ? last_generation : ++last_generation;
    atomic_store(&ticket, ((uint64_t)mine << 32) | 0xffffffffu);   // nothing to take while the job is written
    shared = (work_list){fn, job, chunks, workers + 1};
    atomic_store(&finished, 0);
    atomic_store(&ticket, (uint64_t)mine << 32);
    atomic_store(&generation, mine);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&sleep_lock); pthread_cond_broadcast(&woken); pthread_mutex_unlock(&sleep_lock);
    }
    take_chunks(mine, shared);
    for (int i = 0; atomic_load(&finished) < chunks; i++) { if (i < PATIENCE) relax(); else sched_yield(); }
    pthread_mutex_unlock(&taken);
}
