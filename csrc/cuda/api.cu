// The C functions of the library, which topkube/kernels/cuda_library.py calls. One compilation unit holds all kernels.
//
// Every function takes device pointers and a stream of `device`, launches kernels, and returns 0 or CUDA's error code. No
// function waits, allocates or frees. `workspace` is memory of that device, aligned to 256 bytes. Its size is at least the size
// that the same function returned through `needed` when it was called with a null workspace. It can be reused when the stream has
// passed the call. topkube/kernels has checked lengths, dtypes and overlap.
#include <type_traits>

#include "dense.hpp"
#include "launch_select.hpp"
#include "wire.hpp"

#define TOPKUBE_API extern "C" __attribute__((visibility("default"))) int

namespace topkube {
namespace {

constexpr int wrong_argument = -1;
static_assert(sizeof(State) <= 256);

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
class OnDevice {
 public:
#if defined(TOPKUBE_EMULATE_CUDA)
  explicit OnDevice(int) {}
  int error() const { return 0; }
#else
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess && before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  int error() const { return static_cast<int>(error_); }

 private:
  cudaError_t error_ = cudaSuccess;
  int before_ = 0;
  bool changed_ = false;
#endif
};

// `work(launcher, workspace)` returns the size of the workspace in bytes. If the launcher is null, it launches nothing.
template <class Work>
int plan_or_run(int device, void* stream, void* workspace, u64* needed, const Work& work) {
  if (!workspace) {
    *needed = work(static_cast<gpu::Launcher*>(nullptr));
    return 0;
  }
  const OnDevice on(device);
  if (on.error()) return on.error();
  gpu::Launcher launcher(stream);
  work(&launcher);
  return launcher.error();
}

u64 hashed_bytes(u64 bytes) { return bytes < wire_header_bytes ? 0 : bytes - 8; }

void launch_sums(gpu::Launcher& launcher, Hashed data, u64 inputs, u64 apart, u64* sums) {
  const u64 items = hash_blocks_of(data.size) * hash_lanes;
  if (items) {
    launcher.launch(hash_sums, inputs * launcher.blocks_for(items, hash_threads, 8), hash_threads, data, inputs, apart, sums);
  }
}

// Returns `count` encoded shards of `bytes` bytes, with their workspace.
Rows lay_out_rows(const void* buffer, u64 count, u64 apart, u64 bytes, u32* verdicts, Arena& arena) {
  Rows rows{static_cast<const std::uint8_t*>(buffer), count, apart, bytes, bytes / 4 + 1, nullptr, nullptr, verdicts};
  rows.starts = arena.take<u32>(count * rows.starts_words);
  rows.sums = arena.take<u64>(count * hash_sums_of(hashed_bytes(bytes)));
  return rows;
}

// Launches all checks of encoded shards, and computes where the entries of each block start.
void launch_check(gpu::Launcher& launcher, const Rows& rows, u64 expected_length) {
  const u64 hashed = hashed_bytes(rows.bytes);
  launcher.launch<CheckShared>(check_header, rows.count, check_threads, rows, expected_length);
  if (rows.bytes < wire_header_bytes) return;
  launcher.launch(check_entries, rows.count * launcher.blocks_for(rows.bytes / 4, 4 * wire_threads, 8), wire_threads, rows);
  launch_sums(launcher, Hashed{rows.buffer, hashed}, rows.count, rows.apart, rows.sums);
  launcher.launch(check_seal, rows.count, 32, rows, hashed);
}

}  // namespace
}  // namespace topkube

using namespace topkube;

// Returns the compiler and the targets of the library, such as "13.0; sm_80 sm_90 compute_90".
extern "C" __attribute__((visibility("default"))) const char* topkube_cuda_build() { return TOPKUBE_CUDA_BUILD; }

#if defined(TOPKUBE_EMULATE_CUDA)
extern "C" __attribute__((visibility("default"))) const char* topkube_cuda_error(int) { return "none: this is an emulation"; }
#else
extern "C" __attribute__((visibility("default"))) const char* topkube_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
#endif

