/* Work in which the caller lends its CPU: it arrives late, and the other threads sleep while they have an item.
 * Argument: number of threads.
 */
#include <stdlib.h>
#include <time.h>

#include "team.h"

#define NUM_CALLS 50
#define NUM_PIECES 3

static void sleep_ms(int ms) { nanosleep(&(struct timespec){0, ms * 1000000}, NULL); }

static void work(struct team *team, void *argument)
{
    (void)argument;
    for (int piece = 0; piece < NUM_PIECES; piece++) {
        struct work sleeping = start_work(team, 2 * team->num_threads);
        if (team->thread == 0)
            sleep_ms(1);
        for (int64_t item; take(team, &sleeping, &item);)
            if (team->thread > 0)
                sleep_ms(2);
        complete(team);
    }
}

int main(int argc, char **argv)
{
    for (int call = 0; call < NUM_CALLS; call++)
        if (argc != 2 || !run_team(atoi(argv[1]), NUM_PIECES, work, NULL))
            return 1;
    return 0;
}
