// The C functions for dense arrays, for the description of the build, and for the texts of errors.
#include "api.hpp"
#include "dense.hpp"

using namespace topkube;

// Returns the compiler and the targets of the library, such as "nvcc 13.0: sm_80 sm_90 compute_90".
extern "C" __attribute__((visibility("default"))) const char* topkube_cuda_build() { return TOPKUBE_CUDA_BUILD; }

#if defined(TOPKUBE_EMULATE_CUDA)
extern "C" __attribute__((visibility("default"))) const char* topkube_cuda_error(int) { return "none: this is an emulation"; }
#else
extern "C" __attribute__((visibility("default"))) const char* topkube_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
#endif

// `inputs`: up to 16 device pointers, in host memory.
TOPKUBE_API topkube_cuda_sum(int device, void* stream, void* out, int out_dtype, const void* const* inputs, u32 input_count,
                             int in_dtype, u64 length, float scale) {
  if (input_count < 1 || input_count > most_inputs) return wrong_argument;
  Inputs list{};
  for (u32 i = 0; i < input_count; ++i) list.pointers[i] = inputs[i];
  list.count = input_count;
  const DeviceScope scope(device);
  if (scope.error() || length == 0) return scope.error();
  gpu::Launcher launcher(stream);
  const u64 blocks = launcher.blocks_for(length, 4 * dense_threads, sum_blocks);
  return with_dtype(in_dtype, [&](auto in) {
    return with_dtype(out_dtype, [&](auto to) {
      using In = decltype(in);
      using Out = decltype(to);
      launcher.launch(sum_inputs<In, Out>, blocks, dense_threads, static_cast<typename Out::Item*>(out), list, length, scale);
      return launcher.error();
    });
  });
}

// Sets *flag to 0 if an element is NaN or infinite, and to 1 otherwise.
TOPKUBE_API topkube_cuda_is_finite(int device, void* stream, const void* data, int dtype, u64 length, u32* flag) {
  const DeviceScope scope(device);
  if (scope.error()) return scope.error();
  gpu::Launcher launcher(stream);
  launcher.launch(set_word, 1, 32, flag, u32{1});
  if (length == 0) return launcher.error();
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    launcher.launch(find_nonfinite<T>, launcher.blocks_for(length, 8 * dense_threads, 8), dense_threads,
                    static_cast<const typename T::Item*>(data), length, flag);
    return launcher.error();
  });
}
