/* Runs a command with a host name of its own: launch_host NAME COMMAND WORDS. Open MPI distinguishes nodes by their host names.
   The commands unshare, sh and hostname would do the same with three execs; this program needs one, because
   benchmarks/launch_scale.py starts 256 of them at once. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **words) {
  if (count < 3 || unshare(CLONE_NEWUTS) || sethostname(words[1], strlen(words[1]))) {
    perror("launch_host");
    return 1;
  }
  execv(words[2], words + 2);
  perror(words[2]);
  return 127;
}
