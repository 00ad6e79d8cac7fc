// The GPU operations that kernels need. They have two implementations: CUDA, and a host that emulates a grid with fibers.
//
// The emulation (tests/unit/kernels/emulated_cuda.hpp) exists only for tests. It runs the same kernels and launches on a machine
// without a GPU: several blocks at a time, in an order that differs from run to run.
//
// Rules for kernels: Blocks consist of whole warps. Every thread of a warp takes part in the operations of the warp, and every
// thread of a block takes part in `sync`. Shared memory is one struct per kernel, named once in `shared<...>()` and once in
// `launch<...>`. Arithmetic of fp32 whose result is stored is `canonical(plus(...))`: see `canonical` in cpu/dtype.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topkube {
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
}  // namespace topkube

#if defined(TOPKUBE_EMULATE_CUDA)
#include "emulated_cuda.hpp"
#else
#include <cuda_runtime.h>

// The threads per block. If the launch depends on it, also how many blocks a multiprocessor runs at the same time: a grid that loops
// over its work takes twice as long as needed if some of its blocks begin when the others end.
#define TOPKUBE_KERNEL(...) static __global__ void __launch_bounds__(__VA_ARGS__)
#define TOPKUBE_DEVICE __device__ __forceinline__
#define TOPKUBE_DEVICE_MEMBER __device__ __forceinline__

namespace topkube::gpu {

TOPKUBE_DEVICE u32 thread() { return threadIdx.x; }
TOPKUBE_DEVICE u32 threads() { return blockDim.x; }
TOPKUBE_DEVICE u32 block() { return blockIdx.x; }
TOPKUBE_DEVICE u32 blocks() { return gridDim.x; }
TOPKUBE_DEVICE u32 lane() { return threadIdx.x & 31u; }
TOPKUBE_DEVICE u32 warp() { return threadIdx.x >> 5; }

TOPKUBE_DEVICE void sync() { __syncthreads(); }
// Waits for all threads of a grid that `launch_cluster` has launched, and orders their memory. Only devices since sm_90 have
// clusters; `can_launch_clusters` keeps such kernels from other devices.
TOPKUBE_DEVICE void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}
TOPKUBE_DEVICE void sync_warp() { __syncwarp(); }  // orders memory among the threads of a warp; ballot and shuffle do not
TOPKUBE_DEVICE u32 ballot(bool flag) { return __ballot_sync(0xffffffffu, flag); }
template <class T>
TOPKUBE_DEVICE T shuffle(T value, u32 from) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(from));
}
template <class T>
TOPKUBE_DEVICE T shuffle_xor(T value, u32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, static_cast<int>(mask));
}
TOPKUBE_DEVICE u32 warp_total(u32 value) { return __reduce_add_sync(0xffffffffu, value); }
TOPKUBE_DEVICE u32 warp_largest(u32 value) { return __reduce_max_sync(0xffffffffu, value); }
TOPKUBE_DEVICE u32 matching(u32 key) { return __match_any_sync(0xffffffffu, key); }  // lanes with the same key

TOPKUBE_DEVICE u32 popcount(u32 bits) { return static_cast<u32>(__popc(bits)); }
TOPKUBE_DEVICE u32 first_bit(u32 bits) { return static_cast<u32>(__ffs(static_cast<int>(bits))) - 1u; }  // bits is not 0
// Returns four of the eight bytes of b:a. Digit j of `places` (in hexadecimal, from the right) is the number of byte j.
TOPKUBE_DEVICE u32 permute(u32 a, u32 b, u32 places) { return __byte_perm(a, b, places); }
TOPKUBE_DEVICE u64 high_product(u64 a, u64 b) { return __umul64hi(a, b); }

// Arithmetic of fp32. A result that is NaN is 0x7fffffff on a GPU, whatever the operands are; the emulation returns the same.
TOPKUBE_DEVICE float plus(float a, float b) { return a + b; }
TOPKUBE_DEVICE float minus(float a, float b) { return a - b; }
TOPKUBE_DEVICE float times(float a, float b) { return a * b; }
TOPKUBE_DEVICE float magnitude(float a) { return fabsf(a); }
TOPKUBE_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }

// Work on global and shared memory. `add` and `lower` return the old value.
TOPKUBE_DEVICE u32 add(u32* to, u32 value) { return atomicAdd(to, value); }
TOPKUBE_DEVICE u64 add(u64* to, u64 value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}
TOPKUBE_DEVICE u32 lower(u32* to, u32 value) { return atomicMin(to, value); }
// Read and write words that other blocks use while this kernel runs. They bypass the first-level cache.
template <class T>
TOPKUBE_DEVICE T observe(const T* from) {
  return *static_cast<const volatile T*>(from);
}
template <class T>
TOPKUBE_DEVICE void publish(T* to, T value) {
  *static_cast<volatile T*>(to) = value;
}
TOPKUBE_DEVICE void fence() { __threadfence(); }
TOPKUBE_DEVICE void pause() { __nanosleep(20); }

template <class T>
TOPKUBE_DEVICE T& shared() {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  return *reinterpret_cast<T*>(shared_bytes);
}
struct Nothing {};

using Stream = cudaStream_t;

// A sequence of launches on one stream. No launch waits, and the first error ends the sequence. It can be captured in a CUDA graph.
class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<Stream>(stream)) {
    note(cudaGetDevice(&device_));
    note(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_));
  }

  template <class Shared = Nothing, class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), u64 blocks, u32 threads, Arguments... arguments) {
    if (error_ != cudaSuccess || blocks == 0) return;
    constexpr std::size_t bytes = sizeof(Shared) == 1 ? 0 : sizeof(Shared);
    allow_shared(kernel, bytes);
    if (error_ != cudaSuccess) return;
    kernel<<<static_cast<u32>(blocks), threads, bytes, stream_>>>(arguments...);
    note(cudaGetLastError());
  }

  // Returns true if the device has thread block clusters.
  bool can_launch_clusters() {
    int supported = 0;
    note(cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device_));
    return supported != 0;
  }

  // Launches a grid of one cluster.
  template <class Shared, class... Parameters, class... Arguments>
  void launch_cluster(void (*kernel)(Parameters...), u32 threads, Arguments... arguments) {
    allow_shared(kernel, sizeof(Shared));
    if (error_ != cudaSuccess) return;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster_blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster_blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = stream_;
    config.attrs = &cluster;
    config.numAttrs = 1;
    note(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  // Returns a number of blocks that fills the device, but not more blocks than the work needs.
  u64 blocks_for(u64 items, u64 items_per_block, u32 per_multiprocessor) const {
    const u64 worth = (items + items_per_block - 1) / items_per_block, room = u64(multiprocessors_) * per_multiprocessor;
    return worth < 1 ? 1 : worth < room ? worth : room;
  }

  int error() const { return static_cast<int>(error_); }

 private:
  static constexpr u32 cluster_blocks = 8;  // every device with clusters can run so many

  template <class Kernel>
  void allow_shared(Kernel kernel, std::size_t bytes) {
    if (bytes <= 48 * 1024 || error_ != cudaSuccess) return;
    note(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes)));
  }
  void note(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  Stream stream_;
  int device_ = 0, multiprocessors_ = 1;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace topkube::gpu
#endif