TOPKUBE_API topkube_cuda_topk(int device, void* stream, const void* data, int dtype, u64 length, u64 k, u32* indices, void* values,
                              void* state, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      return topk<decltype(type)>(launcher, data, length, k, indices, values, state, workspace);
    });
  });
}

TOPKUBE_API topkube_cuda_compress(int device, void* stream, const void* gradient, int dtype, const float* residual, float* acc,
                                  u64 length, u64 k, u32* indices, float* values, void* state, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      return compress<decltype(type)>(launcher, gradient, residual, acc, length, k, indices, values, state, workspace);
    });
  });
}

TOPKUBE_API topkube_cuda_mstopk(int device, void* stream, const void* data, int dtype, u64 length, u64 k, int iterations, u64 seed,
                                u32* indices, void* values, void* state, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      return mstopk<decltype(type)>(launcher, data, length, k, iterations, seed, indices, values, state, workspace);
    });
  });
}

// Selections write statistics of their work into 256 more bytes, `state`. This function reads a copy of `state` in host memory: the
// mode and the number of candidates; for mstopk also the thresholds, and how many magnitudes reach them.
TOPKUBE_API topkube_cuda_effort(const void* state, u64* from_the_data, u64* candidates, float* thresholds, u64* above) {
  const State& copy = *static_cast<const State*>(state);
  *from_the_data = copy.mode;
  *candidates = copy.candidates;
  for (int i = 0; i < 2; ++i) {
    thresholds[i] = copy.thresholds[i];
    above[i] = copy.above[i];
  }
  return 0;
}

// `inputs`: up to 16 device pointers, in host memory.
TOPKUBE_API topkube_cuda_sum(int device, void* stream, void* out, int out_dtype, const void* const* inputs, u32 input_count,
                             int in_dtype, u64 length, float scale) {
  if (input_count < 1 || input_count > most_inputs) return wrong_argument;
  Inputs all{};
  for (u32 i = 0; i < input_count; ++i) all.of[i] = inputs[i];
  all.count = input_count;
  const OnDevice on(device);
  if (on.error() || length == 0) return on.error();
  gpu::Launcher launcher(stream);
  const u64 blocks = launcher.blocks_for(length, 4 * dense_threads, 8);
  return with_dtype(in_dtype, [&](auto in) {
    return with_dtype(out_dtype, [&](auto to) {
      using In = decltype(in);
      using Out = decltype(to);
      launcher.launch(sum_inputs<In, Out>, blocks, dense_threads, static_cast<typename Out::Item*>(out), all, length, scale);
      return launcher.error();
    });
  });
}

// Sets *flag to 0 if an element is NaN or infinite, and to 1 otherwise.
TOPKUBE_API topkube_cuda_is_finite(int device, void* stream, const void* data, int dtype, u64 length, u32* flag) {
  const OnDevice on(device);
  if (on.error()) return on.error();
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

// In all functions below, `verdict` is 4 words that are ~0 (wire.hpp: VerdictWord). If a check fails, nothing else is written,
// except that encode sets its first word to 0, so that no reader accepts the buffer.
TOPKUBE_API topkube_cuda_encode(int device, void* stream, const u32* indices, const void* values, int dtype, u64 count, u64 length,
                                int wire, float* residual, std::uint8_t* out, u64 bytes, u32* verdict, void* workspace,
                                u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return with_dtype(wire, [&](auto wire_type) {
      using T = decltype(type);
      using Wire = decltype(wire_type);
      return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
        Arena arena(workspace);
        const Hashed data{out, hashed_bytes(bytes)};
        u64* sums = arena.take<u64>(hash_sums_of(data.size));
        if (launcher) {
          const u64 blocks = launcher->blocks_for(std::max(count, wire_blocks(length)), 2 * wire_threads, 8);
          launcher->launch(check_indices, launcher->blocks_for(count, 4 * wire_threads, 8), wire_threads, indices, count, length,
                           true, verdict);
          launcher->launch(encode_entries<T, Wire>, blocks, wire_threads, indices, static_cast<const typename T::Item*>(values),
                           count, length, static_cast<u32>(wire), residual, out, static_cast<const u32*>(verdict));
          launch_sums(*launcher, data, 1, 0, sums);
          launcher->launch(seal, 1, 32, data, static_cast<const u64*>(sums), out, static_cast<const u32*>(verdict));
        }
        return arena.used();
      });
    });
  });
}

