/* A rank of benchmarks/launch_scale.py under MPICH: what MPI_Init says to Hydra, and nothing else. It joins, publishes an
   address of 256 bytes, waits for all, reads everybody's address, and leaves the time of that. Real ranks also spin while
   they wait, and 256 of them on one small machine would measure that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int connection;

static char *ask(const char *question, const char *wanted) {
  static char answer[4096];
  size_t length = 0;
  if (write(connection, question, strlen(question)) < 0) exit(3);
  while (length < sizeof answer - 1) {
    if (read(connection, answer + length, 1) != 1) exit(4);
    if (answer[length] == '\n') break;
    length++;
  }
  answer[length] = 0;
  char *found = strstr(answer, wanted);
  if (!found) {
    fprintf(stderr, "asked %s, was told %s\n", question, answer);
    exit(5);
  }
  return found + strlen(wanted);
}

int main(void) {
  char line[4096], set[256], address[257], path[4096];
  struct timespec now;
  int rank = atoi(getenv("PMI_RANK")), size = atoi(getenv("PMI_SIZE"));
  connection = atoi(getenv("PMI_FD"));
  ask("cmd=init pmi_version=1 pmi_subversion=1\n", "rc=0");
  ask("cmd=get_maxes\n", "vallen_max");
  snprintf(set, sizeof set, "%s", strtok(ask("cmd=get_my_kvsname\n", "kvsname="), " \n"));
  snprintf(line, sizeof line, "cmd=get kvsname=%s key=PMI_process_mapping\n", set);
  ask(line, "rc=0");
  memset(address, 'a' + rank % 26, 256);
  address[256] = 0;
  snprintf(line, sizeof line, "cmd=put kvsname=%s key=address-%d value=%s\n", set, rank, address);
  ask(line, "rc=0");
  ask("cmd=barrier_in\n", "barrier_out");
  for (int other = 0; other < size; other++) {
    snprintf(line, sizeof line, "cmd=get kvsname=%s key=address-%d\n", set, other);
    memset(address, 'a' + other % 26, 256);
    ask(line, address);
  }
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(path, sizeof path, "%s/rank-%d.left", getenv("TOPKUBE_RUN_DIRECTORY"), rank);
  FILE *file = fopen(path, "w");
  fprintf(file, "%d %lld.%09ld\n", size, (long long)now.tv_sec, now.tv_nsec);
  fclose(file);
  ask("cmd=finalize\n", "finalize_ack");
  return 0;
}
