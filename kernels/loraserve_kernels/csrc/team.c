/* See team.h.
 *
 * OpenMP's regions and barriers wait for all threads. When another process takes a core, as the API does after every
 * step, all threads would spin until the displaced thread has its core back. Our threads sleep between calls, so that the
 * API finds a core.
 */
#define _GNU_SOURCE /* CPU sets */

#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include "vector.h"

#define SPIN_NS 30000    /* before sleeping or lending; threads usually wait less for each other */
#define LOOK_NS 10000    /* for which a thread is watched: it runs if its CPU time grows */
#define SLEEP_NS 10000
#define LEND_NS 200000   /* waited for a thread before it gets this CPU; longer than the API needs a core */
#define NUM_LOOKS 64     /* checks between two readings of the clock */
#define OPEN (1ll << 32) /* bit of `gate`: threads may join */
#define MAX_THREADS 256
#define STACK_BYTES (2 << 20)
#define MAX_BESIDE 1024 /* operations between two `run_layers`: a head, its adapters' own and the choice of tokens are fewer */

/* A kept thread, or the caller, which is the first member. */
struct member {
    pthread_t thread;
    int cpu; /* pinned to it while it works, if there are as many CPUs as threads */
};

static struct member members[MAX_THREADS];

static struct {
    pthread_mutex_t owner;   /* locked by the caller that uses the kept threads */
    pthread_mutex_t lending; /* locked while two threads swap CPUs */
    pthread_mutex_t lock;
    pthread_cond_t called;
    int num_kept, num_sleeping;
    int64_t num_calls;
    int64_t gate; /* OPEN while threads may join, plus the number of those inside */
    int num_threads;
    bool have_own_cpus;
    void (*function)(struct team *, void *);
    void *argument;
    struct share *shares;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lending = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
          .called = PTHREAD_COND_INITIALIZER};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* a yield is a no-op on most cores */
#endif
}

static void sleep_briefly(void) { nanosleep(&(struct timespec){0, SLEEP_NS}, NULL); }

static int64_t read_clock_ns(clockid_t clock)
{
    struct timespec time = {0};
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Spins for up to SPIN_NS until `holds`; returns whether it does. */
static bool spin_until(bool (*holds)(const void *what), const void *what)
{
    if (holds(what))
        return true;
    for (const int64_t end = read_clock_ns(CLOCK_MONOTONIC) + SPIN_NS; read_clock_ns(CLOCK_MONOTONIC) < end;)
        for (int look = 0; look < NUM_LOOKS; look++) {
            pause_cpu();
            if (holds(what))
                return true;
        }
    return false;
}

#if defined(__linux__)

static cpu_set_t allowed_cpus;

/* Chooses a CPU for each member; the caller keeps its own. Returns false if there are not exactly as many CPUs. */
static bool choose_cpus(int num_threads)
{
    const int of_caller = sched_getcpu();
    if (of_caller < 0 || sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) != 0 ||
        CPU_COUNT(&allowed_cpus) != num_threads || !CPU_ISSET(of_caller, &allowed_cpus))
        return false;
    members[0].cpu = of_caller;
    for (int thread = 1, cpu = 0; thread < num_threads; cpu++)
        if (CPU_ISSET(cpu, &allowed_cpus) && cpu != of_caller)
            members[thread++].cpu = cpu;
    return true;
}

/* Unpinned, two members may share a CPU for milliseconds while another CPU is idle. */
static void bind_member(int thread)
{
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(members[thread].cpu, &own);
    pthread_setaffinity_np(members[thread].thread, sizeof own, &own);
}

static void unbind_member(int thread)
{
    if (pool.have_own_cpus)
        pthread_setaffinity_np(members[thread].thread, sizeof allowed_cpus, &allowed_cpus);
}

static bool is_running(int thread)
{
    clockid_t clock;
    if (pthread_getcpuclockid(members[thread].thread, &clock) != 0)
        return true;
    const int64_t before = read_clock_ns(clock);
    for (const int64_t end = read_clock_ns(CLOCK_MONOTONIC) + LOOK_NS; read_clock_ns(CLOCK_MONOTONIC) < end;)
        pause_cpu();
    return read_clock_ns(clock) != before;
}

#else

static bool choose_cpus(int num_threads) { return num_threads < 0; }
static void bind_member(int thread) { (void)thread; }
static void unbind_member(int thread) { (void)thread; }
static bool is_running(int thread) { return thread >= 0; }

#endif

/* Whether the thread has taken an item of the pieces of work waited for. If so, its entry in `members` can be read. */
static bool has_item(const struct team *team, int thread)
{
    for (const struct share *shares = team->uncompleted; shares < team->shares; shares += team->num_threads)
        if (__atomic_load_n(&shares[thread].is_held, __ATOMIC_ACQUIRE))
            return true;
    return false;
}

/* Swaps CPUs with a thread that has an item but has lost its CPU to another process. */
static void lend_cpu(const struct team *team)
{
    for (int thread = 0; thread < team->num_threads; thread++) {
        if (thread == team->thread || !has_item(team, thread) || is_running(thread) ||
            pthread_mutex_trylock(&pool.lending) != 0)
            continue;
        const int cpu = members[team->thread].cpu;
        members[team->thread].cpu = members[thread].cpu;
        members[thread].cpu = cpu;
        bind_member(thread);
        bind_member(team->thread);
        pthread_mutex_unlock(&pool.lending);
        return;
    }
}

