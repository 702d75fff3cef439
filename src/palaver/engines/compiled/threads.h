/* A team of threads that computes the tasks of a pass, phase after phase.

   The caller takes tasks like its helpers: whoever is free takes the next one. A helper that has no core takes none, so
   the caller never waits for a thread, only for tasks that helpers have begun. A task is computed by one thread and
   writes memory of its own, so who takes it changes no bits. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NANOSECONDS 50000 /* looks for the next task so long before a thread leaves its core to others */
#define SPINS_OF_LOOK 64       /* between two looks at the clock */

#if defined(__x86_64__) || defined(__i386__)
#define RELAX __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX __asm__ volatile("yield")
#else
#define RELAX (void)0
#endif

/* Computes one task of a phase in this thread of the team; the caller is thread 0. */
typedef void task_function(const void *context, int64_t task, int64_t thread);

typedef struct team team;

typedef struct {
    team *of;
    int64_t thread;
    pthread_t id;
    pthread_cond_t wakes;
    _Atomic int sleeps; /* until it is woken for a task */
} helper;

struct team {
    _Alignas(64) _Atomic uint64_t tasks; /* phase << 32 | tasks << 16 | the next task */
    _Alignas(64) _Atomic int64_t done;   /* tasks of this phase */
    _Alignas(64) task_function *run;     /* of this phase: written while no task is left */
    const void *context;
    _Atomic int64_t threads; /* of this pass, with the caller */
    pthread_mutex_t lock;    /* of what follows */
    int ends;
    int64_t helpers;
    pid_t process; /* in which the helpers live */
    helper each[];
};

#define MAX_TASKS 0xffff /* of a phase */

static int64_t tasks_left(uint64_t tasks) { return (int64_t)(tasks >> 16 & MAX_TASKS) - (int64_t)(tasks & MAX_TASKS); }

/* Computes the next task. Returns 0 if there is none. */
static int run_task(team *t, int64_t thread) {
    uint64_t tasks = atomic_load_explicit(&t->tasks, memory_order_acquire);
    do {
        if (!tasks_left(tasks)) return 0;
    } while (!atomic_compare_exchange_weak_explicit(&t->tasks, &tasks, tasks + 1, memory_order_acquire,
                                                    memory_order_acquire));
    t->run(t->context, tasks & MAX_TASKS, thread); /* the phase can't end before this task is done */
    atomic_fetch_add_explicit(&t->done, 1, memory_order_release);
    return 1;
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* How long a thread has been waiting. */
typedef struct {
    int64_t spins, since;
} spin_wait;

/* Returns whether the thread has waited long enough to leave its core to others. */
static int waits_long(spin_wait *w) {
    RELAX;
    if (!w->spins++) w->since = nanoseconds();
    return w->spins % SPINS_OF_LOOK == 0 && nanoseconds() - w->since > SPIN_NANOSECONDS;
}

static int has_tasks(team *t, const helper *h) {
    return h->thread < atomic_load(&t->threads) && tasks_left(atomic_load(&t->tasks));
}

/* Sleeps until there may be a task. Returns 0 if the team ends. */
static int sleep_until_woken(team *t, helper *h) {
    pthread_mutex_lock(&t->lock);
    atomic_store(&h->sleeps, 1); /* before the look at the tasks: the caller adds some before it looks for sleepers */
    if (has_tasks(t, h)) atomic_store(&h->sleeps, 0);
    while (atomic_load(&h->sleeps) && !t->ends) pthread_cond_wait(&h->wakes, &t->lock);
    int ends = t->ends;
    pthread_mutex_unlock(&t->lock);
    return !ends;
}

static void *help(void *argument) {
    helper *h = argument;
    team *t = h->of;
    spin_wait w = {0};
    for (;;) {
        if (h->thread < atomic_load_explicit(&t->threads, memory_order_relaxed) && run_task(t, h->thread)) {
            w.spins = 0;
        } else if (waits_long(&w)) {
            if (!sleep_until_woken(t, h)) return NULL;
            w.spins = 0;
        }
    }
}

/* Begins a pass in so many threads. Returns how many it gets: one in a fork, which has no helpers. */
static int64_t begin_pass(team *t, int64_t threads) {
    if (t->process != getpid()) return 1;
    atomic_store(&t->threads, threads);
    return threads;
}

/* Wakes the helpers that have gone to sleep, not more than there are tasks for. */
static void wake_helpers(team *t, int64_t tasks) {
    int64_t threads = atomic_load_explicit(&t->threads, memory_order_relaxed);
    for (int64_t n = 0; n < t->helpers && n + 1 < threads && n + 1 < tasks; n++) {
        helper *h = t->each + n;
        if (!atomic_load(&h->sleeps)) continue;
        pthread_mutex_lock(&t->lock);
        atomic_store(&h->sleeps, 0);
        pthread_cond_signal(&h->wakes);
        pthread_mutex_unlock(&t->lock);
    }
}

/* Computes all tasks of a phase, at most MAX_TASKS. */
static void run_phase(team *t, int64_t tasks, task_function *run, const void *context) {
    uint64_t phase = (atomic_load_explicit(&t->tasks, memory_order_relaxed) >> 32) + 1;
    t->run = run, t->context = context;
    atomic_store_explicit(&t->done, 0, memory_order_relaxed);
    atomic_store(&t->tasks, phase << 32 | (uint64_t)tasks << 16);
    wake_helpers(t, tasks);
    while (run_task(t, 0)) continue;
    spin_wait w = {0};
    while (atomic_load_explicit(&t->done, memory_order_acquire) < tasks)
        if (waits_long(&w)) sched_yield(); /* a helper has lost its core within a task */
}

static void free_team(team *t) {
    if (!t) return;
    if (t->process == getpid()) { /* a fork has no helpers, and one of its parent's may have held the lock */
        pthread_mutex_lock(&t->lock);
        t->ends = 1;
        for (int64_t n = 0; n < t->helpers; n++) pthread_cond_signal(&t->each[n].wakes);
        pthread_mutex_unlock(&t->lock);
        for (int64_t n = 0; n < t->helpers; n++) pthread_join(t->each[n].id, NULL);
    }
    free(t);
}

/* Returns NULL where there is no memory. Where a thread can't be started, the team is smaller. */
static team *new_team(int64_t threads) {
    size_t bytes = sizeof(team) + (threads - 1) * sizeof(helper);
    team *t = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!t) return NULL;
    *t = (team){.threads = 1, .process = getpid()};
    pthread_mutex_init(&t->lock, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    for (int64_t n = 0; n < threads - 1; n++, t->helpers++) {
        helper *h = t->each + n;
        *h = (helper){.of = t, .thread = n + 1};
        pthread_cond_init(&h->wakes, NULL);
        if (pthread_create(&h->id, NULL, help, h)) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return t;
}
