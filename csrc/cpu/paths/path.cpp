#include "cpu/paths/path.hpp"

#include <atomic>

namespace topkube {

extern const PathKernels portable_kernels;
#if defined(__x86_64__)
extern const PathKernels avx2_kernels;
extern const PathKernels avx512_kernels;
#endif

namespace {

std::vector<const PathKernels*> find_runnable_paths() {
  std::vector<const PathKernels*> paths;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    paths.push_back(&avx512_kernels);
  }
  if (avx2) paths.push_back(&avx2_kernels);
#endif
  paths.push_back(&portable_kernels);
  return paths;
}

std::atomic<const PathKernels*>& chosen_path() {
  static std::atomic<const PathKernels*> path{find_runnable_paths().front()};
  return path;
}

}  // namespace

const PathKernels& active_path() { return *chosen_path().load(std::memory_order_relaxed); }

std::vector<std::string> available_paths() {
  std::vector<std::string> names;
  for (const PathKernels* path : find_runnable_paths()) names.emplace_back(path->name);
  return names;
}

bool use_path(const std::string& name) {
  for (const PathKernels* path : find_runnable_paths()) {
    if (name == path->name) {
      chosen_path().store(path, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace topkube
