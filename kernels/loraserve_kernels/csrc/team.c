/* See team.h.
 *
 * OpenMP's regions and barriers wait for all threads. Where another process wants a core, as the API does after every
 * step, all of them would spin until the thread that had it has it again. Between the calls these threads sleep, so that
 * the API finds a core. On two Xeon cores, 16 requests at a time over HTTP: 1,181 -> 1,232 tokens a second.
 */
#define _GNU_SOURCE /* CPU sets */

#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include "vector.h"

#define SPIN_NS 50000    /* before sleeping: longer than threads usually wait for each other */
#define SLEEP_NS 10000
#define LOOKS 64         /* between two looks at the clock */
#define OPEN (1ll << 32) /* for threads to join */
#define STACK_BYTES (2 << 20)

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether it holds, which is waited for as long as SPIN_NS. */
static bool spin_until(bool (*holds)(const void *what), const void *what)
{
    if (holds(what))
        return true;
    for (const int64_t end = now_ns() + SPIN_NS; now_ns() < end;)
        for (int look = 0; look < LOOKS; look++) {
            pause_cpu();
            if (holds(what))
                return true;
        }
    return false;
}

/* The thread that is waited for may have lost its core and get this one. */
static void wait_until(bool (*holds)(const void *what), const void *what)
{
    if (!spin_until(holds, what))
        while (!holds(what))
            nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
}

static bool is_complete(const void *what)
{
    const struct team *team = what;
    int64_t num_done = 0;
    for (const struct share *share = team->uncompleted; share < team->shares; share += team->num_threads)
        num_done += __atomic_load_n(&share->done, __ATOMIC_ACQUIRE);
    return num_done == team->num_uncompleted;
}

void complete(struct team *team)
{
    wait_until(is_complete, team);
    team->uncompleted = team->shares;
    team->num_uncompleted = 0;
}

#if defined(__linux__)

/* CPUs for threads; `own`: as many as there are threads, so that each has one. */
struct cpus {
    cpu_set_t allowed;
    int of_caller;
    bool are_own;
};

/* Those of this thread, the caller. */
static struct cpus cpus_for(int num_threads)
{
    struct cpus cpus = {.of_caller = sched_getcpu()};
    cpus.are_own = cpus.of_caller >= 0 && sched_getaffinity(0, sizeof cpus.allowed, &cpus.allowed) == 0 &&
                   CPU_COUNT(&cpus.allowed) == num_threads && CPU_ISSET(cpus.of_caller, &cpus.allowed);
    return cpus;
}

static int cpu_of(const struct cpus *cpus, int thread)
{
    int cpu = cpus->of_caller;
    for (int next = 0, other = 0; thread > other; next++)
        if (CPU_ISSET(next, &cpus->allowed) && next != cpus->of_caller) {
            cpu = next;
            other++;
        }
    return cpu;
}

/* Keeps this thread on its own CPU: the kernel leaves two of them on one for milliseconds while another is idle. */
static void bind(const struct cpus *cpus, int thread)
{
    cpu_set_t own;
    if (!cpus->are_own)
        return;
    CPU_ZERO(&own);
    CPU_SET(cpu_of(cpus, thread), &own);
    sched_setaffinity(0, sizeof own, &own);
}

static void unbind(const struct cpus *cpus)
{
    if (cpus->are_own)
        sched_setaffinity(0, sizeof cpus->allowed, &cpus->allowed);
}

#else

struct cpus {
    bool are_own;
};

static struct cpus cpus_for(int num_threads) { return (struct cpus){num_threads < 0}; }
static void bind(const struct cpus *cpus, int thread) { (void)cpus, (void)thread; }
static void unbind(const struct cpus *cpus) { (void)cpus; }

#endif

/* The threads that are kept. */
static struct {
    pthread_mutex_t owner; /* of the caller that has them */
    pthread_mutex_t lock;
    pthread_cond_t called;
    int num_members, num_sleeping;
    int64_t num_calls;
    int64_t gate; /* OPEN while threads may join, and how many have */
    int num_threads;
    struct cpus cpus;
    void (*function)(struct team *, void *);
    void *argument;
    struct share *shares;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .called = PTHREAD_COND_INITIALIZER};

