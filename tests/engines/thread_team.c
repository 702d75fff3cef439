/* Trials of threads.h: `thread_team sleep` and `thread_team share`. Ends by a signal where a phase never ends. */

#include <stdio.h>
#include <string.h>

#include "threads.h"

#define THREADS 4
#define TASKS 60

static _Atomic int arrived;
static _Atomic int runs[TASKS];

/* Ends when a helper has gone to sleep, if the caller runs it. */
static void outlast_helper(const void *context, int64_t task, int64_t thread) {
    const team *t = context;
    (void)task;
    while (!thread && !atomic_load(&t->each[0].sleeps)) sched_yield();
}

/* Ends when another thread runs it, too. */
static void meet(const void *context, int64_t task, int64_t thread) {
    (void)context, (void)task, (void)thread;
    atomic_fetch_add(&arrived, 1);
    while (atomic_load(&arrived) < 2) sched_yield();
}

static void count(const void *context, int64_t task, int64_t thread) {
    (void)context, (void)thread;
    atomic_fetch_add(&runs[task], 1);
}

/* A helper that falls asleep within a pass has part in its later phases. */
static int try_sleep(void) {
    team *t = new_team(2);
    if (!t || t->helpers != 1) return 1;
    begin_pass(t, 2);
    for (int round = 0; round < 300; round++) {
        run_phase(t, 1, outlast_helper, t);
        atomic_store(&arrived, 0);
        run_phase(t, 2, meet, t);
    }
    free_team(t);
    return 0;
}

/* Each task is run once, whatever the number of tasks and threads. */
static int try_share(void) {
    team *t = new_team(THREADS);
    unsigned state = 1;
    if (!t) return 1;
    for (int round = 0; round < 30000; round++) {
        state = state * 1664525u + 1013904223u;
        int tasks = 1 + (state >> 8) % TASKS;
        if (state >> 28 == 0) begin_pass(t, 1 + (state >> 20) % THREADS);
        for (int task = 0; task < TASKS; task++) atomic_store(&runs[task], 0);
        run_phase(t, tasks, count, NULL);
        for (int task = 0; task < TASKS; task++)
            if (atomic_load(&runs[task]) != (task < tasks)) return 1;
    }
    free_team(t);
    return 0;
}

int main(int count_of_arguments, char **arguments) {
    alarm(60);
    int failed = count_of_arguments > 1 && !strcmp(arguments[1], "sleep") ? try_sleep() : try_share();
    puts(failed ? "failed" : "passed");
    return failed;
}
