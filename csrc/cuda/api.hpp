// What the files of the library share: the choice of a dtype, the device of a call, and its workspace.
//
// The C functions of the library are in the files *.cu: nvcc compiles them at the same time.
// topkube/kernels/cuda_library.py calls them.
//
// Every function takes device pointers and a stream of `device`, launches kernels, and returns 0 or CUDA's error code. No
// function waits, allocates or frees. `workspace` is memory of that device, aligned to 256 bytes. Its size is at least the size
// that the same function returned through `needed` when it was called with a null workspace. The workspace can be reused
// after the stream has finished the call. topkube/kernels has checked lengths, dtypes and overlap.
#pragma once

#include "../cpu/dtype.hpp"
#include "device.hpp"

#define TOPKUBE_API extern "C" __attribute__((visibility("default"))) int

namespace topkube {

// Allocates aligned parts of the caller's workspace. Without a workspace, it only adds up their sizes.
class Arena {
 public:
  explicit Arena(void* start) : start_(static_cast<char*>(start)) {}
  template <class T>
  T* take(u64 count) {
    T* part = start_ ? reinterpret_cast<T*>(start_ + used_) : nullptr;
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return part;
  }
  u64 used() const { return used_; }

 private:
  char* start_;
  u64 used_ = 0;
};

constexpr int wrong_argument = -1;

// Calls act(tag) with the tag (cpu/dtype.hpp) of the dtype that has this code.
template <class Do>
int with_dtype(int code, const Do& act) {
  switch (code) {
    case 0: return act(F32{});
    case 1: return act(BF16{});
    case 2: return act(F16{});
    default: return wrong_argument;
  }
}

// Makes the device current for the call, and restores the caller's device.
class DeviceScope {
 public:
#if defined(TOPKUBE_EMULATE_CUDA)
  explicit DeviceScope(int) {}
  int error() const { return 0; }
#else
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess && before_ != device;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  int error() const { return static_cast<int>(error_); }

 private:
  cudaError_t error_ = cudaSuccess;
  int before_ = 0;
  bool changed_ = false;
#endif
};

// Without a workspace, stores its size in `needed`. With a workspace, launches the work. `work(launcher)` launches the kernels, or
// nothing if the launcher is null, and returns the size of the workspace in bytes.
template <class Work>
int plan_or_run(int device, void* stream, void* workspace, u64* needed, const Work& work) {
  if (!workspace) {
    *needed = work(static_cast<gpu::Launcher*>(nullptr));
    return 0;
  }
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  gpu::Launcher launcher(stream);
  work(&launcher);
  return launcher.error();
}

}  // namespace topkube
