/* How threads share the items of one piece of work after the other, none of them waiting for a thread that is not there.
 *
 * A piece of work is done when its items are, whoever did them: a thread that has lost its core, or that has not begun yet,
 * holds up the others only with an item it has taken. Such a thread comes late: it finds all items taken and goes on. So
 * only who holds an item may write what others see, or read what is written anew for later pieces of work.
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

/* One thread's part of a piece of work; alone in its cache line. */
struct share {
    int64_t next;
    int64_t done;    /* of the first share: items of all parts that are done */
    int64_t is_held; /* whether the thread, which need not be the part's, has items that are not counted as done */
    char padding[40];
};

/* Each thread has its own. NOTE: all threads start the same pieces of work in the same order. */
struct team {
    int thread, num_threads;
    bool is_kept; /* rather than OpenMP's */
    struct share *shares;      /* zeroed, num_threads for every piece of work that is still to come */
    struct share *uncompleted; /* those of the first piece of work since `complete` */
    int64_t num_uncompleted;   /* items of the pieces since then */
};

struct work {
    struct share *shares;
    int64_t num_items, num_taken; /* by this thread and not yet counted as done */
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

/* The thread's next item: first the items of its own part in order, so that it reads memory in order, then what others
 * have left. On two EPYC Zen 5 cores a linear of 768 x 4,096 took 132 us so and 158 us with items handed out in turn.
 * NOTE: to be called until it returns false, which says that what this thread took is done. */
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

/* Waits until all items of the pieces of work that were started are done, and sees what was written for them. */
void complete(struct team *team);

/* Runs `function` on up to num_threads threads that are kept for it, this one among them, and returns when none of them is
 * in it. They join when they have a core; the work does not wait for them. One caller at a time has them; another works
 * alone. num_pieces: of work that the function starts at most. Returns whether there was memory for it. */
bool run_team(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument);

/* The same, of fused layers. */
bool run_layers(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument);

/* The same of an operation of its own: beside fused layers as they are run, as OpenMP's threads would wait on the same CPUs
 * afterwards, spinning; with models that have none by OpenMP's, whose other operations are torch's. */
bool run_beside(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument);
