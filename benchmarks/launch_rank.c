/* A rank of benchmarks/launch_scale.py: it writes the time at which MPI_Init returned to a file. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int count, char **words) {
  char path[4096];
  struct timespec now;
  int rank, size;
  if (nice(19) == -1) return 2; /* Ranks spin while they wait. On separate machines, this takes no processor time from proxies and tunnels. */
  MPI_Init(&count, &words);
  clock_gettime(CLOCK_REALTIME, &now);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  snprintf(path, sizeof path, "%s/rank-%d.left", getenv("TOPKUBE_RUN_DIRECTORY"), rank);
  FILE *file = fopen(path, "w");
  fprintf(file, "%d %lld.%09ld\n", size, (long long)now.tv_sec, now.tv_nsec);
  fclose(file);
  MPI_Finalize();
  return 0;
}
