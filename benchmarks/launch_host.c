/* Runs a command on a host name of its own: launch_host NAME COMMAND WORDS. Open MPI tells nodes apart by their names. One exec
   instead of the three of unshare, sh and hostname, as benchmarks/launch_scale.py starts 256 of these at once. */
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