static bool has_called(const void *calls_seen)
{
    return __atomic_load_n(&pool.num_calls, __ATOMIC_SEQ_CST) != *(const int64_t *)calls_seen;
}

static void wait_for_call(int64_t calls_seen)
{
    if (spin_until(has_called, &calls_seen))
        return;
    pthread_mutex_lock(&pool.lock);
    __atomic_fetch_add(&pool.num_sleeping, 1, __ATOMIC_SEQ_CST);
    while (!has_called(&calls_seen))
        pthread_cond_wait(&pool.called, &pool.lock);
    __atomic_fetch_sub(&pool.num_sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.lock);
}

static bool join(void)
{
    int64_t gate = __atomic_load_n(&pool.gate, __ATOMIC_RELAXED);
    while (gate & OPEN)
        if (__atomic_compare_exchange_n(&pool.gate, &gate, gate + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return true;
    return false;
}

static void *be_member(void *argument)
{
    const int thread = (int)(intptr_t)argument;
    for (int64_t calls_seen = 0;;) {
        wait_for_call(calls_seen);
        calls_seen = __atomic_load_n(&pool.num_calls, __ATOMIC_SEQ_CST);
        if (!join())
            continue;
        if (thread < pool.num_threads) {
            struct team team = team_of(thread, pool.num_threads, pool.shares);
            bind(&pool.cpus, thread);
            pool.function(&team, pool.argument);
            unbind(&pool.cpus);
        }
        __atomic_fetch_sub(&pool.gate, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* A forked child has none of the threads. */
static void forget_members(void)
{
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.called, NULL);
    pool.num_members = pool.num_sleeping = 0;
    pool.num_calls = pool.gate = 0;
}

/* Signals stay with the process' other threads. Fewer threads than wanted are no error. */
static void add_members(int wanted)
{
    if (pool.num_members >= wanted)
        return;
    static bool is_known_to_fork;
    if (!is_known_to_fork)
        is_known_to_fork = pthread_atfork(NULL, NULL, forget_members) == 0;
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_t thread;
    while (pool.num_members < wanted &&
           pthread_create(&thread, &attributes, be_member, (void *)(intptr_t)(pool.num_members + 1)) == 0)
        pool.num_members++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void call_members(void)
{
    __atomic_store_n(&pool.gate, OPEN, __ATOMIC_RELEASE);
    __atomic_fetch_add(&pool.num_calls, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.num_sleeping, __ATOMIC_SEQ_CST) == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.called);
    pthread_mutex_unlock(&pool.lock);
}

static bool has_left(const void *gate) { return __atomic_load_n((const int64_t *)gate, __ATOMIC_ACQUIRE) == 0; }

bool run_team(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument)
{
    static _Thread_local void *memory;
    static _Thread_local size_t capacity;
    const size_t share_bytes = (size_t)num_pieces * (size_t)num_threads * sizeof(struct share);
    struct share *shares = grow_scratch(&memory, &capacity, share_bytes);
    if (!shares)
        return false;
    memset(shares, 0, share_bytes);
    struct team team = team_of(0, num_threads, shares);
    if (num_threads == 1 || pthread_mutex_trylock(&pool.owner) != 0) {
        function(&team, argument);
        return true;
    }
    add_members(num_threads - 1);
    pool.num_threads = num_threads;
    pool.cpus = cpus_for(num_threads);
    pool.function = function;
    pool.argument = argument;
    pool.shares = shares;
    call_members();
    bind(&pool.cpus, 0);
    function(&team, argument);
    __atomic_fetch_sub(&pool.gate, OPEN, __ATOMIC_RELAXED);
    wait_until(has_left, &pool.gate);
    unbind(&pool.cpus);
    pthread_mutex_unlock(&pool.owner);
    return true;
}