static bool is_complete(const void *what)
{
    const struct team *team = what;
    int64_t num_done = 0;
    for (const struct share *shares = team->uncompleted; shares < team->shares; shares += team->num_threads)
        num_done += __atomic_load_n(&shares->done, __ATOMIC_ACQUIRE);
    return num_done == team->num_uncompleted;
}

void complete(struct team *team)
{
    const bool may_lend = team->is_kept && pool.have_own_cpus;
    int64_t since = read_clock_ns(CLOCK_MONOTONIC);
    while (!spin_until(is_complete, team))
        if (may_lend && read_clock_ns(CLOCK_MONOTONIC) - since > LEND_NS) {
            lend_cpu(team);
            since = read_clock_ns(CLOCK_MONOTONIC);
        } else {
            sleep_briefly();
        }
    team->uncompleted = team->shares;
    team->num_uncompleted = 0;
}

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

static void work_in_team(int thread)
{
    struct team team = team_of(thread, pool.num_threads, pool.shares);
    team.is_kept = true;
    if (pool.have_own_cpus)
        bind_member(thread);
    pool.function(&team, pool.argument);
    complete(&team); /* stay: the thread with the last item may need this CPU, too */
}

static void *run_kept_thread(void *argument)
{
    const int thread = (int)(intptr_t)argument;
    members[thread].thread = pthread_self();
    for (int64_t calls_seen = 0;;) {
        wait_for_call(calls_seen);
        calls_seen = __atomic_load_n(&pool.num_calls, __ATOMIC_SEQ_CST);
        if (!join())
            continue;
        if (thread < pool.num_threads) {
            work_in_team(thread);
            unbind_member(thread);
        }
        __atomic_fetch_sub(&pool.gate, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* A forked child has none of the kept threads. */
static void forget_threads(void)
{
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lending, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.called, NULL);
    pool.num_kept = pool.num_sleeping = 0;
    pool.num_calls = pool.gate = 0;
}

/* Signals are left to the process's other threads. Getting fewer threads than wanted is no error. */
static void keep_threads(int wanted)
{
    if (pool.num_kept >= wanted)
        return;
    static bool has_fork_handler;
    if (!has_fork_handler)
        has_fork_handler = pthread_atfork(NULL, NULL, forget_threads) == 0;
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_t thread;
    while (pool.num_kept < wanted &&
           pthread_create(&thread, &attributes, run_kept_thread, (void *)(intptr_t)(pool.num_kept + 1)) == 0)
        pool.num_kept++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void call_threads(void)
{
    __atomic_store_n(&pool.gate, OPEN, __ATOMIC_RELEASE);
    __atomic_fetch_add(&pool.num_calls, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.num_sleeping, __ATOMIC_SEQ_CST) == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.called);
    pthread_mutex_unlock(&pool.lock);
}

static bool have_all_left(const void *gate) { return __atomic_load_n((const int64_t *)gate, __ATOMIC_ACQUIRE) == 0; }

static int num_beside = MAX_BESIDE; /* `run_beside` calls since the last `run_layers` */

/* Shares for all pieces of work of this thread's current call; NULL if out of memory. */
static struct share *zeroed_shares(int num_threads, int64_t num_pieces)
{
    static _Thread_local void *memory;
    static _Thread_local size_t capacity;
    const size_t share_bytes = (size_t)num_pieces * (size_t)num_threads * sizeof(struct share);
    struct share *shares = grow_scratch(&memory, &capacity, share_bytes);
    return shares ? memset(shares, 0, share_bytes) : NULL;
}

bool run_team(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument)
{
    num_threads = MIN(num_threads, MAX_THREADS);
    struct share *shares = zeroed_shares(num_threads, num_pieces);
    if (!shares)
        return false;
    if (num_threads == 1 || pthread_mutex_trylock(&pool.owner) != 0) {
        struct team alone = team_of(0, num_threads, shares);
        function(&alone, argument);
        return true;
    }
    keep_threads(num_threads - 1);
    members[0].thread = pthread_self();
    pool.num_threads = num_threads;
    pool.have_own_cpus = choose_cpus(num_threads);
    pool.function = function;
    pool.argument = argument;
    pool.shares = shares;
    call_threads();
    work_in_team(0);
    __atomic_fetch_sub(&pool.gate, OPEN, __ATOMIC_RELAXED);
    while (!spin_until(have_all_left, &pool.gate))
        sleep_briefly();
    unbind_member(0); /* not earlier: the others may have swapped CPUs with this thread */
    pthread_mutex_unlock(&pool.owner);
    return true;
}

bool run_layers(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument)
{
    __atomic_store_n(&num_beside, 0, __ATOMIC_RELAXED);
    return run_team(num_threads, num_pieces, function, argument);
}

bool run_beside(int num_threads, int64_t num_pieces, void (*function)(struct team *team, void *argument), void *argument)
{
    if (num_threads == 1)
        return run_team(1, num_pieces, function, argument);
    if (__atomic_load_n(&num_beside, __ATOMIC_RELAXED) < MAX_BESIDE) {
        __atomic_fetch_add(&num_beside, 1, __ATOMIC_RELAXED);
        return run_team(num_threads, num_pieces, function, argument);
    }
    struct share *shares = zeroed_shares(num_threads, num_pieces);
    if (!shares)
        return false;
#pragma omp parallel num_threads(num_threads)
    {
        struct team team = team_of(omp_get_thread_num(), omp_get_num_threads(), shares);
        function(&team, argument);
    }
    return true;
}
