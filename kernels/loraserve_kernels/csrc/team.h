/* Threads share the items of one piece of work after the other, and never wait for a thread that has no core.
 *
 * A piece of work is done when its items are done, whichever threads did them. A thread that has lost its core, or has
 * not started yet, delays the others only by an item it has taken. If it arrives late, it finds all items taken and moves
 * on. Therefore only a thread that holds an item may write shared data, or read data that later pieces of work overwrite.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#if defined(_OPENMP)
int omp_get_thread_num(void); /* not from omp.h, which Apple's clang lacks */
int omp_get_num_threads(void);
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

/* One thread's part of a piece of work; fills a cache line. */
struct share {
    int64_t next;
    int64_t done;    /* in the first share only: finished items of all parts */
    int64_t is_held; /* whether this share's thread has items, of any part, not yet counted in `done` */
    char padding[40];
};

/* One thread's view of its team. NOTE: all threads start the same pieces of work in the same order. */
struct team {
    int thread, num_threads;
    bool is_kept; /* a thread kept by team.c, not OpenMP's */
    struct share *shares;      /* zeroed; num_threads of them for each piece of work to come */
    struct share *uncompleted; /* shares of the first piece of work since `complete` */
    int64_t num_uncompleted;   /* items of all pieces of work since `complete` */
};

struct work {
    struct share *shares;
    int64_t num_items, num_taken; /* num_taken: by this thread, not yet counted as done */
};

static inline struct team team_of(int thread, int num_threads, struct share *shares)
{
    return (struct team){thread, num_threads, false, shares, shares, 0};
}

static inline struct work start_work(struct team *team, int64_t num_items)
{
    struct share *shares = team->shares;
    team->shares += team->num_threads;
    team->num_uncompleted += num_items;
    return (struct work){shares, num_items, 0};
}

/* Takes the thread's next item: first those of its own part, in order, so that it reads memory sequentially, then items
 * left in other parts. On two EPYC Zen 5 cores a linear of 768 x 4,096 took 132 us this way and 158 us with items handed
 * out in turn. NOTE: call it until it returns false; only then are the items that this thread took counted as done. */
static inline bool take(const struct team *team, struct work *work, int64_t *item)
{
    for (int i = 0; i < team->num_threads; i++) {
        const int owner = (team->thread + i) % team->num_threads;
        const int64_t first = work->num_items * owner / team->num_threads;
        const int64_t end = work->num_items * (owner + 1) / team->num_threads;
        if (__atomic_load_n(&work->shares[owner].next, __ATOMIC_RELAXED) >= end - first)
            continue;
        *item = first + __atomic_fetch_add(&work->shares[owner].next, 1, __ATOMIC_RELAXED);
        if (*item < end) {
            if (work->num_taken++ == 0)
                __atomic_store_n(&work->shares[team->thread].is_held, 1, __ATOMIC_RELEASE);
            return true;
        }
    }
    if (work->num_taken > 0) {
        __atomic_store_n(&work->shares[team->thread].is_held, 0, __ATOMIC_RELAXED);
        __atomic_fetch_add(&work->shares->done, work->num_taken, __ATOMIC_RELEASE);
    }
    work->num_taken = 0;
    return false;
}

/* Waits until all items of all started pieces of work are done; everything written for them is then visible. */
void complete(struct team *team);

/* Runs `function` on up to num_threads threads, this one and kept ones, and returns when all of them have left it. Kept
 * threads join once they have a core; the work does not wait for them. One caller at a time has the kept threads; any
 * other works alone. num_pieces: the most pieces of work that the function starts. Returns false if out of memory. */
bool run_team(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument);

/* run_team for fused layers. */
bool run_layers(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument);

/* run_team for a standalone operation. Among fused layers it uses the kept threads, because OpenMP's threads would
 * afterwards spin on the CPUs that the layers need. For models without fused layers it uses OpenMP's, as torch's
 * operations do. */
bool run_beside(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument);
