// The C functions of the wire format.
#include <algorithm>

#include "api.hpp"
#include "wire.hpp"

namespace topkube {
namespace {

u64 hashed_bytes(u64 bytes) { return bytes < wire_header_bytes ? 0 : bytes - 8; }

void launch_sums(gpu::Launcher& launcher, Hashed data, u64 inputs, u64 stride, u64* sums) {
  const u64 items = hash_blocks_of(data.size) * hash_lanes;
  if (items) {
    launcher.launch(hash_sums, inputs * launcher.blocks_for(items, hash_threads, 8), hash_threads, data, inputs, stride, sums);
  }
}

// Returns `count` encoded shards of `bytes` bytes, with their workspace.
Rows lay_out_rows(const void* buffer, u64 count, u64 stride, u64 bytes, u32* verdicts, Arena& arena) {
  Rows rows{static_cast<const std::uint8_t*>(buffer), count, stride, bytes, bytes / 4 + 1, nullptr, nullptr, verdicts};
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
  launch_sums(launcher, Hashed{rows.buffer, hashed}, rows.count, rows.stride, rows.sums);
  launcher.launch(check_seal, rows.count, 32, rows, hashed);
}

}  // namespace
}  // namespace topkube

using namespace topkube;

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

// Replaces `out` by the sum of `count` encoded shards, which are `stride` bytes apart (a multiple of 8). There is a verdict for
// each. The number of launches does not depend on `count`.
TOPKUBE_API topkube_cuda_sum_rows(int device, void* stream, const std::uint8_t* buffer, u64 count, u64 stride, u64 bytes, void* out,
                                  int dtype, u64 length, u32* verdicts, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      Arena arena(workspace);
      const Rows rows = lay_out_rows(buffer, count, stride, bytes, verdicts, arena);
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
  const DeviceScope scope(device);
  if (scope.error() || count == 0) return scope.error();
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