// `indices` and `values` have room for `room` entries. If they are null, the function only checks the buffer.
TOPKUBE_API topkube_cuda_decode(int device, void* stream, const std::uint8_t* buffer, u64 bytes, u64 expected_length, u64 room,
                                u32* indices, float* values, u32* verdict, void* workspace, u64* needed) {
  return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
    Arena arena(workspace);
    const Rows rows = lay_out_rows(buffer, 1, 0, bytes, verdict, arena);
    if (launcher) launch_check(*launcher, rows, expected_length);
    if (launcher && indices && bytes >= wire_header_bytes) {
      launcher->launch(decode_entries, launcher->blocks_for(room, 2 * wire_threads, 8), wire_threads, buffer,
                       static_cast<const u32*>(rows.starts), room, indices, values, static_cast<const u32*>(verdict));
    }
    return arena.used();
  });
}

TOPKUBE_API topkube_cuda_decode_add(int device, void* stream, const std::uint8_t* buffer, u64 bytes, void* dense, int dtype,
                                    u64 length, float scale, u32* verdict, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      Arena arena(workspace);
      const Rows rows = lay_out_rows(buffer, 1, 0, bytes, verdict, arena);
      if (launcher) launch_check(*launcher, rows, length);
      if (launcher && bytes >= wire_header_bytes) {
        launcher->launch(decode_add_entries<T>, launcher->blocks_for(bytes / 6, 2 * wire_threads, 8), wire_threads, buffer,
                         static_cast<const u32*>(rows.starts), static_cast<typename T::Item*>(dense), scale, verdict);
      }
      return arena.used();
    });
  });
}

// Replaces `out` by the sum of `count` encoded shards, which are `apart` bytes apart (a multiple of 8). There is a verdict for each.
// The number of launches does not depend on `count`.
TOPKUBE_API topkube_cuda_sum_rows(int device, void* stream, const std::uint8_t* buffer, u64 count, u64 apart, u64 bytes, void* out,
                                  int dtype, u64 length, u32* verdicts, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      Arena arena(workspace);
      const Rows rows = lay_out_rows(buffer, count, apart, bytes, verdicts, arena);
      if (launcher) {
        launch_check(*launcher, rows, length);
        if (bytes >= wire_header_bytes) {
          launcher->launch<SumShared>(sum_rows<T>, launcher->blocks_for(length, cell_items, 6), wire_threads, rows,
                                      static_cast<typename T::Item*>(out), length);
        }
      }
      return arena.used();
    });
  });
}

TOPKUBE_API topkube_cuda_scatter_add(int device, void* stream, void* dense, int dtype, u64 length, const u32* indices,
                                     const void* values, int value_dtype, u64 count, u32* verdict) {
  const OnDevice on(device);
  if (on.error() || count == 0) return on.error();
  gpu::Launcher launcher(stream);
  launcher.launch(check_indices, launcher.blocks_for(count, 4 * wire_threads, 8), wire_threads, indices, count, length, false,
                  verdict);
  return with_dtype(dtype, [&](auto type) {
    return with_dtype(value_dtype, [&](auto value) {
      using T = decltype(type);
      using Value = decltype(value);
      launcher.launch(scatter_add_entries<T, Value>, launcher.blocks_for(count, 2 * wire_threads, 8), wire_threads,
                      static_cast<typename T::Item*>(dense), indices, static_cast<const typename Value::Item*>(values), count,
                      static_cast<const u32*>(verdict));
      return launcher.error();
    });
  });
}
